"""The page of a DCGM exporter for emulated GPUs: each replica is one GPU of this host.

Figures follow from the replica's own state: memory from weights and KV cache, load from running requests. Pure. Reading
it does not change the replica's speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farhop_lab.engine.core.faults import Faults
    from farhop_lab.engine.core.scheduler import EngineCore

# Framebuffer in MiB, idle and full power in watts, of the GPUs that profiles are of.
_BOARDS = {"l4": ("NVIDIA L4", 23_034, 16, 72), "a100": ("NVIDIA A100-PCIE-40GB", 40_960, 36, 250)}
_H100 = ("NVIDIA H100 80GB HBM3", 81_559, 70, 700)
_OTHER_MIB = 2_000  # besides weights: activations, CUDA graphs, context
_WEIGHTS_MIB = 15_317
_KV_TOKEN_MIB = 131_072 / 2**20
_COOL_C, _HOT_C = 34.0, 68.0


def page(replicas: Sequence[tuple[EngineCore, Faults]]) -> bytes:
    """The text of the page, Prometheus' text format 0.0.4."""
    gpus = [(_labels(at, core), _figures(core, faults)) for at, (core, faults) in enumerate(replicas)]
    lines: list[str] = []
    for name, kind, about in _METRICS:
        lines += (f"# HELP {name} {about}", f"# TYPE {name} {kind}")
        lines += (f"{name}{{{labels}}} {figures[name]:g}" for labels, figures in gpus)
    return ("\n".join(lines) + "\n").encode()


_METRICS = (
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C)."),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W)."),
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %)."),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Memory utilization (in %)."),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered."),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB)."),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB)."),
)


def _board(core: EngineCore) -> tuple[str, int, int, int]:
    return _BOARDS.get(core.profile.name, _H100)


def _labels(at: int, core: EngineCore) -> str:
    name = _board(core)[0]
    return (
        f'gpu="{at}",UUID="GPU-emulated-{at}",pci_bus_id="00000000:{at:02X}:00.0",device="nvidia{at}",'
        f'modelName="{name}",Hostname="emulated"'
    )


def _figures(core: EngineCore, faults: Faults) -> dict[str, float]:
    _, memory_mib, idle_w, full_w = _board(core)
    busy = min(1.0, core.running / max(1, core.profile.sequences_max // 8)) if core.running else 0.0
    used_mib = min(memory_mib, _WEIGHTS_MIB + _OTHER_MIB + core.profile.kv_tokens * _KV_TOKEN_MIB)
    if faults.kind == "oom":
        used_mib = memory_mib
    return {
        "DCGM_FI_DEV_GPU_TEMP": round(_COOL_C + busy * (_HOT_C - _COOL_C)),
        "DCGM_FI_DEV_POWER_USAGE": round(idle_w + busy * (full_w - idle_w), 1),
        "DCGM_FI_DEV_GPU_UTIL": 100 if core.running else 0,
        "DCGM_FI_DEV_MEM_COPY_UTIL": round(100 * min(1.0, 0.5 + busy / 2)) if core.running else 0,
        "DCGM_FI_DEV_XID_ERRORS": faults.xid,
        "DCGM_FI_DEV_FB_FREE": round(memory_mib - used_mib),
        "DCGM_FI_DEV_FB_USED": round(used_mib),
    }
