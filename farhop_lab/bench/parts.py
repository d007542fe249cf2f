"""What a request and a stream's chunk consist of, by counts that noise does not change: frames, calls, bytecodes.

`python -m farhop_lab.bench.parts` measures and prints. With arguments it is the `farhop` command, which counts between
two signals (SIGUSR1). Function by function they are those that nine of ten requests have, which removes timers, reports
and what happens for one request in a hundred. Never reads a clock; never reports anything but counts.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from inspect import CO_COROUTINE
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

from farhop_lab.bench import bodies, tiers
from farhop_lab.bench.harness import HOST, BenchError, Running, Subject, engines, open_files
from farhop_lab.world.child import PROGRAM, bound_to_parent
from global_lb.links import watch

TO = "FARHOP_BENCH_COUNTS_TO"  # the folder to which a counted process writes
REQUESTS, WARM, STREAMS, CHUNKS = 100, 200, 2, 100
ROUNDS = 3  # of counting calls; the one with the fewest is reported, since other load only adds
_CHUNK_MS, _PAUSE_S = 4.0, 0.003
_ANSWER_MS = 8.0  # longer than a prefill should take: else it depends on the machine whether a prefill speed is learned
_NEARLY = 0.9  # of all requests have at least what is counted
_PATIENCE_S, _LOOK_S = 30.0, 0.01
_LOOPS = asyncio.Runner.run.__code__
_COUNTED = ("frames", "c_calls", "opcodes")
_Turns = dict[str, dict[str, list[int]]]  # by what is counted and by function: how often in each loop turn that had it
_CARRY = ("http/connection.py", "relay/relay.py", "upstream/attempt.py", "http/cork.py")
_TIMERS = (
    "_fire",
    "_sweep",
    "sweep",
)  # if an answer in one piece comes later than it should, as on a busy machine
_ASKS = ("upstream/fetch.py",)
_MODE = "mode"  # the file that says what to count


class Parts(msgspec.Struct, frozen=True):
    """What one request (or chunk) consists of in all counted processes: frames and C calls by Python function, most
    first. `syscalls` None: strace is missing, not permitted or not wanted.
    """

    frames: dict[str, int]
    c_calls: dict[str, int]
    opcodes: int  # 0 if not wanted: counting them takes a hundred times as long
    syscalls: dict[str, int] | None

    @property
    def syscalls_all(self) -> int | None:
        """All of them."""
        return None if self.syscalls is None else sum(self.syscalls.values())


# -- in the process that is counted


class _Counting:
    """Counts by function in the main thread, where the loop runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._turn = folder, 0
        self._counts: _Turns = {}
        self._root: FrameType | None = None  # what the loop called last
        self._of_turn: dict[str, dict[tuple[int, str], int]] = {}  # by function and by what it calls
        self._codes: dict[int, CodeType] = {}  # of the functions, so that no other gets the identity of one
        self._upkeep = True

    def toggle(self, *_: object) -> None:
        """Begin, or end and write."""
        turn, self._turn = self._turn, self._turn + 1
        if turn % 2:
            sys.setprofile(None)
            sys.settrace(None)
            self._flush()
            self._root, self._upkeep = None, True
        else:
            self._counts = {name: {} for name in _COUNTED}
            self._flush()
            if (self._folder / _MODE).read_text() == "calls":
                sys.setprofile(self._profiled)
            else:
                sys.settrace(self._traced)
        file = self._folder / f"{os.getpid()}-{turn}"
        file.with_suffix(".part").write_bytes(msgspec.json.encode(self._counts))
        file.with_suffix(".part").rename(file)

    def _profiled(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._called(frame)
            self._count("frames", frame.f_code, "")
        elif event == "c_call":
            self._count("c_calls", frame.f_code, getattr(argument, "__qualname__", "?"))

    def _traced(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "opcode":
            self._count("opcodes", frame.f_code, "")
        elif event == "call":
            self._called(frame)
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _called(self, frame: FrameType) -> None:
        """What the loop calls begins a turn; all that is called until its next call is of that turn."""
        if frame.f_back is None or frame.f_back.f_code is not _LOOPS or frame is self._root:
            return
        self._flush()
        self._root, code = frame, frame.f_code
        # Tasks and timers are upkeep, which belongs to no request.
        self._upkeep = bool(code.co_flags & CO_COROUTINE) or code.co_name in _TIMERS

    def _count(self, what: str, code: CodeType, callee: str) -> None:
        """By the code's identity: to hash code or to write its name would cost more than all else here."""
        if not self._upkeep:
            self._codes[id(code)] = code
            calls, key = self._of_turn[what], (id(code), callee)
            calls[key] = calls.get(key, 0) + 1

    def _flush(self) -> None:
        """The loop's call has returned."""
        named = {of: _name(self._codes[of]) for calls in self._of_turn.values() for of, _ in calls}
        # Of what carries a client's request, and does not ask engines and regions, for upkeep.
        carries = any(name.startswith(_CARRY) for name in named.values())
        if carries and not any(name.startswith(_ASKS) for name in named.values()):
            for what, calls in self._of_turn.items():
                of_turn: Counter[str] = Counter()
                for (of, callee), count in calls.items():
                    of_turn[f"{named[of]} > {callee}" if callee else named[of]] += count
                for name, count in of_turn.items():
                    if "opentelemetry" not in name:  # spans of one request in a hundred
                        self._counts[what].setdefault(name, []).append(count)
        self._of_turn = {name: {} for name in _COUNTED}


@cache  # upkeep of a thousand calls, each counted by its bytecodes, must not delay a request
def _name(code: CodeType) -> str:
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"


# -- in the process that measures


class Counted:
    """Processes that run as this module does, and the requests during which they count."""

    def __init__(self, folder: Path, proxy: Running) -> None:
        self._folder, self._proxy, self._turn = folder, proxy, 0
        self._size, self._warm = 1024, False

    async def requests(self, *, slowly: bool = False) -> Parts:
        """The parts of a small request that is answered in one piece. `slowly`: opcodes and syscalls, too."""
        made = [bodies.request(body, HOST) for body in bodies.plain(self._size, delay_ms=_ANSWER_MS)]
        if not self._warm:
            await self._send(made, WARM, 0.0)
            self._warm = True
        return await self._parts(lambda: self._send(made, REQUESTS), REQUESTS, slowly=slowly)

    async def chunks(self, *, slowly: bool = False) -> Parts:
        """The parts of a chunk, in a single stream."""
        made = [bodies.request(body, HOST) for body in bodies.streamed(self._size, CHUNKS, _CHUNK_MS)]
        await self._send(made, 1)
        return await self._parts(lambda: self._send(made, STREAMS), STREAMS * (CHUNKS - 1), slowly=slowly)

    async def _parts(self, sent: Callable[[], Awaitable[None]], times: int, *, slowly: bool) -> Parts:
        rounds = [await self._during("calls", sent) for _ in range(ROUNDS)]
        steps = await self._during("opcodes", sent) if slowly else {}
        frames, c_calls = (
            min((_each(calls, what, times) for calls in rounds), key=Counter.total) for what in ("frames", "c_calls")
        )
        return Parts(
            frames=dict(frames.most_common()),
            c_calls=dict(c_calls.most_common()),
            opcodes=_each(steps, "opcodes", times).total() if steps else 0,
            syscalls=await self._syscalls(sent, times) if slowly else None,
        )

    async def _during(self, mode: str, sent: Callable[[], Awaitable[None]]) -> _Turns:
        """The counts of all processes during it."""
        (self._folder / _MODE).write_text(mode)
        await self._toggle()
        await sent()
        await asyncio.sleep(0.1)  # what follows an answer belongs to it
        return await self._toggle()

    async def _toggle(self) -> _Turns:
        turn, self._turn = self._turn, self._turn + 1
        counts: _Turns = {name: {} for name in _COUNTED}
        for pid in self._proxy.pids:
            os.kill(pid, signal.SIGUSR1)
            file = self._folder / f"{pid}-{turn}"
            async with asyncio.timeout(_PATIENCE_S):
                while not file.exists():
                    await asyncio.sleep(_LOOK_S)
            for what, by_name in msgspec.json.decode(file.read_bytes(), type=_Turns).items():
                counts[what] |= {f"{pid} {name}": of_turns for name, of_turns in by_name.items()}
        return counts

    async def _syscalls(self, sent: Callable[[], Awaitable[None]], times: int) -> dict[str, int] | None:
        """Syscalls of the loops' threads, as strace counts them."""
        strace = shutil.which("strace")
        if strace is None:
            return None
        counts: Counter[str] = Counter()
        watching = []
        for pid in self._proxy.pids:
            process = await asyncio.create_subprocess_exec(
                strace, "-c", "-p", str(pid), stderr=asyncio.subprocess.PIPE, preexec_fn=bound_to_parent()
            )
            assert process.stderr is not None
            if b"attached" not in await process.stderr.readline():
                await process.wait()
                return None
            watching.append(process)
        await sent()
        for process in watching:
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
            for line in errors.decode().splitlines():
                columns = line.split()
                if len(columns) >= 5 and columns[3].isdigit() and columns[-1] != "total":
                    counts[columns[-1]] += round(int(columns[3]) / times)
        return dict(+counts)

    async def _send(self, made: list[bytes], times: int, pause_s: float = _PAUSE_S) -> None:
        """One after another on one connection."""
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection(self._proxy.host, self._proxy.port)
            for number in range(times):
                if pause_s:
                    # Or two in one millisecond have their writes combined: other functions.
                    await asyncio.sleep(pause_s)
                writer.write(made[number % len(made)])
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b" 200 " not in head[:16]:
                    raise BenchError(f"answered with {head[:40]!r}")
                if b"content-length: " in head:
                    await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
                else:
                    await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()
            await writer.wait_closed()


def _each(counts: _Turns, what: str, times: int) -> Counter[str]:
    """Per request, by function, over all processes, without what does not happen for each. On a busy machine two chunks
    may arrive together: the divisor is the number of loop turns. What comes with time, as a region's report does,
    calls a function more often in some turns, and in more of them the slower the machine: so no means or medians.
    """
    each: Counter[str] = Counter()
    turns = {name: len(of_turns) for name, of_turns in counts[what].items()}
    for name, of_turns in counts[what].items():
        pid, _, function = name.partition(" ")
        most = min(times, max(many for one, many in turns.items() if one.startswith(f"{pid} ")))
        if turns[name] >= _NEARLY * most:
            each[function] += _nearly_always(sorted(of_turns), round(turns[name] / most))
    return +each


def _nearly_always(of_turns: list[int], times: int) -> int:
    """Calls in a request that has the function in `times` loop turns: those with fewer calls, those with more, ..."""
    ends = [len(of_turns) * place // times for place in range(times + 1)]
    return sum(of_turns[begin + int((1.0 - _NEARLY) * (end - begin))] for begin, end in pairwise(ends))


@asynccontextmanager
async def counted(subject: Subject) -> AsyncIterator[Counted]:
    """One of our rows with its processes ready to count. Raises BenchError. Sets and unsets PROGRAM and TO."""
    with tempfile.TemporaryDirectory(prefix="farhop-parts-") as name:
        folder = Path(name)
        before = {name: os.environ.get(name) for name in (PROGRAM, TO)}
        async with engines(folder, open_files(), None) as environment:
            os.environ |= {PROGRAM: "farhop_lab.bench.parts", TO: name}
            try:
                async with subject.run(environment) as proxy:
                    yield Counted(folder, proxy)
            finally:
                for variable, value in before.items():
                    os.environ.pop(variable, None)
                    if value is not None:
                        os.environ[variable] = value


async def _main() -> None:
    for subject in (tiers.OURS[0], tiers.OURS[2]):
        async with counted(subject) as row:
            _show(f"{subject.name}, a request", await row.requests(slowly=True))
            _show(f"{subject.name}, a chunk", await row.chunks(slowly=True))


def _show(what: str, parts: Parts) -> None:
    frames, c_calls = sum(parts.frames.values()), sum(parts.c_calls.values())
    counts = f"{frames} frames, {c_calls} C calls, {parts.opcodes} bytecodes"
    print(f"{what}: {counts}, {parts.syscalls_all} syscalls {parts.syscalls or ''}")
    for name, count in parts.frames.items():
        print(f"  {count} {name}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        signal.signal(signal.SIGUSR1, _Counting(Path(os.environ[TO])).toggle)
        # A prompt that its region confirmed takes two frames fewer than one that was only sent, and on a busy machine
        # the confirmation may come before the first answer: with this interval all prompts are confirmed, as most are
        # in operation.
        setattr(watch, "CONFIRM_S", 0.5)  # noqa: B010 - not a name that it exports
        sys.argv[0] = "farhop"
        runpy.run_module("farhop_cli", run_name="__main__")
    else:
        asyncio.run(_main())
