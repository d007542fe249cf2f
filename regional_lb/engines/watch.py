"""Observes replicas: probes their health, warms them up, scrapes their metrics and their GPUs', reports the results.

There is one jittered task per replica and kind of observation, so that a slow one never delays another; tasks start and
end with their replicas. Invariants: an unreadable page is a failed scrape, not a failed replica: the last sample ages,
and an engine that does not list its models is taken to serve the configured ones; every rejected value is counted, by
reason; observations of one process never count for another that replaced it. Never decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from math import inf
from typing import TYPE_CHECKING

import grpc
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.relay.upstream.fetch import FetchError
from farhop.relay.upstream.pool import Pool, UpstreamLimits
from farhop.service.process.tasks import Tasks
from regional_lb.engines import probes
from regional_lb.engines.config import place_of
from regional_lb.engines.gpu_exporters import GpuExporters
from regional_lb.engines.members import Members, read_listing
from regional_lb.engines.pages import Pages
from regional_lb.engines.signals import engines as signals
from regional_lb.engines.signals import slots
from regional_lb.engines.signals.exposition import PageError, Places
from regional_lb.fleet.table import SAMPLE_FRESH_S
from regional_lb.fleet.view import ReplicaProbed, ReplicaSampled, ViewSwapped, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from random import Random

    from farhop.balance.machine import Address, Event
    from farhop.balance.outcome import Outcome
    from regional_lb.engines.config import EnginesConfig, ReplicaConfig
    from regional_lb.engines.members import Listing
    from regional_lb.fleet.view import Sample

SWAP_S = 0.1  # within which what engines say that they serve is taken in together
SWEEP_S = 0.1  # between two looks at whether those leaving have finished
# Few servers close so soon what they answered on several times before, unless their process ends; longer than between
# two scrapes of an engine at rest.
_CLOSES_SOON_S = 1.9
_WARMUP_S = 60.0  # the most that each completion of a warm-up may take: kernels are compiled, graphs captured
_ASLEEP = "its metrics say that it sleeps; wake it up"
_HUNG = "it generates nothing, whatever its health page says"
# Of an engine, or of a proxy before it. By 501 it says that it lists none, as does one that breaks the connection off.
_NO_ANSWER = ("unreachable", "timeout", "status 500", "status 502", "status 503", "status 504")
_REMEDY = "is the engine there? else correct its `url`"
_ELSEWHERE = ", or name the page where it tells its health (`probe.path`)"
_FRESH_SHARE = 0.5  # of how long a sample counts, between two of an engine at rest


class _Observed:
    """What is known of a replica, while it is watched."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.config, self.name = config, config.label
        self.tasks: list[asyncio.Task[None]] = []
        self.problems: dict[str, str] = {}  # by what was asked: the last result
        self.ready = False  # its last probe said so
        self.able = False  # it was ready and is not held back: one whose probe failed may still be picked
        self.hung = False
        self.asleep = False  # its last scrape said so
        self.at_rest = False  # its last scrape said so
        self.models_known = False  # it said what it serves, or that it has no such page, and was the same since
        self.restart_suspected = asyncio.Event()  # another process may have taken its place
        self.models_doubted = asyncio.Event()  # it may serve others than it listed
        self.closed_after_s = inf  # for how long the connection had rested that it closed last
        # The last scrape's figures that change with its work, and since when they have been these.
        self.worked: tuple[tuple[float | None, ...], float] | None = None
        self._current = True

    def is_current(self) -> bool:
        """Whether it is watched still: it has not left, and no other endpoint has its name."""
        return self._current

    def let_go(self) -> None:
        """End its tasks. What they find after this does not count."""
        self._current = False
        for task in self.tasks:
            task.cancel()


class ReplicaWatcher:
    """Watches all replicas. `react` takes events; `refused` counts what was rejected, by reason.

    `context` and `trouble` are as in the relay's pool: probes trust the certificates that requests trust; `credentials`
    is the same for gRPC. `answered_at` gives when a replica last answered a request well, `in_flight` how many it works
    on, `models_ruled` whether the law has rules of models; `warn` is called with a replica's name, what is wrong with
    it and what was asked; `watched` with all watched replicas when that set changes.
    """

    def __init__(
        self,
        config: EnginesConfig,
        *,
        react: Callable[[Event], None],
        refused: Callable[[str], None],
        clock: Callable[[], float],
        rng: Random,
        context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        trouble: Callable[[Address, str], None] = lambda _address, _why: None,
        credentials: Callable[[], grpc.ChannelCredentials] = grpc.ssl_channel_credentials,
        answered_at: Callable[[str], float] = lambda _label: -inf,
        in_flight: Callable[[str], int] = lambda _name: 0,
        models_ruled: Callable[[], bool] = lambda: True,
        warn: Callable[[str, str, str], None] = lambda _name, _problem, _what: None,
        watched: Callable[[Mapping[str, ReplicaConfig]], None] = lambda _watched: None,
    ) -> None:
        self._config, self._watch = config, config.watch
        self._credentials, self._answered_at = credentials, answered_at
        self._key = config.engine_key.get_secret_value() if config.engine_key else None
        self._react, self._refused, self._clock, self._rng = react, refused, clock, rng
        self._in_flight, self._models_ruled, self._warn, self._watched = in_flight, models_ruled, warn, watched
        # No request lives for longer than `request_s`: after that a leaving replica has none.
        self.members = Members(config.limits.request_s)
        self._tasks = Tasks()
        self._pool = Pool(UpstreamLimits(connect_s=self._watch.timeout_s), context, trouble)
        self._pool.on_closed = self._closed
        self._pages = Pages(self._pool, self._watch.timeout_s, self._key)
        self._gpu_exporters = GpuExporters(
            config, tasks=self._tasks, pages=self._pages, pause=self._pause, refused=refused, clock=clock
        )
        self._observed: dict[str, _Observed] = {}  # by name
        self._at: dict[Address, list[_Observed]] = {}  # mostly one
        self._sweeping: asyncio.Task[None] | None = None
        self._swapping: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin. The view exists at once; the state of its replicas becomes known with their first probes."""
        self.members.announce(self._config.replicas, self._clock())
        self._swap()

    def announce(self, replicas: Sequence[ReplicaConfig]) -> None:
        """These are all replicas from now on (names are unique); a replica that is not among them finishes its work."""
        if self.members.announce(replicas, self._clock()):
            self._swap()
            if self.members.leaving and (self._sweeping is None or self._sweeping.done()):
                self._sweeping = self._tasks.start(self._sweep(), "let go of replicas")

    def _swap(self) -> None:
        """Announce the view, and watch exactly its replicas."""
        left_before = self.members.left_out
        self._react(ViewSwapped(view_of(self.members.replicas())))
        for name, why in self.members.left_out.items():
            if name not in left_before:
                self._refused("discovery_limit")
                self._warn(name, f"left out: {why}", "left out")
        watched = self.members.watched
        for name, one in list(self._observed.items()):
            now = watched.get(name)
            if now is not one.config and now != one.config:  # the first spares thousands of comparisons, field by field
                del self._observed[name]
                self._at[one.config.address].remove(one)
                if not self._at[one.config.address]:
                    del self._at[one.config.address]
                one.let_go()
        for name, config in watched.items():
            if name not in self._observed:
                one = self._observed[name] = _Observed(config)
                self._at.setdefault(config.address, []).append(one)
                looks = {"probe": self._probe, "scrape": self._scrape, "models of": self._ask_models}
                if config.probe.generate_s:
                    looks["tokens of"] = self._generate
                # They begin after this call.
                one.tasks = [self._tasks.start(look(one), f"{what} {name}") for what, look in looks.items()]
        self._gpu_exporters.watch({config.dcgm for config in watched.values() if config.dcgm})
        self._watched(watched)

    async def _sweep(self) -> None:
        while self.members.leaving:
            await asyncio.sleep(SWEEP_S)
            if self.members.sweep(self._clock(), lambda name: not self._in_flight(name)):
                self._swap()

    def problems(self, name: str) -> list[str]:
        """Problems of the last observations of a replica, and their reasons."""
        return list(self._observed[name].problems.values()) if name in self._observed else []

    def _problem(self, one: _Observed, what: str, problem: str, log: bool = True) -> None:
        """Record the result of a check, "" if it was good. Ignored for replicas that are no longer watched."""
        if not problem:
            one.problems.pop(what, None)
        elif one.is_current():
            one.problems[what] = problem
            if log:
                self._warn(one.name, problem, what)

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.close()
        await self._pool.close()

    async def _probe(self, one: _Observed) -> None:
        replica = one.config
        path = _engine(replica).health
        prober = probes.prober(replica, path, self._pool, self._watch.timeout_s, self._credentials, self._key)
        fails, cold, known, woken, was_ready = 0, replica.probe.warmup > 0, False, False, True
        try:
            while one.is_current():
                verdict = await prober.look()
                if not one.is_current():
                    return
                if verdict is probes.READY and one.asleep:
                    verdict = probes.UNREADY  # a request, a warm-up's too, would hang there or end its process
                if one.restart_suspected.is_set() or not verdict.ok:
                    one.restart_suspected.clear()
                    one.models_known = False
                known = known and one.models_known
                if verdict is probes.READY and not known and self._models_ruled():
                    known = await self._learn_models(one)
                    verdict = verdict if known else probes.UNREADY
                if not one.is_current():
                    return
                fails = 0 if verdict.ok else fails + 1
                if verdict is probes.READY and not was_ready:
                    one.models_doubted.set()
                was_ready = verdict is probes.READY
                cold = cold or (fails >= self._watch.fall and replica.probe.warmup > 0)
                if cold and verdict is probes.READY:
                    self._probed(one, probes.UNREADY)
                    cold = not await self._warm_up(replica)
                    verdict = probes.FAILED if cold else verdict
                # Said once that it is down: one that starts together with us is there a moment later.
                why = _ASLEEP if one.asleep and not prober.why else _unwell(prober.why, verdict)
                self._problem(one, "health", why, log=fails >= self._watch.fall)
                if verdict.gone and one.able and self._models_ruled():
                    verdict = probes.UNREADY  # at once: what listens there next is another process
                self._probed(one, verdict)
                if woken:  # not twice in a row: there are servers that close whatever they answered on
                    woken = False
                    await self._pause(self._watch.probe_s)
                else:
                    woken = await self._pause_unless_suspected(one)
                if not woken and verdict is probes.READY and one.at_rest:
                    woken = await self._pause_unless_suspected(one)  # every second look is spared: its page was there
        finally:
            await prober.close()

    async def _pause_unless_suspected(self, one: _Observed) -> bool:
        """Whether a restart was suspected before the next probe was due, and the law has rules of models."""
        if not self._models_ruled():
            await self._pause(self._watch.probe_s)
            return False
        return await self._pause_unless(one.restart_suspected, self._watch.probe_s)

    async def _pause_unless(self, event: asyncio.Event, seconds: float) -> bool:
        """Whether the event came before about so many seconds were over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._jittered(seconds)):
                return await event.wait()
        return False

    def _closed(self, address: Address, rested_s: float) -> None:
        """The other side closed a connection: the process may have ended, and another may take its place at once."""
        for one in tuple(self._at.get(address, ())):
            one.restart_suspected.set()
            before_s, one.closed_after_s = one.closed_after_s, rested_s
            # One that always closes after the same time keeps connections for no longer.
            alike = abs(rested_s - before_s) <= 0.1 * (1.0 + rested_s)
            if rested_s < _CLOSES_SOON_S and not alike and self._models_ruled():
                self._hold_back(one)

    def _replaced(self, one: _Observed) -> None:
        """Another process has taken the place."""
        one.restart_suspected.set()
        one.models_doubted.set()
        if self._models_ruled():
            self._hold_back(one)

    def recheck(self, name: str, reason: Outcome) -> None:
        """A request found that nothing listens at a replica's address, or that it does not serve the model."""
        if (one := self._observed.get(name)) is None:
            return
        if reason is outcome.CONNECT_FAILED:
            for other in tuple(self._at[one.config.address]):
                self._replaced(other)  # what listens there next is another process
        else:
            one.models_doubted.set()

    def _hold_back(self, one: _Observed) -> None:
        """No work before the next probe, which asks what it serves."""
        one.models_known = False
        if one.able and one.is_current():
            self._probed(one, probes.UNREADY)

    def models_bound(self) -> None:
        """The law that comes next has rules of models: who has not said what it serves gets no work from now on."""
        for one in list(self._observed.values()):
            if not one.models_known:
                self._hold_back(one)

    async def _learn_models(self, one: _Observed) -> bool:
        """Whether it said what it serves, or answered that it does not say, and the view has it: it may be another
        process than before, and the law's rules for what its models are based on bind its first prompt, too."""
        asked_again = lists_none = False
        while not one.models_known and not lists_none:
            try:
                await self._listed(one)
            except (PageError, FetchError) as error:
                if error.reason == "cut" and not asked_again:  # the process may have ended in the midst of it
                    asked_again = True
                    continue
                if _no_answer(error):
                    self._problem(one, "models", f"{one.config.url}/v1/models: {error}; {_remedy(error)}")
                    return False
                lists_none = True
                self._note_no_listing(one, error)
            if not one.is_current():
                return False
        if self._swapping is not None and not self._swapping.done():
            if one.able:
                self._probed(one, probes.UNREADY)
            await asyncio.wait((self._swapping,))
        return lists_none or one.models_known  # else a restart is suspected again

    def _note_no_listing(self, one: _Observed, error: PageError | FetchError) -> None:
        """What lists nothing, or nothing that can be read, may do so a moment later: it is asked with each probe."""
        if error.reason in ("status", "key") and not _no_answer(error) and one.is_current():
            one.models_known = True

    def _probed(self, one: _Observed, result: probes.ProbeResult) -> None:
        one.ready = result is probes.READY
        if result.ok:
            one.able = result.ready
        fault, strain = self._gpu_exporters.health_of(one.config)
        hung = _HUNG if one.hung and one.ready else ""
        self._react(ReplicaProbed(one.name, result.ok, fault or hung, result.ready, strain))

    async def _warm_up(self, replica: ReplicaConfig) -> bool:
        """Whether it went through. An engine that refuses such requests is not warmed up, and serves all the same."""
        for _ in range(replica.probe.warmup):
            answered = await probes.generates(self._pool, replica, self._key, _WARMUP_S)
            if answered is None:
                self._refused("generate_status")
                return True
            if not answered:
                return False
        return True

    async def _generate(self, one: _Observed) -> None:
        """See whether it still generates whenever no answer of its has shown that for a while."""
        every_s = one.config.probe.generate_s
        shown_at = self._clock()
        while one.is_current():
            await self._pause(every_s / 4.0)
            shown_at = max(shown_at, self._answered_at(one.name))
            if self._clock() - shown_at < every_s:
                one.hung = False
            elif one.ready:
                answered = await probes.generates(self._pool, one.config, self._key, every_s)
                if answered is False and _worked_since(one, self._clock() - every_s / 2.0):
                    answered = True  # busy with what takes long: ours waits its turn
                one.hung = answered is False
                if one.hung:
                    continue
                if answered is None:
                    self._refused("generate_status")
                shown_at = self._clock()

    async def _scrape(self, one: _Observed) -> None:
        replica = one.config
        engine, (address, path) = _engine(replica), _metrics_place(replica)
        key = self._key if address == replica.address else None  # an exporter elsewhere is not the engine
        places, before = Places(), None
        while one.is_current():
            try:
                page = await self._pages.metrics(address, path, key)
                sample = signals.read_page(page, self._clock(), self._dropped, engine, places)
                if not one.is_current():
                    return
                if replica.probe.generate_s:
                    _note_work(one, sample)
                if sample.slots is not None and self.members.runs(one.name, sample.slots, by_metrics=True):
                    self._take_in()
                one.asleep = sample.asleep
                if before is not None and sample.restarted(before):
                    self._replaced(one)
                if sample.asleep and one.able:
                    self._hold_back(one)
                self._react(ReplicaSampled(one.name, sample))
                one.at_rest = before is not None and sample.same(before) and not self._in_flight(one.name)
                before = sample
                self._problem(one, "metrics", "")
            except (PageError, FetchError) as error:
                self._refused(f"metrics_{error.reason}")
                if one.ready:  # else that is said already
                    problem = f"{probes.url_of(address, path)}: {error}; its load is not seen until it serves metrics"
                    self._problem(one, "metrics", problem)
                places, one.at_rest = Places(), False
            await self._pause(self._idle_scrape_s if one.at_rest else self._watch.scrape_s)

    @property
    def _idle_scrape_s(self) -> float:
        """Seconds between two scrapes of an idle engine, whose figures do not change: three times as long as of a busy
        one, but short enough that its last sample is still fresh when the next one comes."""
        return max(self._watch.scrape_s, min(3.0 * self._watch.scrape_s, _FRESH_SHARE * SAMPLE_FRESH_S))

    async def _ask_models(self, one: _Observed) -> None:
        """What it says that it serves: slowly, but at once where that is in doubt, and as often as probes until it is
        known where only it can say, and until it answers at all. One that starts together with us is no other a minute
        later."""
        replica = one.config
        unknown, unreached = not replica.models, True
        while one.is_current():
            one.models_doubted.clear()
            if replica.slots is None and replica.engine in slots.BY_MODEL:
                await self._slots_by_model(one)
            try:
                await self._listed(one)
                unknown = unreached = False
            except (PageError, FetchError) as error:
                unreached = unreached and error.reason == "unreachable"
                self._note_no_listing(one, error)
                if unknown:
                    self._refused(f"models_{error.reason}")
                    self._problem(one, "models", f"{replica.url}/v1/models: {error}; {_remedy(error)}")
            await self._pause(self._watch.probe_s)
            if not unknown and not unreached:
                await self._pause_unless(one.models_doubted, max(0.0, self._watch.models_s - self._watch.probe_s))

    async def _listed(self, one: _Observed) -> None:
        """Take in what it says that it serves. Raises PageError, FetchError."""
        listing = read_listing(await self._pages.models(one.config.address))
        if one.config.slots is None:
            listing = replace(listing, slots=await self._slots(one.config, listing))
        if one.is_current():
            if self.members.listed(one.name, listing):
                self._compare(one.name)
                self._take_in()
            one.models_known = True
        self._problem(one, "models", "")

    def _take_in(self) -> None:
        """An engine reported new facts: update the view."""
        if self._swapping is None or self._swapping.done():
            self._swapping = self._tasks.start(self._swap_soon(), "take in what engines serve")

    async def _swap_soon(self) -> None:
        """A thousand engines that say at once what they serve are a few views, not a thousand."""
        await asyncio.sleep(SWAP_S)
        self._swap()

    def _compare(self, name: str) -> None:
        """Say so where it serves something else than it should."""
        missing = self.members.missing(name)
        if missing:
            self._refused("models_other")
            names = ", ".join(sorted(missing)[:8])
            self._warn(name, f"does not serve {names}: not in its /v1/models; correct `models`", "models it serves")

    async def _slots(self, replica: ReplicaConfig, listing: Listing) -> int | None:
        """How many requests the engine reports that it runs at once; the last value if it does not answer now."""
        try:
            return await self._pages.slots(replica.address, replica.engine or listing.engine)
        except FetchError:
            return self.members.slots(replica.label)

    async def _slots_by_model(self, one: _Observed) -> None:
        with contextlib.suppress(FetchError):
            found = await self._pages.slots_by_model(one.config)
            if found is not None and one.is_current() and self.members.runs(one.name, found, by_metrics=False):
                self._take_in()

    def _dropped(self, reason: str) -> None:
        self._refused(f"metrics_{reason}")

    def _pause(self, seconds: float) -> Coroutine[None, None, None]:
        # ±20 %, so that many balancers do not look at one engine in step.
        return asyncio.sleep(self._jittered(seconds))

    def _jittered(self, seconds: float) -> float:
        return seconds * (0.8 + 0.4 * self._rng.random())


def _note_work(one: _Observed, sample: Sample) -> None:
    numbers = (sample.running, sample.kv_usage, sample.prefix_queries, sample.prefix_hits)
    if one.worked is None:
        one.worked = numbers, -inf  # a first look shows no work
    elif one.worked[0] != numbers:
        one.worked = numbers, sample.at


def _worked_since(one: _Observed, since: float) -> bool:
    """Whether an engine's numbers moved: one that hangs says the same ones for ever, if it says any. Not how many
    wait: a server counts those for an engine that hangs, too."""
    return one.worked is not None and one.worked[1] >= since


def _unwell(why: str, seen: probes.ProbeResult) -> str:
    """The text for a probe that was not READY."""
    if not why:
        return ""
    if seen.ok:
        return f"{why}; it is not ready yet"
    return f"{why}; {_REMEDY}{_ELSEWHERE if ': status ' in why else ''}"


def _no_answer(error: PageError | FetchError) -> bool:
    """Whether the engine has not said what it serves, nor that it does not say. A list too long to be read is one."""
    return error.reason == "size" or str(error) in _NO_ANSWER


def _remedy(error: PageError | FetchError) -> str:
    """The remedy for a listing that could not be read."""
    if isinstance(error, FetchError):
        return _REMEDY
    return "give `engine_key`, or its `models`" if error.reason == "key" else f"{_REMEDY}, or give it `models`"


def _engine(replica: ReplicaConfig) -> signals.Engine:
    return signals.ENGINES[replica.engine] if replica.engine is not None else signals.ANY


def _metrics_place(replica: ReplicaConfig) -> tuple[Address, str]:
    """Where its page is: where the configuration says, or where such engines have it."""
    if replica.metrics:
        return place_of(replica.metrics)
    engine, address = _engine(replica), replica.address
    return replace(address, port=engine.metrics_port or address.port), engine.metrics
