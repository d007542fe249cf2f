"""Engines' reports about their KV caches: events over ZMQ, the blocks that these name, and adapters.

Never chooses a replica: `memory` and `fleet` answer queries about cached blocks.
"""
