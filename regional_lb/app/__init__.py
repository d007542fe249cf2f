"""The process of a regional balancer: its configuration, its ports, and the parts put together."""
