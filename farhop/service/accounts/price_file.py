"""The price book of a running process: its file is reread when it changes, so that an epoch can be added without
restart.

Invariant: a file that cannot be read, or changes an epoch that has begun, changes nothing; the last good book stays in
force, and the fault is logged. Never decides prices.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from farhop.accounts.prices import price_book
from farhop.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.accounts.prices import Prices

LOOK_S = 2.0  # between two looks at the file


class PriceFile:
    """The book in a file. `wall_s` is epoch seconds; `changes` are called when another book is in force. Raises
    ConfigError where there is none to begin with."""

    def __init__(self, path: Path, wall_s: Callable[[], float]) -> None:
        self._path, self._wall_s = path, wall_s
        self._stamp = self._seen = self._stamp_now()
        self.prices: Prices = price_book(path)
        self.trouble = ""
        self.changes: list[Callable[[], None]] = []

    async def keep(self, on_change: Callable[[], None]) -> None:
        """Look at the file for as long as the process lives; `on_change` is called after each new book read."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await self.look():
                on_change()

    async def look(self) -> bool:
        """Read it if it is another one than that read last, and the same as at the last look. Whether it was read."""
        stamp = await asyncio.to_thread(self._stamp_now)
        still, self._seen = stamp == self._seen, stamp
        if not still or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            book = await asyncio.to_thread(price_book, self._path)
        except ConfigError as error:
            self.trouble = "; ".join(str(error).splitlines())
            return True
        changed = self.prices.changed_by(book, self._wall_s())
        if changed is not None:
            self.trouble = f"{self._path}: epoch {changed} is in force or was, and not as it was; add another instead"
            return True
        self.prices, self.trouble = book, ""
        for change in self.changes:
            change()
        return True

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
