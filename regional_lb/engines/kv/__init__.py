"""What engines say of their KV caches: events over ZMQ, the blocks they name, and the adapters that live beside them.

Never chooses a replica: `memory` and `fleet` ask what is held.
"""
