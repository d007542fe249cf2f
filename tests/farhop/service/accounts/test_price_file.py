"""A price book that changes while its process runs: added epochs count, rewritten ones do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farhop.config import ConfigError
from farhop.service.accounts.price_file import PriceFile

FIRST = "- {epoch: 1, since: 2026-01-01T00:00:00Z, models: {m: {input: 1.0, output: 4.0}}}\n"
NEXT = "- {epoch: 2, since: 2026-12-01T00:00:00Z, models: {m: {input: 2.0, output: 8.0}}}\n"
NOW_S = 1_795_000_000.0  # November 2026


class Written:
    """A file that is written anew, and looked at until that is seen to stand still."""

    def __init__(self, folder: Path) -> None:
        self.path, self.times, self.changes = folder / "prices.yaml", 0, 0
        self.write(FIRST)
        self.file = PriceFile(self.path, lambda: NOW_S)
        self.file.changes.append(self.changed)

    def changed(self) -> None:
        self.changes += 1

    def write(self, *epochs: str) -> None:
        self.path.write_text("epochs:\n" + "".join(epochs))
        self.times += 1
        os.utime(self.path, (self.times, self.times))

    async def look(self) -> list[bool]:
        return [await self.file.look() for _ in range(3)]


async def test_an_epoch_that_is_added_counts_once_the_file_stands_still(tmp_path: Path) -> None:
    one = Written(tmp_path)
    assert await one.look() == [False, False, False]
    one.write(FIRST, NEXT)
    assert await one.look() == [False, True, False]
    assert (one.changes, one.file.trouble, one.file.prices.epoch_at(NOW_S + 1e7)) == (1, "", 2)
    one.write(FIRST, NEXT.replace("8.0", "9.0"))
    await one.look()
    rates = one.file.prices.rates("m", NOW_S + 1e7)
    assert (one.changes, rates.output if rates else 0) == (2, 9_000_000), "it has not begun"


@pytest.mark.parametrize(
    ("epochs", "says"),
    [
        ([FIRST.replace("4.0", "5.0")], "epoch 1"), ([NEXT], "epoch 1"), (["nonsense"], "prices.yaml"),
        ([NEXT, FIRST], "must come after"),
    ],
)  # fmt: skip
async def test_prices_that_rewrite_the_past_or_cannot_be_read_change_nothing(
    tmp_path: Path, epochs: list[str], says: str
) -> None:
    one = Written(tmp_path)
    one.write(*epochs)
    assert await one.look() == [False, True, False]
    assert says in one.file.trouble
    assert (one.changes, one.file.prices.epoch_at(NOW_S)) == (0, 1)
    one.path.unlink()
    await one.look()
    assert one.file.trouble
    one.write(FIRST, NEXT)
    await one.look()
    assert (one.changes, one.file.trouble) == (1, "")


def test_a_missing_price_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        PriceFile(tmp_path / "none.yaml", lambda: NOW_S)
