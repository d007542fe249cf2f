"""One region of L4s, the state of a router before them, and texts: for tests of rules that look into engines."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from farhop.balance.machine import Request, Tokens
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.sim.baselines.process import EnginePool
from farhop_lab.sim.baselines.router import RouterState, Target
from farhop_lab.sim.context import SimContext
from farhop_lab.sim.sites import Reporting, Watching, flat, gpus

if TYPE_CHECKING:
    from farhop.balance.machine import Usage
    from farhop_lab.sim.engines import Gpu

L4 = PROFILES["l4"]
BLOCK = L4.block_tokens


def words(seed: object, tokens: int) -> bytes:
    return Random(str(seed)).randbytes(2 * tokens).hex().encode()[: 4 * tokens]


class Pool:
    """One region of L4s, and the state of a router before them."""

    def __init__(self, engines: int) -> None:
        self.context = SimContext(1, flat(["us"], 0.0), Reporting(), Watching())
        self.pools = {"us": EnginePool(self.context, "us", gpus("l4", engines))}
        self.names = list(self.pools["us"].engines)
        self.state = RouterState(
            "us", [Target(name, "us", L4.prefill_ms_per_token) for name in self.names], {"us": 1.0}
        )
        self._asked = 0

    def ask(self, text: bytes, *, session: int = 0, max_tokens: int | None = None) -> Request:
        self._asked += 1
        size = len(text)
        return Request(
            f"r{self._asked}", "t", "m", size, size, (), 100.0, max_tokens, session=session, tokens=Tokens(text)
        )

    def holds(self, name: str, text: bytes) -> None:
        """An engine has computed this once."""
        engine: Gpu = self.pools["us"].engines[name]  # type: ignore[assignment]
        job = Job(f"h{self._asked}{name}{len(text)}", text)
        assert engine.submit(job) == 200
        self.context.timeline.run(self.context.timeline.now + 60.0)
        assert job.ended


class Job:
    max_tokens: int | None = 1
    answer_tokens: int | None = 1

    def __init__(self, name: str, prompt: bytes) -> None:
        self.id, self.prompt = name, prompt
        self.ended = False

    def first(self) -> None:
        """Nothing to note."""

    def done(self, usage: Usage) -> None:
        self.ended = True

    def broke(self, text: str) -> None:
        raise AssertionError(text)
