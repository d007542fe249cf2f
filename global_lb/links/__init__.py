"""What feeds the global balancer: reports from etcd, gRPC links, prefix streams, drains. Never decides."""
