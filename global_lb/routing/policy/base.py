"""The interface of a policy: it scores the candidates for one request, and says which count as equal and as
full.

Invariants: scoring writes nothing (`explain` asks, too) and a policy keeps nothing of requests; it never filters: law,
liveness and drains were applied before, and regions that are hot or come back are `pick`'s business, the same for every
policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from global_lb.fleet.table import Candidates, Column, Scored

TIE_MS = 1.0  # no round-trip time is known more exactly


class Policy(ABC):
    """How a region is preferred. `unit` is that of its scores, for people.

    `in_ms`: a penalty, bias or price adds milliseconds; in any other unit, hot regions come after all others. `ties`:
    how much worse than the best, in its unit, still counts as equal; `uncertain_waits`: the uncertainty of the waits
    counts as equal, too. `replicates_prefixes`: its score is Candidates.predicted_ms, and a prefix that draws
    requests elsewhere may be prefilled here.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    in_ms: ClassVar[bool] = False
    ties: ClassVar[float] = 0.0
    uncertain_waits: ClassVar[bool] = False
    replicates_prefixes: ClassVar[bool] = False
    wants_session: ClassVar[bool] = False

    @abstractmethod
    def score(self, candidates: Candidates) -> Column:
        """One score per candidate: lower is better, finite. The caller must not write to the result."""

    def full(self, candidates: Candidates) -> NDArray[np.bool_] | None:  # noqa: ARG002
        """The regions that are treated as hot beyond those that are. None: no region."""
        return None

    def terms(self, scored: Scored) -> dict[str, float]:  # noqa: ARG002
        """What a region's score in ms is made of, in order, before what is the same under every policy (`pick`)."""
        return {}

    def shift(self, candidates: Candidates) -> float:  # noqa: ARG002
        """A constant to subtract from every score when it is shown."""
        return 0.0


class ByRegion:
    """A number per region as a column, made once for as long as the same regions are asked for."""

    __slots__ = ("_column", "_names", "_of", "_other")

    def __init__(self, of: Mapping[str, float], other: float) -> None:
        self._of, self._other = of, other
        self._names: tuple[str, ...] = ()
        self._column: Column = np.empty(0)

    def column(self, names: tuple[str, ...]) -> Column:
        """The value of each region; `other` for regions without one."""
        if names is not self._names:
            self._names = names
            self._column = np.array([self._of.get(name, self._other) for name in names])
        return self._column
