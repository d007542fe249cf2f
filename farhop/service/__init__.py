"""What both tiers' processes are made of around their machines: ingress, telemetry, admin port, life cycle.

The machine decides, the shell acts. Never knows a tier: what differs is handed in.
"""
