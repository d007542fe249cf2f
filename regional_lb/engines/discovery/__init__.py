"""Discovery of replicas at run time: the sources, one per module, and the roster that merges them.

Never probes a replica and never chooses one: other modules do.
"""

from regional_lb.engines.discovery.follow import Discovery

__all__ = ["Discovery"]
