"""What both tiers' processes are made of around their machines: the door, the observer, the admin port, the life cycle.

The machine decides, the shell acts. Never knows a tier: what differs is handed in.
"""
