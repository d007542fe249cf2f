"""`farhop bench`: what a decision costs, in CPU time of this machine. Prints figures; judges nothing."""

from __future__ import annotations

from farhop_cli import show
from farhop_cli.exits import fail
from farhop_lab import bench

BENCHES = {"decide": bench.decide}
_COLUMNS = ("what", ">median µs", ">least µs", ">most µs")


def run(name: str, as_json: bool) -> int:
    """Measure and print; the exit code."""
    measure = BENCHES.get(name)
    if measure is None:
        fail(f"bench: {name!r} is unknown; there is {', '.join(BENCHES)}")
    with show.waiting(f"measuring {name}; the figures are CPU time, medians of {bench.REPEATS} repeats"):
        rows = measure()
    if as_json:
        show.json({"bench": name, "unit": "CPU µs per request", "rows": rows})
        return 0
    title = f"{name}: CPU µs per request, {bench.REQUESTS} requests, {bench.REPEATS} repeats"
    show.table(title, _COLUMNS, [[r.what, *map(show.number, (r.median_us, r.least_us, r.most_us))] for r in rows])
    return 0
