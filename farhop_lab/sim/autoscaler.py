"""An autoscaler in virtual time: starts and stops a region's replicas to match a desired number.

Models KEDA or an HPA with a warm-up. It checks every LOOK_S; a replica serves `warm_up_s` after it was requested;
surplus replicas (the last ones) take no new requests and finish those they have. Never decides the desired number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.sim.replicas import ReplicaProcess
    from farhop_lab.sim.world import World

LOOK_S = 5.0


class Autoscaler:
    """See the module's head. The site's replicas are the maximum; the `first` of them serve from the start.

    `desired` returns the desired number; None means unknown, and nothing changes. `history` is a list of (time,
    desired, serving).
    """

    def __init__(
        self, world: World, region: str, desired: Callable[[], int | None], *, first: int, warm_up_s: float
    ) -> None:
        self._world, self._region, self._desired, self._warm_up_s = world, region, desired, warm_up_s
        self._coming = 0
        self.history: list[tuple[float, int, int]] = []
        for name in self._names()[first:]:
            self._process(name).refuse(refusing=True)
        world.at(LOOK_S, self._look)

    def _names(self) -> list[str]:
        return [replica.name for replica in self._world.regions[self._region].site.named()]

    def _process(self, name: str) -> ReplicaProcess:
        return self._world.process(self._region, name)

    def serving(self) -> int:
        """The number of running replicas."""
        return sum(process.listens for process in self._world.regions[self._region].processes.values())

    def _look(self) -> None:
        world = self._world
        world.at(world.now + LOOK_S, self._look)
        desired = self._desired()
        if desired is None or not world.regions[self._region].alive:
            return
        serving = self.serving()
        self.history.append((world.now, desired, serving))
        for _ in range(desired - serving - self._coming):
            self._coming += 1
            world.at(world.now + self._warm_up_s, self._came)
        names = [name for name in reversed(self._names()) if self._process(name).listens]
        for name in names[: max(0, serving - desired)]:
            self._process(name).refuse(refusing=True)  # it finishes what it has begun

    def _came(self) -> None:
        self._coming -= 1
        for name in self._names() if self._world.regions[self._region].alive else ():
            if not self._process(name).listens:
                self._process(name).refuse(refusing=False)
                return
