"""The file by which the watching process passes its view to the workers that answer. Never interprets its contents."""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Replace the view atomically for all readers."""
    beside = path.with_suffix(".new")
    beside.write_bytes(data)
    os.replace(beside, path)


def load(path: Path) -> memoryview:
    """Map a view. The previous mapping lives as long as it is referenced."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
