"""What a request's passage costs in each proxy, ours and others', under the same load: CPU of the proxy alone.

A round measures every proxy once, each freshly started, and there are several rounds: other load on a shared machine
then affects all alike. A proxy runs over the uvloop upstream for streams, and over nginx's fixed answers for the rest.
Upstream connections are plaintext; with `tls` those of clients are not. A figure with a single wrong answer behind it
is always marked.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from farhop_lab.bench import bodies, usage, wrk
from farhop_lab.bench.client import Job, Report, Window
from farhop_lab.bench.harness import BenchError, ProxyEnvironment, Running, Subject, engines, module, open_files, output
from farhop_lab.bench.proxies import PROXIES, on_path
from farhop_lab.bench.results import SIZES, Comparison, Latency, Plan, Taken, row_of
from farhop_lab.bench.tiers import OURS
from farhop_lab.world.certs import Authority

CONNECTIONS = 32
PEAK_BYTES = SIZES[0]
LATENCY_RATE_MAX_PER_S = 1000.0  # far below the capacity of most: a tail of their own, not of a queue
_LATENCY_TURNS = 5  # each straight to the upstream and through the proxy: a hiccup of the machine affects one turn
SUBJECTS: tuple[Subject, ...] = (*OURS, *PROXIES)
_FEW, _LONGER = 20 * CONNECTIONS, 10  # a window with fewer answers is repeated, this many times as long
_SLACK_S = 30.0
_FILES_PER_STREAM = 2.2  # one to the client, one upstream, and proxies' reserves
_SETTLE_S = 0.7  # by then a proxy's work after its first answers (probes of all upstreams, threads' start) is over


class Tools(msgspec.Struct, frozen=True):
    """Binaries of the load and of the upstream; None if not installed. `files`: the limit of open files of a
    process.
    """

    wrk: str | None
    nginx: str | None
    files: int

    @classmethod
    def found(cls) -> Tools:
        """What this machine has. BenchError if nothing can be measured."""
        if not usage.available():
            raise BenchError("bench reads other processes' CPU time and memory from /proc: it needs Linux")
        return cls(wrk.find(), on_path("nginx"), open_files())


def chosen(only: Sequence[str]) -> list[Subject]:
    """The proxies whose names contain one of these words; all of them if there are none. BenchError for a word that no
    name contains.
    """
    found: list[Subject] = []
    for name in only:
        matching = [s for s in SUBJECTS if name.lower() in s.name.lower()]
        if not matching:
            raise BenchError(f"--only: no proxy is called {name!r}; there is {', '.join(s.name for s in SUBJECTS)}")
        found += [s for s in matching if s not in found]
    return sorted(found, key=SUBJECTS.index) if found else list(SUBJECTS)


def check_files(plan: Plan, files: int) -> None:
    """Whether a proxy may hold all of the plan's streams open. Raises BenchError."""
    most = int(files / _FILES_PER_STREAM)
    if plan.idle_streams > most:
        raise BenchError(
            f"--streams: {plan.idle_streams} need {round(plan.idle_streams * _FILES_PER_STREAM)} open files in a proxy "
            f"and the system allows {files}; raise `ulimit -Hn`, or ask for {most} at most"
        )


async def measure(
    plan: Plan, only: Sequence[str] = (), progress: Callable[[str], None] = lambda _text: None
) -> Comparison:
    """Measure them all, round by round, within `plan.limit_s`. `progress` is called with each step."""
    subjects, tools = [s for s in chosen(only) if s.tls or not plan.tls], Tools.found()
    check_files(plan, tools.files)
    absent = {s.name: why for s in subjects if (why := s.missing()) is not None}
    taken = {s: Taken(s.name) for s in subjects if s.name not in absent}
    others = os.getloadavg()[0]
    began = time.monotonic()
    longest_s, done = 0.0, 0
    for turn, (subject, so_far) in enumerate(list(taken.items()) * plan.repeats):
        at = time.monotonic()
        if at - began + longest_s > plan.limit_s:
            break
        if not so_far.trouble:
            progress(f"round {turn // len(taken) + 1} of {plan.repeats}, {subject.name}")
            await _round(subject, plan, tools, so_far)
        longest_s, done = max(longest_s, time.monotonic() - at), turn + 1
    for so_far in list(taken.values())[done:]:
        so_far.trouble = f"no time left of {plan.limit_s:g} s; measure fewer at once with --only"
    return Comparison(
        plan=plan,
        others=others,
        cpus=os.cpu_count() or 1,
        rounds=done // max(1, len(taken)),
        load="wrk" if tools.wrk else "farhop's own client, since wrk is not installed",
        upstream="nginx" if tools.nginx and not plan.once else "uvloop",
        rows=[row_of(one) for one in taken.values()],
        absent=absent,
    )


async def _round(subject: Subject, plan: Plan, tools: Tools, taken: Taken) -> None:
    """One round of one proxy."""
    try:
        if plan.once:
            async with running(subject, tools, None, tls=plan.tls) as (environment, proxy):
                await _streams(taken, plan, proxy)
                await _requests(taken, plan, tools, environment, proxy)
            return
        async with running(subject, tools, None, tls=plan.tls) as (_, proxy):
            await _streams(taken, plan, proxy)
        async with running(subject, tools, tools.nginx, tls=plan.tls) as (environment, proxy):
            await _requests(taken, plan, tools, environment, proxy)
    except BenchError as error:
        taken.trouble = str(error)


@asynccontextmanager
async def running(
    subject: Subject, tools: Tools, nginx: str | None, *, tls: bool = False
) -> AsyncIterator[tuple[ProxyEnvironment, Running]]:
    """A proxy over its upstream until the end of the block; then nothing of it is left. Raises BenchError."""
    folder = Path(tempfile.mkdtemp(prefix="farhop-bench-"))
    try:
        pair = Authority(folder).issue("proxy") if tls else None
        async with engines(folder, tools.files, nginx) as over:
            environment = replace(over, pair=pair)
            async with subject.run(environment) as proxy:
                await asyncio.sleep(_SETTLE_S)
                yield environment, proxy
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- requests that are answered in one piece


async def _requests(taken: Taken, plan: Plan, tools: Tools, environment: ProxyEnvironment, proxy: Running) -> None:
    if plan.warm_up:
        await busy(tools, environment, proxy, PEAK_BYTES, plan.request_s)
    for size in plan.sizes:
        window = await busy(tools, environment, proxy, size, plan.request_s)
        if window.requests < _FEW and not plan.once:  # requests under way at its end used CPU, and are not counted
            window = await busy(tools, environment, proxy, size, plan.request_s * _LONGER)
        taken.requests.setdefault(size, []).append(window)
        if size == PEAK_BYTES and plan.latency_s and window.requests:
            rate = min(window.requests / window.seconds / 2, LATENCY_RATE_MAX_PER_S)
            taken.latencies += [await _latency(plan, environment, proxy, rate) for _ in range(_LATENCY_TURNS)]


async def busy(
    tools: Tools, environment: ProxyEnvironment, proxy: Running, size: int, seconds: float, *, first: int = -1
) -> Window:
    """One window under full load. With `first` no two prompts are equal: they are numbered from there on."""
    if tools.wrk is None:
        job = Job(
            mode="closed", host=proxy.host, port=proxy.port, tls=proxy.tls, pids=list(proxy.pids),
            connections=CONNECTIONS, ramp_s=0.2, window_s=seconds, windows=1, body_bytes=size, first=first,
        )  # fmt: skip
        return (await asked(job)).windows[0]
    lines, script = environment.folder / f"bodies-{size}", environment.folder / "wrk.lua"
    if not lines.exists():
        lines.write_bytes(b"\n".join(bodies.plain(size)) + b"\n")
    script.write_text(wrk.script(str(lines), first))
    url = f"{'https' if proxy.tls else 'http'}://{proxy.host}:{proxy.port}"
    command = wrk.command(tools.wrk, str(script), url, CONNECTIONS, seconds)
    pids = usage.tree(proxy.pids)
    before = usage.cpu_s(pids)
    printed = await output(command, seconds + _SLACK_S)
    cpu_s = usage.cpu_s(pids) - before
    try:
        report = wrk.read(printed)
    except wrk.WrkError as error:
        raise BenchError(str(error)) from None
    return Window(report.seconds, cpu_s, report.requests, 0, report.errors, usage.rss_bytes(pids), 0)


async def _latency(plan: Plan, environment: ProxyEnvironment, proxy: Running, rate: float) -> Latency:
    """The same open loop straight to the upstream, then through the proxy."""
    host, port = environment.targets[0]
    job = Job(
        mode="open", host=host, port=port, pids=[], connections=256, ramp_s=0.5, window_s=plan.latency_s, windows=1,
        body_bytes=PEAK_BYTES, rate_per_s=rate,
    )  # fmt: skip
    direct = await asked(job)
    via = await asked(msgspec.structs.replace(job, host=proxy.host, port=proxy.port, tls=proxy.tls))
    errors = sum(w.errors for w in (*direct.windows, *via.windows))
    return Latency(rate, via.p50_ms, via.p99_ms, direct.p50_ms, direct.p99_ms, errors)


# -- streams


async def _streams(taken: Taken, plan: Plan, proxy: Running) -> None:
    pids = usage.tree(proxy.pids)
    before, began = usage.cpu_s(pids), time.monotonic()
    await asyncio.sleep(plan.rest_s)
    taken.rest.append((usage.cpu_s(pids) - before) / (time.monotonic() - began))
    base = Job(
        mode="closed", host=proxy.host, port=proxy.port, tls=proxy.tls, pids=list(proxy.pids),
        connections=CONNECTIONS, ramp_s=0.5, window_s=plan.stream_s, windows=1, chunks=200,
    )  # fmt: skip
    for count, interval_ms in plan.streams:
        # Half of the ramp opens them one by one, so that their chunks are not in step. None ends in the window.
        job = msgspec.structs.replace(base, connections=count, interval_ms=interval_ms, ramp_s=max(0.5, count / 400))
        taken.streams.setdefault(count, []).extend((await asked(job)).windows)
        if plan.idle_streams and taken.stream_bytes is None:
            taken.stream_bytes = await _idle(base, plan.idle_streams)


async def _idle(base: Job, count: int) -> float:
    """Bytes that an open, idle stream takes in the proxy."""
    job = msgspec.structs.replace(
        base,
        mode="idle",
        connections=count,
        ramp_s=count / 500,
        window_s=0.5,
        windows=2,
        interval_ms=600_000.0,
        timeout_s=60.0,
    )
    before, after = (await asked(job)).windows
    if after.errors or not after.streams:
        raise BenchError(f"{after.errors} of {count} idle streams failed")
    return (after.rss_bytes - before.rss_bytes) / after.streams


async def asked(job: Job) -> Report:
    """The report of our client process. Raises BenchError."""
    program, arguments = module("client", job)
    limit_s = job.ramp_s + job.windows * job.window_s + job.timeout_s + _SLACK_S
    printed = await output([*program, *arguments], limit_s)
    return msgspec.json.decode(printed.strip().splitlines()[-1], type=Report)
