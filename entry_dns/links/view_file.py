"""The file by which the watching process passes its view to the workers that answer. Never interprets its contents."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Put a view in the place of the one before, at once for whoever opens it."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    os.replace(beside, path)


def load(path: Path) -> memoryview:
    """Map a view. What was mapped before lives as long as somebody holds it."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
