"""Delivers usage records from files to the billing system by HTTP, in order and at least once.

The position is stored beside the files, and written only after the receiver accepted the records. So a process killed
in between sends some records again, and the receiver recognises them by their ids. Never sends records that the law
keeps here, never follows a redirect, and never blocks requests: records that are not accepted stay on the disk.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from farhop.accounts import usage
from farhop.accounts.segments import OPEN, WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farhop.service.config.process import UsageHttp
    from farhop.telemetry.logs import Throttled

RETRY_S = 0.5, 30.0  # of deliveries that fail: the first pause, and the longest
IDLE_S = 0.5
BATCH_BYTES_MAX = 1 << 20
_CURSOR = "delivered"
_MALFORMED = (400, 413, 415, 422)


_Whose: TypeAlias = "tuple[str, str, str]"
_Batch: TypeAlias = "list[tuple[bytes, _Whose]]"
"""Lines, and of which tenant, model and key each tells."""
_NOBODY: _Whose = ("", "", "")


class _Cursor(msgspec.Struct, frozen=True):
    """The position up to which records are delivered: a file, and an offset in it."""

    moment: str = ""
    offset: int = 0


class Delivery:
    """Sends the records in files on, in order, at least once; the position is stored beside the files. `may_leave`:
    whether the law in force lets a record of this tenant, model and key go to the receiver."""

    def __init__(
        self, folder: Path, config: UsageHttp, log: Throttled, may_leave: Callable[[str, str, str], bool]
    ) -> None:
        self._folder, self._config, self._log, self._may_leave = folder, config, log, may_leave
        self.region = config.region
        self._cursor = _Cursor()
        self._most = config.batch_max
        self._session: ClientSession | None = None
        self.trouble = ""
        self.delivered = self.rejected = self.kept_back = 0

    def has_read(self, path: Path) -> bool:
        """Whether all records of a complete file are delivered."""
        return path.name.partition(".")[0] < self._cursor.moment

    async def keep(self) -> None:
        """Deliver until cancelled."""
        await asyncio.to_thread(self._load)
        pause_s = RETRY_S[0]
        while True:
            found, after, kept_back = await asyncio.to_thread(self._next)
            if after == self._cursor:
                await asyncio.sleep(IDLE_S)
                continue
            batch = self._lawful(found)
            kept_back += len(found) - len(batch)
            verdict = await self._send(batch) if batch else "taken"
            if verdict == "later":
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])
                continue
            if verdict == "malformed" and self._most > 1 and len(batch) > 1:
                self._most = max(1, len(batch) // 2)  # until it is known which one it is
                continue
            pause_s = RETRY_S[0]
            if verdict == "malformed":
                self.rejected += len(batch)
            else:
                self.delivered += len(batch)
                self._most = min(self._config.batch_max, 2 * self._most)
            self.kept_back += kept_back
            await asyncio.to_thread(self._save, after)

    async def close(self) -> None:
        """Stop delivering."""
        if self._session is not None:
            await self._session.close()

    def _lawful(self, batch: _Batch) -> list[bytes]:
        """What may leave by the law of now, too: after an outage that is not the one that it was written under."""
        may_leave = {whose: self._may_leave(*whose) for whose in {whose for _, whose in batch}}
        return [line for line, whose in batch if may_leave[whose]]

    async def _send(self, batch: list[bytes]) -> str:
        if self._session is None:
            self._session = ClientSession(timeout=ClientTimeout(self._config.timeout_s), trust_env=True)
        headers = {"Content-Type": "application/cloudevents-batch+json"}
        if self._config.token is not None:
            headers["Authorization"] = f"Bearer {self._config.token.get_secret_value()}"
        body = b"[" + b",".join(line.rstrip(b"\n") for line in batch) + b"]"
        try:
            # A redirect leads where the law of the records was not asked about, and may answer 200 and take nothing.
            answer = await self._session.post(self._config.url, data=body, headers=headers, allow_redirects=False)
            async with answer:
                status = answer.status
        except (ClientError, TimeoutError, OSError) as error:
            return self._later(f"no answer: {type(error).__name__}")
        if 200 <= status < 300:
            self.trouble = ""
            return "taken"
        if status in _MALFORMED:
            self._later(f"it answered {status}")
            return "malformed"
        return self._later(f"it answered {status}")

    def _later(self, why: str) -> str:
        self.trouble = f"{self._config.url.partition('?')[0]}: {why}"
        self._log.warning("usage is not delivered", why, problem=self.trouble)
        return "later"

    def _next(self) -> tuple[_Batch, _Cursor, int]:
        """The next batch, where that leads, and how many lines of it may not leave."""
        files = {path.name.partition(".")[0]: path for path in self._folder.glob("*.jsonl*")}
        for moment in sorted(one for one in files if one >= self._cursor.moment):
            at = self._cursor.offset if moment == self._cursor.moment else 0
            batch, end, kept_back = self._of(files[moment], at)
            if end > at:
                return batch, _Cursor(moment, end), kept_back
            if files[moment].name.endswith(OPEN):
                break
        return [], self._cursor, 0

    def _of(self, path: Path, at: int) -> tuple[_Batch, int, int]:
        batch, size, kept_back = list[tuple[bytes, _Whose]](), 0, 0
        try:
            file = path.open("rb")
        except FileNotFoundError:  # it became whole at this moment
            try:
                file = path.with_name(path.name.partition(".")[0] + WHOLE).open("rb")
            except FileNotFoundError:
                return [], at, 0
        with file:
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n") or len(batch) >= self._most or size > BATCH_BYTES_MAX:
                    break
                at, size = at + len(line), size + len(line)
                if b'"farhopstays":true' in line:
                    kept_back += 1
                else:
                    event = usage.read(line)
                    said = event.data if event is not None else None
                    batch.append((line, _NOBODY if said is None else (said.tenant, said.model, said.key)))
        return batch, at, kept_back

    def _load(self) -> None:
        try:
            self._cursor = msgspec.json.decode((self._folder / _CURSOR).read_bytes(), type=_Cursor)
        except (OSError, msgspec.DecodeError):
            self._cursor = _Cursor()  # sent again: the receiver recognises it by its id

    def _save(self, cursor: _Cursor) -> None:
        beside = self._folder / f".{_CURSOR}.new"
        try:
            beside.write_bytes(msgspec.json.encode(cursor))
            beside.replace(self._folder / _CURSOR)
        except OSError as error:
            self._log.warning("usage delivered", "cursor", problem=f"{beside}: {error.strerror or error}")
        self._cursor = cursor
