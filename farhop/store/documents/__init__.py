"""The documents that stand in etcd, each read strictly and written canonically. Never talks to etcd."""
