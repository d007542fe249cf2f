"""The other balancers of this region: finding and following them, what they tell, and how replicas are shared.

Never lets a word leave the region and never chooses a replica.
"""
