"""The price book: what tokens cost clients, and regions their operator, by epoch. Reads its file and nothing else.

An epoch that was in force is never changed, so that what was counted under it stays what it was.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationError, model_validator

from farhop.accounts.money import PICO_OF_MICRO, Rates
from farhop.config import ConfigError, Part, parsed, problems_of

if TYPE_CHECKING:
    from pathlib import Path

ANY = "*"  # whatever has no price of its own


def _sound(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError("must be a number of 0 or more")
    return value


Usd = Annotated[float, AfterValidator(_sound)]


class ModelPrice(Part):
    """USD per million tokens. `cached`: of prompt tokens found in a KV cache; None: the same as `input`."""

    input: Usd
    output: Usd
    cached: Usd | None = None


class RegionPrice(Part):
    """What a region costs its operator: USD per GPU hour, and USD per GB of egress."""

    usd_per_gpu_hour: Usd = 0.0
    egress_usd_per_gb: Usd = 0.0


class PriceEpoch(Part):
    """The prices in force from `since` on, by model and by region. `*` means all that are not listed."""

    epoch: Annotated[int, Field(ge=1)]
    since: datetime
    models: Annotated[dict[str, ModelPrice], Field(max_length=10_000)]
    regions: Annotated[dict[str, RegionPrice], Field(max_length=10_000)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _zoned(self) -> PriceEpoch:
        if self.since.tzinfo is None:
            raise ValueError("since: must name its time zone, such as 2026-11-01T00:00:00Z")
        return self

    def of_model(self, name: str) -> ModelPrice | None:
        """The price of a model; None if it has none."""
        return self.models.get(name) or self.models.get(ANY)

    def of_region(self, name: str) -> RegionPrice:
        """The price of a region; 0 for everything if it has none."""
        return self.regions.get(name) or self.regions.get(ANY) or _FREE


_FREE = RegionPrice()


class _Book(Part):
    epochs: Annotated[list[PriceEpoch], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _rises(self) -> _Book:
        for before, after in zip(self.epochs, self.epochs[1:], strict=False):
            if after.epoch <= before.epoch or after.since <= before.since:
                raise ValueError(f"epochs: {after.epoch} must come after {before.epoch}, with a later `since`")
        return self


class Prices:
    """A price book. Epochs may be added; an epoch that has begun never changes."""

    def __init__(self, epochs: list[PriceEpoch]) -> None:
        self._by_epoch = {one.epoch: one for one in epochs}
        self._since = [one.since.timestamp() for one in epochs]
        self._epochs = [one.epoch for one in epochs]

    def epoch_at(self, at_s: float) -> int:
        """The epoch in force at a time (seconds since 1970); 0 before the first."""
        found = bisect_right(self._since, at_s)
        return self._epochs[found - 1] if found else 0

    def of(self, epoch: int) -> PriceEpoch | None:
        """The epoch with this number; None if the book has none."""
        return self._by_epoch.get(epoch)

    def changed_by(self, other: Prices, at_s: float) -> int | None:
        """The first epoch, begun by `at_s`, that `other` lacks or changes. None if `other` changes nothing in the
        past.
        """
        begun = self._epochs[: bisect_right(self._since, at_s)]
        return next((epoch for epoch in begun if other.of(epoch) != self.of(epoch)), None)

    def until(self, at_s: float) -> float:
        """When the epoch in force at `at_s` ends, in seconds since 1970; inf if no later epoch is known."""
        return next(iter(self._since[bisect_right(self._since, at_s) :]), math.inf)

    def rates(self, model: str, at_s: float, epoch: int | None = None) -> Rates | None:
        """The rates of a model at a time (seconds since 1970), or of `epoch` if it is given. None if it has no
        price.
        """
        held = self.of(self.epoch_at(at_s) if epoch is None else epoch)
        price = held.of_model(model) if held is not None else None
        if price is None:
            return None
        cached = price.input if price.cached is None else price.cached
        return Rates(*(round(one * PICO_OF_MICRO) for one in (price.input, cached, price.output)))


def price_book(path: Path) -> Prices:
    """Read a price book. Raises ConfigError with all problems in it."""
    try:
        document = parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror or error}"]) from None
    if not isinstance(document, dict):
        raise ConfigError(str(path), ["must be a mapping with `epochs`; see docs/operate/usage.md"])
    try:
        return Prices(_Book.model_validate(document).epochs)
    except ValidationError as error:
        raise ConfigError(str(path), problems_of(error, kind=_Book)) from None
