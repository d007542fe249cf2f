"""How regions publish documents and how these are read: etcd with leases, and an in-memory twin under the same
contract.
"""
