"""A sound drill as a document, and the world that it is for."""

from __future__ import annotations

from functools import cache
from typing import Any

import yaml

from farhop_drill.document import Drill, Names, read
from topology import load as topologies

WORLD = topologies.load(topologies.shipped("three-regions"))
NAMES = Names(frozenset(WORLD.regions), frozenset(WORLD.tenants), frozenset({"virginia"}), frozenset({"main"}))


def raw(**changed: Any) -> dict[str, Any]:
    """The document, with parts replaced."""
    return {
        "drill": "a-drill",
        "title": "A drill",
        "kind": "traffic",
        "blast_radius": {"regions": ["virginia"]},
        "before_s": 1,
        "steps": [
            {"name": "a part", "inject": [{"do": "drain", "region": "virginia", "share": 0.25}], "soak_s": 0.5},
            {"name": "all", "inject": [{"do": "drain", "region": "virginia"}], "soak_s": 0.5},
        ],
        "after_s": 1,
        "hypotheses": [{"measure": "residency_violations", "at_most": 0}, {"measure": "rto_s", "at_most": 1}],
        "aborts": [{"measure": "error_share", "above": 0.5, "for_s": 1.0}],
        "duration_max_s": 30,
    } | changed


@cache
def _plain() -> Drill:
    return read(yaml.safe_dump(raw()).encode(), "test", NAMES)


def made(**changed: Any) -> Drill:
    """The drill of that document."""
    if not changed:
        return _plain()
    return read(yaml.safe_dump(raw(**changed)).encode(), "test", NAMES)
