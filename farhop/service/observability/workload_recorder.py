"""Records traces of requests for capacity planning: times, lengths, shared prompt beginnings, sessions and their
pauses.

A caller with the admin port's right to read may record for a while. A recording never contains a text, a key, a tenant
or a hash that could be compared with another recording: fingerprints are keyed anew for each recording, by a hash whose
key cannot be computed from fingerprints of known prompts. Costs nothing while none is under way; a slow reader loses
rows, which are counted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from farhop.balance.prefix.chain import bytes_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farhop.balance.machine import Request, Usage

LISTENERS_MAX = 4
ROWS_MAX = 10_000  # that wait for a listener
SESSIONS_MAX = 10_000  # of a recording: of an older one, the pause is left out
FOR_S_MAX = 86_400.0
SALT_CHARS = 16, 64
FLUSH_S = 0.5


class WorkloadRecording:
    """The records that one listener has not received yet."""

    def __init__(self, salt: bytes) -> None:
        self.rows: deque[bytes] = deque()
        self.recorded, self.lost, self.unmeasured = 0, 0, 0
        self._salt = salt
        self._ended: OrderedDict[int, float] = OrderedDict()  # when a session's last answer did

    def add(self, request: Request, region: str, arrived_s: float, over_s: float, usage: Usage | None) -> None:
        """Add a finished request, in seconds of the wall clock. A request without usage is counted and left out: its
        length is unknown."""
        if usage is None or not usage.prompt_tokens:
            self.unmeasured += 1
            return
        if len(self.rows) >= ROWS_MAX:
            self.lost += 1
            return
        row: dict[str, Any] = {
            "at_s": round(arrived_s, 4),
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "region": region,
            "blocks": self._blocks(request, usage.prompt_tokens),
        }
        if request.tools:
            row["tools"] = True
        session = request.session or request.soft_session
        if session:
            row["session"] = self._fingerprint(session)
            before = self._ended.pop(session, None)
            if before is not None:
                row["pause_s"] = round(max(0.0, arrived_s - before), 4)
            self._ended[session] = over_s
            if len(self._ended) > SESSIONS_MAX:
                self._ended.popitem(last=False)
        self.recorded += 1
        self.rows.append(msgspec.json.encode(row) + b"\n")

    def _blocks(self, request: Request, prompt_tokens: int) -> list[tuple[str, int]]:
        """The prompt's whole blocks by salted fingerprint, each with its share of the tokens."""
        blocks, before = [], 0
        for depth, node in enumerate(request.chain, 1):
            until = round(prompt_tokens * min(1.0, bytes_at(depth) / max(1, request.prompt_bytes)))
            blocks.append((self._fingerprint(node), until - before))
            before = until
        return blocks

    def _fingerprint(self, number: int) -> str:
        # Not xxh3: two known prompts of a recording would give away what their salt adds, and so test every guess.
        return blake2b(number.to_bytes(8, "big"), digest_size=8, key=self._salt).hexdigest()

    def end(self) -> bytes:
        """The last line: how much was recorded and how much not."""
        counts = {"recorded": self.recorded, "lost": self.lost, "unmeasured": self.unmeasured}
        return msgspec.json.encode({"end": counts}) + b"\n"


class WorkloadRecorder:
    """Passes requests to the recordings. `region` is where requests come in. If a prefix may not be known there, the
    request comes without its chain (request_telemetry)."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.recordings: list[WorkloadRecording] = []  # none while there is no listener

    def concluded(self, request: Request, arrived_s: float, over_s: float, usage: Usage | None) -> None:
        """A request is over that came from a client, and that may be recorded here. Wall seconds."""
        for recording in self.recordings:
            recording.add(request, self.region, arrived_s, over_s, usage)

    @contextmanager
    def listening(self, salt: bytes) -> Iterator[WorkloadRecording]:
        """A recording for as long as the context lasts."""
        recording = WorkloadRecording(salt)
        self.recordings.append(recording)
        try:
            yield recording
        finally:
            self.recordings.remove(recording)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /record?for_s=60&salt=HEX: rows as JSON lines while they come, then one line that says how many."""
        try:
            for_s = float(request.query.get("for_s", "60"))
        except ValueError:
            for_s = 0.0
        if not 0.0 < for_s <= FOR_S_MAX:
            return _refusal(400, f"for_s: give seconds above 0, up to {FOR_S_MAX:g}")
        salt = request.query.get("salt", "")
        if not SALT_CHARS[0] <= len(salt) <= SALT_CHARS[1] or not (salt.isascii() and salt.isalnum()):
            return _refusal(400, f"salt: give {SALT_CHARS[0]} to {SALT_CHARS[1]} letters and digits, drawn at random")
        if len(self.recordings) >= LISTENERS_MAX:
            return _refusal(503, f"{LISTENERS_MAX} recordings are under way here: ask again later")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        with self.listening(salt.encode()) as recording:
            await response.prepare(request)
            loop = asyncio.get_running_loop()
            ends = loop.time() + for_s
            while (left := ends - loop.time()) > 0.0:
                await asyncio.sleep(min(FLUSH_S, left))
                lines = b"".join(recording.rows)
                recording.rows.clear()
                if lines:
                    await response.write(lines)
            await response.write(b"".join(recording.rows) + recording.end())
        return response


def _refusal(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
