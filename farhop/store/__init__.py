"""What regions publish and how it is read: etcd under a lease, and an in-memory twin under the same contract."""
