"""What feeds the regional balancer from engines: discovery, metrics, KV events, probes. Never decides."""
