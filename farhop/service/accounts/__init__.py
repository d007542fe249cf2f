"""Which usage and audit records a balancer writes, and where they go. Never loses one silently."""
