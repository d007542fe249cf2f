"""Prefix streams in virtual time: a region's shipped publisher, a wire, and a global balancer's shipped receiver.

The counterpart of global_lb.links.link and regional_lb.mesh.report. Invariants: an end that closed a call receives
nothing more, and the other end learns of it over the wire; a call that ended is followed by another, which continues
from what is known; an open call loses nothing, as a connection. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop_wire import region_pb2

from farhop.service.assembly.region_channel import silence_s
from global_lb.links.prefix_streams import PrefixGapError, read
from regional_lb.mesh.prefix_stream import LOOK_S, Pause

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop_lab.sim.context import SimContext
    from farhop_lab.sim.region import RegionProcess
    from farhop_lab.sim.timeline import Call
    from global_lb.links.prefix_streams import Content, Prefixes, PrefixStream
    from regional_lb.mesh.prefix_stream import PrefixPublisher, Steps


class PrefixSubscription:
    """Subscribes one global balancer to one region. `calls` counts its calls, `messages` the results of messages."""

    def __init__(
        self,
        context: SimContext,
        here: str,
        balancer: str,
        region: RegionProcess,
        prefixes: Prefixes,
        clock: Callable[[], float],
    ) -> None:
        self.context, self.here, self.region, self.clock = context, here, region, clock
        self._rng = context.rng(f"prefixes {balancer} {region.name}")
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
        """A call ended: open another after a pause."""
        if self._over:
            return
        pause_s = self.context.watching.ping_s * (0.8 + 0.4 * self._rng.random())
        self.context.timeline.after(pause_s, self._begin)

    def _begin(self) -> None:
        if self._over:
            return
        if self.context.wire.frozen_since(self.here, self.region.name) is not None:
            self.again()  # no connection can be opened
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

    __slots__ = (
        "_context", "_due", "_over", "_publisher", "_region", "_rested_at", "_steps", "_stream", "_subscription",
        "_watch",
    )  # fmt: skip

    def __init__(
        self, subscription: PrefixSubscription, stream: PrefixStream, request: region_pb2.PrefixesRequest
    ) -> None:
        self._subscription, self._stream, self._over = subscription, stream, False
        self._context, self._region = subscription.context, subscription.region
        self._steps: Steps | None = None
        self._publisher: PrefixPublisher | None = None
        self._due: Call | None = None
        self._rested_at = 0.0  # nothing wakes it before that
        self._context.wire.send(subscription.here, subscription.region.name, self._arrive, request)
        self._watch = self._context.timeline.after(self._patience_s, self._look)

    @property
    def here(self) -> str:
        """The global balancer's region."""
        return self._subscription.here

    # -- the region's end

    def _arrive(self, request: region_pb2.PrefixesRequest) -> None:
        region = self._region
        if not region.alive:
            self._back(self._end)
            return
        region.calls[self] = None
        self._publisher = region.reporter.prefixes
        self._steps = self._publisher.subscribe(request)
        self._send()

    def _send(self) -> None:
        context, region, subscription = self._context, self._region.name, self._subscription
        assert self._steps is not None
        assert self._publisher is not None
        self._publisher.wakes.pop(self._wake, None)
        if context.wire.frozen_since(region, subscription.here) is not None:
            self._due = context.timeline.after(LOOK_S, self._send)  # no reader is needed there: written is enough
            return
        for step in self._steps:
            if not isinstance(step, Pause):
                self._back(self._receive, step, self._read(step))
            elif step.seconds > 0.0:
                self._rested_at = context.timeline.now + step.rest_s
                self._due = context.timeline.at(self._rested_at + step.seconds, self._send)
                if step.wakes:
                    self._publisher.wakes[self._wake] = None
                return
        self.cut()

    def _read(self, message: region_pb2.PrefixDelta) -> Content | str:
        """The parsed message, parsed once for all subscribers that get the same."""
        region = self._region
        if region.told[0] is not message:
            region.told = message, read(message)
        return region.told[1]

    def _wake(self) -> None:
        """Something is to be sent: in a moment, since the machine is still at work."""
        self._rest()
        self._due = self._context.timeline.at(self._rested_at, self._send)

    def _rest(self) -> None:
        if self._due is not None:
            self._due.cancel()
        if self._publisher is not None:
            self._publisher.wakes.pop(self._wake, None)

    def _back(self, act: Callable[..., None], *args: object) -> None:
        self._context.wire.send(self._region.name, self._subscription.here, act, *args)

    def cut(self) -> None:
        """The region closes the call, or its process died; the subscriber notices."""
        self._left()
        self._back(self._end)

    def _left(self) -> None:
        """The subscriber is gone. Idempotent."""
        if self._steps is not None:
            self._steps.close()
        self._rest()
        self._region.calls.pop(self, None)

    # -- the global balancer's end

    @property
    def _patience_s(self) -> float:
        """The time that a channel may be silent before it is pinged, twice: then the ping is lost."""
        return 2.0 * silence_s(self._context.watching.ping_s)

    def _receive(self, message: region_pb2.PrefixDelta, content: Content | str) -> None:
        if self._over:
            return
        self._subscription.messages += 1
        try:
            for _ in self._stream.take(message, content):
                pass  # applying it takes no time
        except PrefixGapError:
            self.give_up()

    def _look(self) -> None:
        """Pings come back all the time, unless the link is frozen."""
        now = self._context.timeline.now
        frozen_at = self._context.wire.frozen_since(self._region.name, self._subscription.here)
        due = (now if frozen_at is None else frozen_at) + self._patience_s
        if due <= now:
            self.give_up()
        else:
            self._watch = self._context.timeline.at(due, self._look)

    def give_up(self) -> None:
        """Close the call and inform the region. Does nothing once it is over."""
        if self._over:
            return
        self._end()
        self._context.wire.send(self._subscription.here, self._region.name, self._left)

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._watch.cancel()
        self._stream.ended(self._subscription.clock())
        self._subscription.again()
