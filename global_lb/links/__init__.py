"""The global balancer's inputs: reports from etcd, gRPC links, prefix streams, drains. Never decides."""
