"""Scenarios over routers and seeds, what comes of them, and what follows. Start at `cell`."""
