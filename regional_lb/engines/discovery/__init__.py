"""Where replicas are found while a balancer runs: sources, each in a module, and the roster of what they say.

Never probes a replica and never chooses: who is announced here is watched and picked elsewhere.
"""

from regional_lb.engines.discovery.follow import Discovery

__all__ = ["Discovery"]
