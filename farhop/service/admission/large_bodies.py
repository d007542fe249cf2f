"""Reads large bodies in a separate process, so that no body can block the event loop.

    balancer's loop -> a thread that waits -> socket pair -> `python -m farhop.service.admission.large_bodies`,
    which reads and answers

The process is started for the first large body and ends with its balancer. It reads one body at a time, which bounds
its memory, and takes tenants in turn, so that no tenant waits for all bodies of another. It holds no keys. Invariants:
its result for a body is the same as that of `read` in the balancer; nothing is unpickled; if the process stalls or
dies, only the body that it was reading fails, and the next body gets a new process. If no process can be started, a
thread reads, and holds the interpreter's lock. Never decides anything, never logs a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from struct import Struct
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.balance.prefix import chain
from farhop.relay.formats import bodies, openai
from farhop.relay.formats.field_guard import Guard
from farhop.relay.formats.openai import BodyEdit
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError, Prompt
from farhop.service.admission import routing_keys

LARGE_BYTES = 256 * 1024  # the worst body known costs 8 us a KB: 2 ms
PATIENCE_S = 10.0  # of 16 MiB the worst known takes 0.2 s
_FRAME = Struct("!IQ")  # bytes of the message, and of what follows it raw
_MESSAGE_BYTES_MAX = 1 << 20  # beside what it repeats of a body
_REPEATED = 2  # times a body's bytes at most: a field's name, as `param` and in `detail`
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "TZ")  # of the environment, which holds keys
_KEPT_PREFIXES = ("PYTHON", "LC_", "LD_", "DYLD_")


class Job(msgspec.Struct, array_like=True, frozen=True):
    """How to read a body; as bodies.read takes it. `scope` is whose salt engines get (openai.salt_of).

    `hashed`: its SHA-256 is wanted; `signed`: that of the body as it is sent on. `session_field`: where to look for a
    session, "" for nowhere. `only_model` is the one that is meant where a body names none.
    """

    kind: Kind
    path: bytes
    headers: bytes
    media_hosts: tuple[str, ...]
    refuse_unknown: bool
    scope: str | None = None
    hashed: bool = False
    signed: bool = False
    session_field: str = ""
    only_model: str = ""


class ParsedBody(msgspec.Struct, array_like=True):
    """The parsed body. `prompt` is None if it is refused: then `reason`, `detail` and `param` say why.

    The prompt's `canonical` is cut where no chain reaches, and the rest only counted.
    """

    prompt: Prompt | None
    reason: str = ""
    detail: str = ""
    param: str | None = None
    sha256: bytes = b""
    onward_sha256: bytes = b""
    session: bytes = b""
    unknown: list[str] = []
    change: BodyEdit = BodyEdit()

    def refusal(self) -> BodyError:
        """The reason why the body is refused."""
        return BodyError(outcome.by_reason(self.reason) or outcome.INVALID_JSON, self.detail, self.param)


class ReaderError(Exception):
    """The process that read bodies stalled or died over one."""


def read(job: Job, body: bytes) -> ParsedBody:
    """Everything about a body that takes long. Pure."""
    guard = Guard(job.media_hosts, refuse_unknown=job.refuse_unknown)
    digest = hashlib.sha256(body).digest() if job.hashed else b""
    try:
        prompt = bodies.read(job.kind, body, job.path, job.headers, guard, lambda: job.only_model)
    except BodyError as error:
        return ParsedBody(None, error.outcome.reason, error.detail, error.param, sha256=digest)
    parsed = ParsedBody(_cut(prompt), sha256=digest, unknown=guard.met())
    if job.session_field:
        parsed.session = routing_keys.in_body(body, job.session_field)
    parsed.change = openai.change(body, prompt, openai.salt_of(job.kind, prompt, job.scope))
    if job.signed:
        parsed.onward_sha256 = hashlib.sha256(parsed.change.of(body)).digest()
    return parsed


def _cut(prompt: Prompt) -> Prompt:
    most = chain.bytes_at(chain.DEPTH_MAX)
    beyond = len(prompt.canonical) - most
    if beyond <= 0:
        return prompt
    return replace(prompt, canonical=prompt.canonical[:most], opaque_bytes=prompt.opaque_bytes + beyond)


# -- the wire between the two: a frame, a message, and bytes as they are

_job = msgspec.msgpack.Decoder(Job)
_answered = msgspec.msgpack.Decoder(tuple[int, ParsedBody])


def send_message(link: socket.socket, message: bytes, *raw: bytes) -> None:
    link.sendall(_FRAME.pack(len(message), sum(map(len, raw))) + message)
    for piece in raw:
        link.sendall(piece)


def _receive(link: socket.socket, most: int = _MESSAGE_BYTES_MAX) -> tuple[bytes, bytes]:
    """A message of `most` bytes and the bytes behind it. EOFError where the other side is gone."""
    message_bytes, raw_bytes = _FRAME.unpack(_exactly(link, _FRAME.size))
    if message_bytes > most:
        raise EOFError
    return bytes(_exactly(link, message_bytes)), bytes(_exactly(link, raw_bytes))


def _exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


def _answer(link: socket.socket, parsed: ParsedBody) -> None:
    """The result as a message; long texts follow it as they are."""
    canonical, whole = b"" if parsed.prompt is None else parsed.prompt.canonical, parsed.change.whole
    if parsed.prompt is not None:
        parsed.prompt = replace(parsed.prompt, canonical=b"")
    parsed.change = replace(parsed.change, whole=b"")
    send_message(link, msgspec.msgpack.encode((len(canonical), parsed)), canonical, whole)


def received_message(link: socket.socket, body_bytes: int) -> ParsedBody:
    """Receive a body of `body_bytes` bytes and parse it."""
    message, raw = _receive(link, _MESSAGE_BYTES_MAX + _REPEATED * body_bytes)
    canonical_bytes, parsed = _answered.decode(message)
    if parsed.prompt is not None:
        parsed.prompt = replace(parsed.prompt, canonical=raw[:canonical_bytes])
    parsed.change = replace(parsed.change, whole=raw[canonical_bytes:])
    return parsed


def serve(link: socket.socket) -> None:
    """Parse bodies until the balancer closes the connection."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message, body = _receive(link)
            _answer(link, read(_job.decode(message), body))


# -- the balancer's side


class ParserProcess:
    """The process, and the way to it. OSError if it cannot be started."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        program = (sys.executable, "-P", "-m", "farhop.service.admission.large_bodies")
        kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        kept["OPENBLAS_NUM_THREADS"] = "1"  # else NumPy's threads spin at its start, longer than a body takes to read
        try:
            with its:
                self.child = subprocess.Popen(  # noqa: S603 - a module of ours
                    program, stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=kept,
                    start_new_session=True,
                )  # fmt: skip
        except OSError:
            ours.close()
            raise
        ours.settimeout(PATIENCE_S)
        self.link = ours

    def ask(self, job: Job, body: bytes) -> ParsedBody:
        send_message(self.link, msgspec.msgpack.encode(job), body)
        return received_message(self.link, len(body))

    def end(self) -> None:
        """Kill the process; all that wait for it get an error."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        self.end()
        self.link.close()


_Asked: TypeAlias = "tuple[asyncio.Future[ParsedBody], Job, bytes]"


class LargeBodyReader:
    """Those of one balancer. `counts` says how it went: `read`, `here` (no process could be started), `failed`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self.process: ParserProcess | None = None
        self._waiting: dict[str, deque[_Asked]] = {}  # by tenant, in turn
        self._reads = self._closed = False
        self.counts = {"read": 0, "here": 0, "failed": 0}

    def later(self, job: Job, body: bytes, tenant: str = "") -> asyncio.Future[ParsedBody]:
        """The result of `read`, in the tenant's turn. Raises ReaderError if the process stalled or died. If cancelled
        before its turn, the body is not read."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((future, job, body))
        self._next()
        return future

    def _next(self) -> None:
        while self._waiting and not self._reads:
            tenant = next(iter(self._waiting))
            asked = self._waiting.pop(tenant)
            future, job, body = asked.popleft()
            if asked:
                self._waiting[tenant] = asked  # behind all others
            if not future.done():
                self._reads = True
                reading = asyncio.get_running_loop().run_in_executor(self._thread, self._ask, job, body)
                reading.add_done_callback(partial(self._read, future))

    def _read(self, future: asyncio.Future[ParsedBody], reading: asyncio.Future[ParsedBody]) -> None:
        self._reads = False
        error = (
            None if reading.cancelled() else reading.exception()
        )  # asked for, whether or not its caller is still there
        if future.done():
            pass  # nobody is
        elif reading.cancelled():
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(reading.result())
        self._next()

    def _ask(self, job: Job, body: bytes) -> ParsedBody:
        if self.process is None:
            try:
                self.process = ParserProcess()
            except OSError:
                self.counts["here"] += 1
                return read(job, body)
        if self._closed:
            self.process.end()
        try:
            parsed = self.process.ask(job, body)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.process.close()
            self.process = None
            self.counts["failed"] += 1
            raise ReaderError(f"the process that reads large bodies ended over one of {len(body)} bytes") from error
        self.counts["read"] += 1
        return parsed

    def close(self) -> None:
        """Stop parsing. All pending bodies fail with an error."""
        self._closed = True
        for asked in self._waiting.values():
            for future, _, _ in asked:
                future.cancel()
        self._waiting.clear()
        process = self.process  # the thread may part with it at this very moment
        if process is not None:
            process.end()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self.process is not None:
            self.process.close()
            self.process = None


def main() -> None:
    """The process: standard input is the socket."""
    for name in (signal.SIGINT, signal.SIGTERM):  # meant for the balancer, which may still have bodies to be read
        signal.signal(name, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a prompt must not lie on a disk
    serve(socket.socket(fileno=0))


if __name__ == "__main__":
    main()
