"""Assembles the announcer: its configuration, the probe of the entry, etcd, the admin port."""
