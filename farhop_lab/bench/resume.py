"""Streams interrupted at random bytes, compared with the same answers uninterrupted: what is lost, doubled, altered.

A real world (etcd, both tiers and emulated engines in three regions, each its own process) with a pipe before each
engine that cuts an answer at a random byte; and sometimes a SIGKILL of an engine or a regional balancer, which is
started again. Each answer is compared with that of an engine asked directly. Never judges by times; a stream that ends
with an error is counted with its reason, and its text must still be a beginning of the whole one. The engines write
more than ASCII: characters of two to four bytes that tokens cut in two, combining marks, characters that JSON escapes.
Stop strings are taken from what the engine would generate, so that seams fall into them. Also by text: then the engines
report no ids, and an engine that continues tokenizes the text anew.

Separately: a region killed whole under load, repeatedly (`regions_killed`): how many of its streams end whole, why the
others do not, and how long clients waited at the seam.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from farhop_lab.world.client import Delta, Result, answer, ask
from farhop_lab.world.world import HOST, World, WorldError, WorldSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


STREAMS = 8  # at once
KILL_EVERY = 40  # interruptions by a pipe for one SIGKILL
CUT_SHARE, CUT_AGAIN_SHARE = 0.9, 0.05  # of first attempts, and of continuations
EVENT_BYTES = 220  # about the bytes of a token on the wire
TOKENS = 32
NO_STOP = "never said"  # a stop string; the run adds another one that the engine would generate
STOP_CHARS_MAX = 24
REGIONS = frozenset(("virginia", "frankfurt", "tokyo"))
KEY = "sk-farhop-anywhere"
_PIECE, _TIMEOUT_S = 65536, 60.0
# In requests of ours alone: a continuation by ids, by text.
CONTINUES = (b'"prompt":[', b'"continuous_usage_stats":true')
_MODE: dict[str, Any] = {"resume": {"mode": "text"}}
BY_TEXT: dict[str, Any] = {"engine": "sglang", "global_config": _MODE, "regional_config": _MODE}
VICTIM, KILLED_STREAMS, KILLED_TOKENS, BEGUN_TOKENS = "virginia", 48, 300, 5
_RESUMES = re.compile(r"^farhop_resumes_total\{([^}]*)\} ([0-9.e+]+)$", re.M)
_LABEL = re.compile(r'(outcome|reason)="([^"]*)"')


class ResumeReport(msgspec.Struct):
    """What was interrupted and how it ended. `wrong` lists violations; `ended` counts streams that ended with an error
    event, by shape and the error's code; `counted` are the balancers' counters, by outcome and reason.
    """

    streams: int = 0
    cuts: int = 0
    kills: int = 0
    whole: int = 0
    lost_bytes: int = 0
    doubled_or_altered: int = 0
    ended: Counter[str] = msgspec.field(default_factory=Counter)
    shapes: Counter[str] = msgspec.field(default_factory=Counter)
    counted: Counter[str] = msgspec.field(default_factory=Counter)
    wrong: list[str] = msgspec.field(default_factory=list)

    @property
    def interruptions(self) -> int:
        """Cuts and kills; a kill ends several streams, and counts once."""
        return self.cuts + self.kills


def shapes(model: str, number: int) -> dict[str, tuple[str, dict[str, Any], bool]]:
    """The path, the body, and whether such a stream can be continued, by name. Pure; no two numbers give the same
    prompt.
    """
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number}: tell me of the sea"}]}
    wide: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number}: erzähl vom Meer 海の話を 🌊"}]}
    text: dict[str, Any] = {"prompt": f"{number}: once upon a time"}
    most, usage = {"max_tokens": TOKENS, "ignore_eos": True}, {"stream_options": {"include_usage": True}}
    tool = {"type": "function", "function": {"name": "sea", "parameters": {"type": "object"}}}
    c, t = "/v1/chat/completions", "/v1/completions"
    made: dict[str, tuple[str, dict[str, Any], bool]] = {
        "chat": (c, chat | most, True),
        "chat, usage": (c, chat | most | usage, True),
        "chat, wide characters": (c, wide | most | usage, True),
        "chat, system and turns": (c, {"messages": [{"role": "system", "content": "Be brief."}, *chat["messages"],
            {"role": "assistant", "content": "It is wide."}, {"role": "user", "content": "And?"}]} | most, True),
        "chat, max_completion_tokens": (c, chat | usage | {"max_completion_tokens": 9, "ignore_eos": True}, True),
        "chat, min_tokens": (c, chat | usage | {"max_tokens": 90, "min_tokens": 20}, True),
        "chat, to its own end": (c, chat | usage | {"max_tokens": 400}, True),
        "chat, sampling": (c, chat | most | {"temperature": 0.7, "top_p": 0.9, "seed": number}, True),
        "completion": (t, text | most, True),
        "completion, usage": (t, text | most | usage, True),
        "completion, default length": (t, text | usage, True),
        "completion, cut inside a character": (t, {"prompt": f"{number}: das Meer überspült"} | most | usage, True),
        "completion, one token": (t, text | usage | {"max_tokens": 1}, True),
        "chat, stop": (c, chat | most | usage | {"stop": [NO_STOP]}, True),
        "chat, stop, shown": (c, chat | most | usage | {"stop": [NO_STOP], "include_stop_str_in_output": True}, True),
        "chat, stop, hidden": (c, wide | most | {"stop": [NO_STOP], "include_stop_str_in_output": False}, True),
        "chat, stop, min_tokens": (c, chat | most | usage | {"stop": [NO_STOP], "min_tokens": 20}, True),
        "completion, stop": (t, text | most | usage | {"stop": NO_STOP}, True),
        "completion, stop, to its own end": (t, text | usage | {"stop": [NO_STOP], "max_tokens": 400}, True),
        "n": (c, chat | most | usage | {"n": 2}, False),
        "tools": (c, chat | most | {"tools": [tool]}, False),
        "JSON": (c, chat | most | {"response_format": {"type": "json_object"}}, False),
        "penalties": (c, chat | most | {"presence_penalty": 0.5}, False),
        "token ids": (c, chat | most | {"return_token_ids": True}, False),
    }  # fmt: skip
    return {name: (path, {"model": model, "stream": True, **body}, on) for name, (path, body, on) in made.items()}


class Received(msgspec.Struct):
    """One stream as its client received it: texts, ends and roles by answer, usage, the error's code, and what is
    wrong.
    """

    texts: dict[int, str] = msgspec.field(default_factory=dict)
    ends: dict[int, list[str]] = msgspec.field(default_factory=dict)
    roles: dict[int, int] = msgspec.field(default_factory=dict)
    usage: tuple[int, int, int] | None = None
    usages: int = 0
    names: set[tuple[Any, ...]] = msgspec.field(default_factory=set)
    error: str = ""
    done: bool = False
    wrong: str = ""


def read(wire: bytes) -> Received:
    """Parse a stream's events, each of which must be JSON. Pure."""
    received = Received()
    for event in wire.split(b"\n\n"):
        line = event.strip()
        if not line or line.startswith(b":"):
            continue
        if received.done:
            received.wrong = "something follows [DONE]"
        if line == b"data: [DONE]":
            received.done = True
            continue
        try:
            document = msgspec.json.decode(line.removeprefix(b"data:"))
        except msgspec.DecodeError:
            received.wrong = "an event is not JSON"
            continue
        if "error" in document:
            received.error = str(document["error"].get("code"))
            continue
        received.names.add(tuple(document.get(name) for name in ("id", "created", "model", "object")))
        if document.get("usage"):
            used = document["usage"]
            received.usage = used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]
            received.usages += 1
        for choice in document["choices"]:
            at, delta = choice["index"], choice.get("delta") or {}
            received.texts[at] = received.texts.get(at, "") + (choice.get("text") or delta.get("content") or "")
            received.roles[at] = received.roles.get(at, 0) + ("role" in delta)
            if choice.get("finish_reason"):
                received.ends.setdefault(at, []).append(choice["finish_reason"])
    return received


def compare(received: Received, expected: Received, report: ResumeReport, what: str) -> None:
    """Enter an answer into the report. Otherwise pure."""
    if received.error or not received.done:
        report.ended[f"{what}: {received.error or 'cut'}"] += 1
        for at, text in received.texts.items():
            if not expected.texts.get(at, "").startswith(text):
                report.doubled_or_altered += 1
                report.wrong.append(f"{what}: what came before the error is not the beginning of the answer")
        if not received.error:
            report.wrong.append(f"{what}: the stream was cut without a word")
        return
    if received.texts != expected.texts:
        for at, whole in expected.texts.items():
            text = received.texts.get(at, "")
            report.lost_bytes += max(0, len(whole.encode()) - len(text.encode()))
            report.doubled_or_altered += not whole.startswith(text)
        report.wrong.append(f"{what}: {received.texts} is not {expected.texts}")
    found = (received.ends, received.roles, received.usage, received.usages, len(received.names), received.wrong)
    if found != (expected.ends, expected.roles, expected.usage, expected.usages, 1, ""):
        report.wrong.append(f"{what}: {found}, not {(expected.ends, expected.roles, expected.usage)}")
    else:
        report.whole += received.texts == expected.texts


class Pipe:
    """A proxy before one engine that cuts an answer's stream after a random number of bytes."""

    def __init__(self, there: str, rng: Random, report: ResumeReport) -> None:
        self._host, _, port = there.removeprefix("http://").rpartition(":")
        self._port, self._rng, self._report = int(port), rng, report
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Listen; returns its URL."""
        self._server = await asyncio.start_server(self._come, HOST, 0)
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for pair in list(self._pairs):
            pair.cancel()  # by us alone: both ends see a close
        await asyncio.gather(*self._pairs, return_exceptions=True)

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pairs.add(task)
        left: list[int | None] = [None]  # of the answer under way: bytes until the cut
        back: asyncio.StreamWriter | None = None
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
            await asyncio.gather(self._ask(reader, back, left), self._answer(there, writer, left))
        except (OSError, asyncio.CancelledError):
            pass  # the engine is being started again, or the run is over
        finally:
            for one in (writer, back):
                if one is not None:
                    one.transport.abort()
            self._pairs.discard(task)

    async def _ask(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter, left: list[int | None]) -> None:
        rng = self._rng
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_PIECE):
                if data.startswith(b"POST /v1/"):
                    cut = rng.random() < CUT_SHARE
                    left[0] = rng.randrange(EVENT_BYTES * (TOKENS + 8)) if cut else None
                if any(mark in data for mark in CONTINUES) and rng.random() >= CUT_AGAIN_SHARE:
                    left[0] = None  # it continues a stream
                back.write(data)
                await back.drain()
        back.close()

    async def _answer(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int | None]) -> None:
        streams = False
        with contextlib.suppress(ConnectionError):
            while data := await there.read(_PIECE):
                streams = streams or b"text/event-stream" in data
                if streams and left[0] is not None:
                    if left[0] < len(data):
                        writer.write(data[: left[0]])
                        await writer.drain()
                        self._report.cuts += 1
                        break
                    left[0] -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


class Run:
    """One run in a running world."""

    def __init__(self, world: World, http: aiohttp.ClientSession, seed: int) -> None:
        self._world, self._http, self._rng = world, http, Random(seed)
        self.report = ResumeReport()
        self._pipes: list[Pipe] = []
        self._number = 0
        self._dead: Counter[str] = Counter()  # counters of processes that were killed
        self._mending: asyncio.Task[None] | None = None
        self._spared = world.regions["tokyo"].engine_urls[0]  # asked directly for whole answers, so it is never killed

    async def put_pipes(self) -> None:
        """Put pipes before all engines; regional balancers restart to use them."""
        for run in self._world.regions.values():
            for at, url in enumerate(run.engine_urls):
                self._pipes.append(pipe := Pipe(url, self._rng, self.report))
                run.engine_urls[at] = await pipe.open()
            assert run.regional is not None
            await run.regional.stop()
            await self._world.start_regional(run.name)
        await self._world.wait_until_serving(REGIONS)

    async def close(self) -> None:
        """Stop what was started."""
        if self._mending is not None:
            await self._mending
        for pipe in self._pipes:
            await pipe.close()

    async def until(self, interruptions: int, progress: Callable[[str], None]) -> None:
        """Send requests and interrupt them, until this many streams were interrupted."""
        await asyncio.gather(*(self._client(interruptions, progress) for _ in range(STREAMS)))
        if self._mending is not None:
            await self._mending  # include the counters of processes that are being started again
        await self.count()

    async def _client(self, interruptions: int, progress: Callable[[str], None]) -> None:
        report = self.report
        while report.interruptions < interruptions and len(report.wrong) < 20:
            self._number += 1
            number = self._number
            made = shapes(self._world.settings.model, number)
            names = list(made)
            resumable = [name for name, (_, _, goes_on) in made.items() if goes_on]
            name = names[number // 3 % len(names)] if number % 3 == 0 else self._rng.choice(resumable)
            path, body, _ = made[name]
            if "stop" in body:
                unstopped = read(await self._stream(self._spared, path, body)).texts.get(0, "")
                at, longest = self._rng.randrange(len(unstopped) + 1), self._rng.randrange(1, STOP_CHARS_MAX)
                stop = unstopped[at : at + longest] or NO_STOP
                body["stop"] = stop if isinstance(body["stop"], str) else [NO_STOP, stop]
            expected = read(await self._stream(self._spared, path, body))
            entry = self._rng.choice(sorted(REGIONS))
            if report.cuts > KILL_EVERY * (report.kills + 1) and self._mending is None:
                self._mending = asyncio.create_task(self._kill())
            received = read(await self._stream(self._world.regions[entry].entry, path, body))
            report.streams += 1
            report.shapes[name] += 1
            compare(received, expected, report, name)
            if number % 100 == 0:
                progress(f"{report.interruptions:,} of {interruptions:,} interruptions, {len(report.wrong)} wrong")

    async def _stream(self, url: str, path: str, body: dict[str, Any]) -> bytes:
        headers = {"authorization": f"Bearer {KEY}"}
        wire = b""
        try:
            async with self._http.post(url + path, json=body, headers=headers) as answer:
                async for data in answer.content.iter_any():
                    wire += data
                if answer.status != 200:
                    code = msgspec.json.decode(wire).get("error", {}).get("code")
                    return b"data: " + msgspec.json.encode({"error": {"code": f"{answer.status} {code}"}})
        except aiohttp.ClientError:
            pass  # it was cut: it has no end
        return wire

    async def _kill(self) -> None:
        """An engine or a regional balancer is killed, and restarted."""
        run = self._world.regions[self._rng.choice(("virginia", "frankfurt"))]
        try:
            self.report.kills += 1
            if self._rng.random() < 0.5:
                at = self._rng.randrange(len(run.engines))
                await run.engines[at].kill()
                await self._world.start_engine(run.name, at)
            else:
                assert run.regional is not None
                self._dead += await self._counted("region", run.regional_admin)
                await run.regional.kill()
                await self._world.start_regional(run.name)
            await self._world.wait_until_serving(REGIONS)
        finally:
            self._mending = None

    async def count(self) -> None:
        """Read the counters of running balancers."""
        total = Counter(self._dead)
        for run in self._world.regions.values():
            for tier, admin in (("region", run.regional_admin), ("global", run.global_admin)):
                total += await self._counted(tier, admin)
        self.report.counted = total

    async def _counted(self, tier: str, admin: str) -> Counter[str]:
        counted: Counter[str] = Counter()
        async with self._http.get(f"{admin}/metrics") as page:
            for labels, count in _RESUMES.findall(await page.text()):
                found = dict(_LABEL.findall(labels))
                counted[f"{tier}: {found.get('outcome', '')} {found.get('reason', '')}".strip()] += int(float(count))
        return counted


@contextlib.asynccontextmanager
async def running(seed: int = 1, speedup: float = 40.0, *, by_text: bool = False) -> AsyncIterator[Run]:
    """A world with pipes. WorldError if it cannot be started."""
    settings = WorldSettings(replicas=2, speedup=speedup, wide=True, **(BY_TEXT if by_text else {}))
    with tempfile.TemporaryDirectory(prefix="farhop-resume-") as folder:
        async with World(settings, Path(folder)) as world:
            await world.wait_until_serving(REGIONS)
            timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
            async with aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True), auto_decompress=False
            ) as http:
                run = Run(world, http, seed)
                try:
                    await run.put_pipes()
                    yield run
                finally:
                    await run.close()


async def measure(
    interruptions: int, seed: int = 1, progress: Callable[[str], None] = lambda _text: None, *, by_text: bool = False
) -> ResumeReport:
    """So many interruptions. WorldError if the world cannot be run."""
    try:
        async with running(seed, by_text=by_text) as run:
            await run.until(interruptions, progress)
            return run.report
    except TimeoutError:
        raise WorldError("an answer did not end within a minute; look whether the machine is overloaded") from None


class KillReport(msgspec.Struct):
    """A region killed several times: how many of its streams ended complete and equal to an unbroken one, how the
    others ended, and the longest pause that each client saw from the kill on, in ms. `wrong` has the texts of `altered`
    ones.
    """

    kills: int = 0
    broken: int = 0
    whole: int = 0
    altered: int = 0
    ended: Counter[str] = msgspec.field(default_factory=Counter)
    wrong: list[str] = msgspec.field(default_factory=list)
    gaps_ms: list[float] = msgspec.field(default_factory=list)

    @property
    def whole_share(self) -> float:
        """Of the streams that broke."""
        return self.whole / self.broken if self.broken else 1.0

    def gap_ms(self, share: float) -> float:
        """The pause that this share of the clients did not exceed."""
        ordered = sorted(self.gaps_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class _Timing:
    """One stream under a kill."""

    def __init__(self) -> None:
        self.tokens = 0
        self.last_at = 0.0
        self.gap_s = 0.0
        self.over = False

    def piece(self, now: float, *, counts: bool) -> None:
        if counts:
            self.gap_s = max(self.gap_s, now - self.last_at)
        self.tokens, self.last_at = self.tokens + 1, now


async def regions_killed(
    kills: int,
    streams: int = KILLED_STREAMS,
    progress: Callable[[str], None] = lambda _text: None,
    *,
    by_text: bool = False,
) -> KillReport:
    """Kill a region's engines and its balancer under this many streams that it serves, this many times. WorldError if
    the world cannot be run.
    """
    at_once: dict[str, Any] = {"spill": {"ramp_per_s": 1e3}}  # a region that is back gets its traffic back at once
    settings = WorldSettings(
        replicas=2, speedup=4.0, engine="sglang" if by_text else None,
        global_config={**at_once, **(_MODE if by_text else {})},
        regional_config={"health": {"slow_start_s": 0}, **(_MODE if by_text else {})},
    )  # fmt: skip
    report = KillReport()
    with tempfile.TemporaryDirectory(prefix="farhop-resume-") as folder:
        async with World(settings, Path(folder)) as world:
            await world.wait_until_serving(REGIONS)
            for number in range(kills):
                await _killed(world, number, streams, report)
                progress(f"{number + 1} of {kills} kills: {report.whole} of {report.broken} streams whole")
    return report


async def _killed(world: World, number: int, streams: int, report: KillReport) -> None:
    """One kill; returns when the region is up again."""
    run, loop = world.regions[VICTIM], asyncio.get_running_loop()
    spared = world.regions["tokyo"].engine_urls[0]
    timings, killed_at = [_Timing() for _ in range(streams)], [float("inf")]

    async def stream(at: int) -> Result:
        body = {
            "model": world.settings.model, "stream": True, "max_tokens": KILLED_TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"{number} {at}: tell me of the sea"}],
        }  # fmt: skip
        async for event in ask([run.entry], KEY, body):
            if isinstance(event, Delta):
                timings[at].piece(loop.time(), counts=loop.time() > killed_at[0])
            elif isinstance(event, Result):
                result = event
        timings[at].over = True
        return result

    async def whole(at: int) -> str:
        body = {
            "model": world.settings.model, "max_tokens": KILLED_TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"{number} {at}: tell me of the sea"}],
        }  # fmt: skip
        result = await answer([spared], KEY, body, connect_s=_TIMEOUT_S)
        if result.error is not None:
            raise WorldError(f"an engine that was asked directly did not answer: {result.error.message}")
        return result.text

    expected = await asyncio.gather(*map(whole, range(streams)))
    tasks = [asyncio.create_task(stream(at)) for at in range(streams)]
    while any(one.tokens < BEGUN_TOKENS and not one.over for one in timings):
        await asyncio.sleep(0.005)
    begun = [not one.over for one in timings]
    killed_at[0] = loop.time()
    assert run.regional is not None
    await asyncio.gather(*(child.kill() for child in (run.regional, *run.engines)))
    results = await asyncio.gather(*tasks)
    report.kills += 1
    for at, result in enumerate(results):
        if not begun[at] or result.headers.get("x-farhop-region") != VICTIM:
            continue
        report.broken += 1
        if result.error is not None:
            report.ended[f"{result.error.code or result.status}: {result.error.message[:160]}"] += 1
            continue
        report.gaps_ms.append(1e3 * timings[at].gap_s)
        if result.text != expected[at]:
            report.altered += 1
            report.wrong.append(f"stream {at}: {result.text!r} is not {expected[at]!r}")
        report.whole += result.text == expected[at]
    await asyncio.gather(*(world.start_engine(VICTIM, at) for at in range(len(run.engines))))
    await world.start_regional(VICTIM)
    await world.wait_until_serving(REGIONS)
