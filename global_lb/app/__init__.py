"""The process of a global balancer: its configuration, its ports, and the parts put together."""
