"""Who a caller or another balancer is. Never reads a body."""
