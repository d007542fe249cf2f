"""A whole fleet on this machine: real etcd, both tiers, emulated engines; a client and a span collector."""
