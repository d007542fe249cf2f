"""Convergence as a property: random faults over both tiers, and what must be as if they had never been soon after."""
