"""Convergence as a property: after random faults in both tiers, the world must soon be as if they had never been."""
