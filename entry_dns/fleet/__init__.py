"""The state of the DNS tier: entries and their health, client networks and their latencies. Pure."""
