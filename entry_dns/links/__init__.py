"""What feeds the tier from outside: probes of entries, documents in etcd, client networks."""
