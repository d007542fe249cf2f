"""NVIDIA's DCGM metrics of a host's GPUs, and which of them mean that an engine there cannot work.

Invariants: a value outside its domain is omitted. Only an XID that needs a reset of the GPU or a repair is a fault:
most are the application's own. A hot or full GPU is strained: it gets less work. Never fetches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from regional_lb.engines.signals.exposition import Page, PageError, labels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_XID, _TEMPERATURE, _FREE = b"DCGM_FI_DEV_XID_ERRORS", b"DCGM_FI_DEV_GPU_TEMP", b"DCGM_FI_DEV_FB_FREE"
_MOST = {_XID: 1e6, _TEMPERATURE: 1e3, _FREE: 1e9}

# After NVIDIA's XID catalogue: a reset or a repair is due, and until then no CUDA work succeeds on the device.
FATAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "fell off the bus",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}


def _worse_xid(one: float, other: float) -> float:
    """A fatal one is worse than any that is not, whatever their numbers."""
    return max(one, other, key=lambda xid: (xid in FATAL_XIDS, xid))


_WORSE: dict[bytes, Callable[[float, float], float]] = {_XID: _worse_xid, _TEMPERATURE: max, _FREE: min}


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `index` as the host counts, `xid` the last error's code (0: none; of several parts' the worst); None
    where it is not told."""

    index: str
    uuid: str
    xid: int | None = None
    temperature_c: float | None = None
    free_mib: float | None = None


def read_gpus(text: bytes) -> tuple[Gpu, ...]:
    """The GPUs on an exporter's page. Parts of one (MIG) count as one: the worst value of each. Raises PageError."""
    page = Page(text)
    found: dict[tuple[str, str], dict[bytes, float]] = {}
    for name, most in _MOST.items():
        for labels, number in page.series(name):
            known = labels_of(labels)
            gpu = found.setdefault((_label(known, b"gpu"), _label(known, b"UUID")), {})
            value = _sound(number, most)
            if value is not None:
                gpu[name] = _WORSE[name](value, gpu.get(name, value))
    if not found:
        raise PageError("missing", f"none of {', '.join(n.decode() for n in _MOST)} is on the page: is this DCGM's?")
    return tuple(
        Gpu(index, uuid, int(of[_XID]) if _XID in of else None, of.get(_TEMPERATURE), of.get(_FREE))
        for (index, uuid), of in found.items()
    )


def fault(gpus: Iterable[Gpu], mine: Collection[str]) -> str:
    """The fault among the GPUs whose index or UUID is in `mine` (all of them if it is empty), "" if there is none."""
    for gpu in gpus:
        if gpu.xid in FATAL_XIDS and (not mine or gpu.index in mine or gpu.uuid in mine):
            return f"GPU {gpu.index or gpu.uuid}: XID {gpu.xid}, {FATAL_XIDS[gpu.xid]}"
    return ""


def strain(gpus: Iterable[Gpu], mine: Collection[str], temperature_c_max: float, free_mib_min: float) -> str:
    """What strains one of `mine` (as `fault`): above this temperature, or less memory free than this; "" if nothing."""
    for gpu in gpus:
        if mine and gpu.index not in mine and gpu.uuid not in mine:
            continue
        if gpu.temperature_c is not None and gpu.temperature_c > temperature_c_max:
            return f"GPU {gpu.index or gpu.uuid}: {gpu.temperature_c:.0f} °C, above {temperature_c_max:.0f}"
        if gpu.free_mib is not None and gpu.free_mib < free_mib_min:
            return f"GPU {gpu.index or gpu.uuid}: {gpu.free_mib:.0f} MiB free, below {free_mib_min:.0f}"
    return ""


def _label(labels: dict[bytes, bytes], name: bytes) -> str:
    return labels.get(name, b"").decode(errors="replace")[:64]


def _sound(number: bytes, most: float) -> float | None:
    try:
        value = float(number)
    except ValueError:
        return None
    return value if 0.0 <= value <= most else None
