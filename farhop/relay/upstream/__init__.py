"""The upstream's side: connections, attempts, and how each ends. Never chooses an upstream."""
