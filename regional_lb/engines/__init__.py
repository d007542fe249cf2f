"""The regional balancer's inputs from engines: discovery, metrics, KV events, probes. Never decides."""
