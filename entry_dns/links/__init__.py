"""The inputs of the DNS tier: probes of entries, documents in etcd, client networks. Never decides an answer."""
