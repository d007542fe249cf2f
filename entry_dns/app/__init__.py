"""The top of the tier: its configuration, its processes, and how they are put together."""
