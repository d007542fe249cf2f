"""Faults on command: how a broken engine behaves towards its clients.

One at a time. Pure: the clock is an argument. Never breaks anything by itself, and never outlasts its time: a forgotten
experiment ends by itself if `for_s` is given.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["oom", "fast-500", "slow", "stuck", "dead-green", "xid"]
KINDS: tuple[str, ...] = get_args(Kind)
# Torch's text; an engine passes it on in its 500, or in an error event of a stream that had begun.
OOM_TEXT = (
    "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 22.05 GiB of which 620.12 MiB is "
    "free. Including non-PyTorch memory, this process has 21.43 GiB memory in use."
)
BROKEN_TEXT = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault. `factor`: how many times slower (slow); `xid`: the driver's error code (xid); seconds `for_s`.

    - oom: work under way breaks off, new work is refused with 500, both with torch's text; /health stays 200;
    - fast-500: every request is refused with 500 at once, while /health stays 200;
    - slow: every step takes `factor` times as long;
    - stuck: requests are accepted and never answered; /health returns 503;
    - dead-green: the same, while /health returns 200;
    - xid: the GPU's exporter reports an XID; the engine keeps working.
    """

    kind: Kind
    factor: float = 10.0
    xid: int = 79
    for_s: float | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.factor <= 1e6:
            raise ValueError("factor must be within 1 and 1,000,000")
        if not 0 <= self.xid <= 1_000_000:
            raise ValueError("xid must be within 0 and 1,000,000")
        if self.for_s is not None and not 0.0 < self.for_s <= 86_400.0:
            raise ValueError("for_s must be above 0 and at most 86,400 seconds")


_decoder = msgspec.json.Decoder(Fault)


def read(body: bytes) -> Fault:
    """Parse a fault. ValueError that names the field."""
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(f"{error}; kinds are {', '.join(KINDS)}") from None


class Faults:
    """The fault in force, if any. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fault: Fault | None = None
        self._until = inf

    def command(self, fault: Fault | None) -> None:
        """From now on this is the fault, instead of any other; None mends it."""
        self._fault = fault
        self._until = inf if fault is None or fault.for_s is None else self._clock() + fault.for_s

    @property
    def kind(self) -> str:
        """The kind of fault, "" for none."""
        fault = self.now
        return fault.kind if fault is not None else ""

    @property
    def now(self) -> Fault | None:
        """The fault in force."""
        return self._fault if self._fault is not None and self._clock() < self._until else None

    def stretch(self) -> float:
        """The factor on a step's duration; infinite if none ends."""
        fault = self.now
        if fault is None:
            return 1.0
        return {"slow": fault.factor, "stuck": inf, "dead-green": inf}.get(fault.kind, 1.0)

    @property
    def refusal(self) -> str:
        """The error of new requests, "" if they are accepted."""
        return {"oom": OOM_TEXT, "fast-500": BROKEN_TEXT}.get(self.kind, "")

    @property
    def healthy(self) -> bool:
        """The result of /health."""
        return self.kind != "stuck"

    @property
    def xid(self) -> int:
        """The last error of the GPU's driver, 0 for none."""
        fault = self.now
        return fault.xid if fault is not None and fault.kind == "xid" else 0
