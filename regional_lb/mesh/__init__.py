"""The other balancers of this region: finding and following them, exchanging state, and sharing replicas.

State never leaves the region. Never chooses a replica.
"""
