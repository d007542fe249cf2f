"""`python -m farhop_lab.histories record|diff [NAME ...]`: record on purpose; see which decisions a change alters."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from farhop_lab.histories import shipped
from farhop_lab.histories.codec import dump
from farhop_lab.histories.recorder import read, write
from farhop_lab.histories.replay import amended, replay

_USAGE = """use: python -m farhop_lab.histories record|diff [NAME ...]   NAME as the files in tests/histories
     python -m farhop_lab.histories amend NAME ...         where reports alone say otherwise, take what they say
     python -m farhop_lab.histories keep NAME FILE ...     what live processes left (farhop_lab.histories.live)"""
ENTRIES_MAX = 4500
"""Of a live machine's history, as much as is kept; a longer one is left out."""


def main(args: list[str]) -> int:
    """0 for success, 1 if a decision differs, 2 for wrong arguments."""
    if len(args) > 2 and args[0] == "keep":
        return _keep(args[1], [Path(arg) for arg in args[2:]])
    if len(args) > 1 and args[0] == "amend":
        return _amend(args[1:])
    if not args or args[0] not in ("record", "diff"):
        print(_USAGE, file=sys.stderr)
        return 2
    known = shipped.catalogue()
    wanted = args[1:]
    if args[0] == "diff":
        return _diff(wanted)
    if unknown := [name for name in wanted if name not in known]:
        print(f"no history of this name: {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    for name in wanted or known:
        began = time.perf_counter()
        recorders = known[name]()
        path = shipped.KEPT / f"{name}{shipped.SUFFIX}"
        write(path, recorders)
        entries = sum(recorder.count for recorder in recorders)
        seconds = time.perf_counter() - began
        print(f"{name}: {len(recorders)} machines, {entries} entries, {path.stat().st_size} bytes, {seconds:.1f} s")
    return 0


def _keep(name: str, paths: list[Path]) -> int:
    """Those that replay (a test may do to its machine what no driver does), as one file."""
    kept = []
    for path in paths:
        for history, result in zip(read(path), replay(path), strict=True):
            if result.diverging or result.entries > ENTRIES_MAX:
                print(f"left out: {result.history}: {result.diverging} of {result.entries} entries diverge")
                continue
            kept.append(history)
    path = shipped.KEPT / f"{name}{shipped.SUFFIX}"
    path.write_bytes(dump(kept))
    print(f"{name}: {len(kept)} machines, {sum(one[1] for one in kept)} entries, {path.stat().st_size} bytes")
    return 0


def _amend(wanted: list[str]) -> int:
    """A file with a decision that differs is left as it is."""
    left = 0
    for name in wanted:
        path = shipped.KEPT / f"{name}{shipped.SUFFIX}"
        try:
            write(path, amended(path))
            print(f"{name}: {path.stat().st_size} bytes")
        except (OSError, ValueError) as error:
            print(f"left as it is: {error}")
            left = 1
    return left


def _diff(wanted: list[str]) -> int:
    paths = sorted(shipped.KEPT.glob(f"*{shipped.SUFFIX}"))
    total = 0
    for path in paths:
        if wanted and path.stem not in wanted:
            continue
        began = time.process_time()
        for one in replay(path):
            total += one.diverging
            print(f"{one.history}: {one.diverging} of {one.entries} entries diverge")
            for divergence in one.first:
                print(f"  {divergence}")
        print(f"{path.stem}: {time.process_time() - began:.2f} CPU-s")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
