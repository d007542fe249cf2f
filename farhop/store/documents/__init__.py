"""The documents stored in etcd: their types, and a strict encoder and decoder for each. Never talks to etcd."""
