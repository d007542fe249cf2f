"""Scenarios over routers and seeds, their results, and comparisons of these. Start at `cell`."""
