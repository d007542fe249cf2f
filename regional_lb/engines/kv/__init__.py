"""Engines' reports about their KV caches: events over ZMQ, the blocks that these name, and adapters.

Never chooses a replica: `regional_lb.fleet.cache_mirror` answers what is cached.
"""
