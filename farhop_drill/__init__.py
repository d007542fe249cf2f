"""Failover drills: what a drill is, whether it may begin, how it runs and what it showed.

Beside the tiers, and imports neither: it speaks to a fleet as operators and clients do, and never touches a process.
"""
