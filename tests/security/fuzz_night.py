"""Both fuzz targets by one command: heads (tests/farhop/relay/fuzz.py), bodies and answers (fuzz_bodies.py).

    make fuzz                                                      a million rounds, some minutes
    python tests/security/fuzz_night.py --rounds 1000 --seed 7     so many, from that seed
    python tests/security/fuzz_night.py --seed 7 --first 412 --rounds 1     one of them again

A round is one connection's heads, one body and one answer, and depends on the seed and its number alone. Ends with the
first finding, and says how to see it again.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "farhop" / "relay"))
sys.path.insert(0, str(Path(__file__).parent))

import fuzz as heads
import fuzz_bodies as bodies

_SLICE = 500  # rounds that a process takes at a time


class FindingError(Exception):
    """Something that is not as it must be. Its text says how to see it again."""


async def _rounds(seed: int, first: int, count: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(first, first + count):
        rng = Random(seed << 32 | number)
        try:
            found["requests passed"] += heads.check(rng)
            found["bodies passed"] += bodies.check(rng)
            bodies.answered(rng)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            again = f"--seed {seed} --first {number} --rounds 1"
            raise FindingError(f"{traceback.format_exc()}\nsee it again by {again}") from None
        found["rounds"] += 1
        await asyncio.sleep(0)
    return found


def rounds(seed: int, first: int, count: int) -> Counter[str]:
    """So many rounds from number `first`: how many ran, and of what passed. Raises FindingError."""
    return uvloop.run(_rounds(seed, first, count))


def _counted(job: tuple[int, int, int]) -> Counter[str] | str:
    try:
        return rounds(*job)
    except FindingError as finding:
        return str(finding)


def main(arguments: list[str] | None = None) -> int:
    """The command. 1 if something was found."""
    parser = argparse.ArgumentParser(description="fuzzed heads, bodies and answers", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() >> 10 & 0xFFFF_FFFF)
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args(arguments)
    end, began, all_told = given.first + given.rounds, time.monotonic(), Counter[str]()
    jobs = [(given.seed, at, min(_SLICE, end - at)) for at in range(given.first, end, _SLICE)]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for one in pool.imap_unordered(_counted, jobs):
            if isinstance(one, str):
                print(one)
                return 1
            all_told += one
    took = time.monotonic() - began
    figures = ", ".join(f"{count} {what}" for what, count in all_told.items())
    print(f"seed {given.seed}: {figures}; nothing found in {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
