"""The engines' present caches, block by block, as known to a router that reads KV events or asks a controller.

Without the delay of either. Reads engines, never changes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_lab.engine.core.sequence import EngineRequest
from farhop_lab.engine.core.sequence import Sequence as Work
from farhop_lab.sim.baselines.router import text_of
from farhop_lab.sim.engines import Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.balance.machine import Request
    from farhop_lab.sim.baselines.process import EnginePool
    from farhop_lab.sim.baselines.router import RouterState


class EngineCaches:
    """The caches of all engines of a world. One model: the names of a text's blocks are the same everywhere."""

    def __init__(self, pools: Mapping[str, EnginePool]) -> None:
        self._pools = pools
        self._last: tuple[str, Work] | None = None

    def gpu(self, target: str, state: RouterState) -> Gpu | None:
        """The engine itself; None for one that is not a Gpu."""
        engine = self._pools[state.targets[target].region].engines[target]
        return engine if isinstance(engine, Gpu) else None

    def work(self, request: Request, gpu: Gpu) -> Work | None:
        """The request as the engine would take it; None for one that it would refuse."""
        if self._last is None or self._last[0] != request.id:
            try:
                work = Work(
                    request.id,
                    EngineRequest(text_of(request), request.max_tokens),
                    gpu.text_model,
                    gpu.core.profile,
                )
            except ValueError:  # too long for it: the engine itself refuses
                return None
            self._last = request.id, work
        return self._last[1]

    def names(self, request: Request, gpu: Gpu) -> list[int]:
        """Names of the full blocks of its prompt, without one that only the last token would fill: that token is
        computed.
        """
        work = self.work(request, gpu)
        return [] if work is None else work.block_names((work.total_tokens - 1) // gpu.core.profile.block_tokens)
