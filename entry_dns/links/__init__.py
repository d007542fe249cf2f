"""The tier's inputs: probes of entries, documents in etcd, client networks."""
