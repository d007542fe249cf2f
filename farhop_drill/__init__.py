"""Failover drills: what a drill is, whether it may begin, how it runs and what it showed.

It imports neither tier: it talks to a fleet as operators and clients do, and never touches a process.
"""
