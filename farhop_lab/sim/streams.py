"""The prefix streams in virtual time: a region's shipped teller, a wire, and the shipped room of a global balancer.

The twin of what global_lb.link and regional_lb.report do at the two ends of such a call. Invariants: an end that gave a
call up hears no more of it, and the other end is told over the wire; a call that ended is followed by another, which
goes on from what is known; nothing of a call is lost while it stands, as nothing is on a connection. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_wire import region_pb2

from global_lb.link import silence_s
from global_lb.prefixes import PrefixGapError
from regional_lb.prefixes import LOOK_S, Pause

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.sim.region import RegionProcess
    from farhop_lab.sim.stage import Stage
    from farhop_lab.sim.timeline import Call
    from global_lb.prefixes import Prefixes, PrefixStream
    from regional_lb.prefixes import PrefixTeller, Steps


class Line:
    """Keeps one global balancer listening to one region. `calls` counts its calls, `messages` what came of them."""

    def __init__(
        self,
        stage: Stage,
        here: str,
        balancer: str,
        region: RegionProcess,
        prefixes: Prefixes,
        clock: Callable[[], float],
    ) -> None:
        self.stage, self.here, self.region, self.clock = stage, here, region, clock
        self._rng = stage.rng(f"prefixes {balancer} {region.name}")
        self.calls = self.messages = 0
        self._balancer, self._prefixes = balancer, prefixes
        self._call: PrefixCall | None = None
        self._over = False
        self._begin()

    def close(self) -> None:
        """Its balancer is gone: the call breaks, and no other follows."""
        self._over = True
        if self._call is not None:
            self._call.give_up()

    def again(self) -> None:
        """A call is over: another, after a while."""
        if self._over:
            return
        pause_s = self.stage.watching.ping_s * (0.8 + 0.4 * self._rng.random())
        self.stage.timeline.after(pause_s, self._begin)

    def _begin(self) -> None:
        if self._over:
            return
        if self.stage.wire.frozen_since(self.here, self.region.name) is not None:
            self.again()  # no connection comes about
            return
        self.calls += 1
        stream = self._prefixes.begin((self.region.name, self.region.instance))
        request = region_pb2.PrefixesRequest(
            balancer=self._balancer,
            region=self.here,
            known_incarnation=stream.known_incarnation,
            known_seq=stream.known_seq,
            law_epoch=self._prefixes.law_epoch,
        )
        self._call = PrefixCall(self, stream, request)


class PrefixCall:
    """One call, both ends of it."""

    __slots__ = ("_due", "_line", "_over", "_region", "_stage", "_steps", "_stream", "_teller", "_watch")

    def __init__(self, line: Line, stream: PrefixStream, request: region_pb2.PrefixesRequest) -> None:
        self._line, self._stream, self._over = line, stream, False
        self._stage, self._region = line.stage, line.region
        self._steps: Steps | None = None
        self._teller: PrefixTeller | None = None
        self._due: Call | None = None
        self._stage.wire.send(line.here, line.region.name, self._arrive, request)
        self._watch = self._stage.timeline.after(self._patience_s, self._look)

    @property
    def here(self) -> str:
        """Where the global balancer stands."""
        return self._line.here

    # -- there: the region's end

    def _arrive(self, request: region_pb2.PrefixesRequest) -> None:
        region = self._region
        if not region.alive:
            self._back(self._end)
            return
        region.calls[self] = None
        self._teller = region.reporter.prefixes
        self._steps = self._teller.tell(request)
        self._tell()

    def _tell(self) -> None:
        stage, region, line = self._stage, self._region.name, self._line
        assert self._steps is not None
        assert self._teller is not None
        self._teller.wakes.pop(self._wake, None)
        if stage.wire.frozen_since(region, line.here) is not None:
            self._due = stage.timeline.after(LOOK_S, self._tell)  # nothing is read there: what was written is enough
            return
        for step in self._steps:
            if not isinstance(step, Pause):
                self._back(self._hear, step)
            elif step.seconds > 0.0:
                self._due = stage.timeline.after(step.seconds, self._tell)
                if step.wakes:
                    self._teller.wakes[self._wake] = None
                return
        self.cut()

    def _wake(self) -> None:
        """There is something to tell: in a moment, since the machine is not done with what it does."""
        self._rest()
        self._due = self._stage.timeline.after(0.0, self._tell)

    def _rest(self) -> None:
        if self._due is not None:
            self._due.cancel()
        if self._teller is not None:
            self._teller.wakes.pop(self._wake, None)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._stage.wire.send(self._region.name, self._line.here, act, *args)

    def cut(self) -> None:
        """The region says no more, or its process is gone; whoever is connected notices."""
        self._left()
        self._back(self._end)

    def _left(self) -> None:
        """Nobody is told any more. Idempotent."""
        if self._steps is not None:
            self._steps.close()
        self._rest()
        self._region.calls.pop(self, None)

    # -- here: the global balancer's

    @property
    def _patience_s(self) -> float:
        """As long as a channel may be silent before it is pinged, and as long again until that is lost."""
        return 2.0 * silence_s(self._stage.watching.ping_s)

    def _hear(self, message: region_pb2.PrefixDelta) -> None:
        if self._over:
            return
        self._line.messages += 1
        try:
            for _ in self._stream.take(message):
                pass  # it takes no time
        except PrefixGapError:
            self.give_up()

    def _look(self) -> None:
        """Pings come back all the time, unless the link is frozen."""
        now = self._stage.timeline.now
        frozen_at = self._stage.wire.frozen_since(self._region.name, self._line.here)
        due = (now if frozen_at is None else frozen_at) + self._patience_s
        if due <= now:
            self.give_up()
        else:
            self._watch = self._stage.timeline.at(due, self._look)

    def give_up(self) -> None:
        """Hear no more of it, and let the region know. Harmless once it is over."""
        if self._over:
            return
        self._end()
        self._stage.wire.send(self._line.here, self._region.name, self._left)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._watch.cancel()
        self._stream.ended(self._line.clock())
        self._line.again()
