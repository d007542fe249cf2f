"""docs/reference lists exactly the metrics and the commands that the code exposes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import reference

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("document", reference.TABLES, ids=lambda document: document.name)
def test_a_table_lists_what_the_code_exposes(document: Path) -> None:
    made: Callable[[], str] = reference.TABLES[document]
    listed, exposed = (set(table.splitlines()) for table in (reference.between(document.read_text()), made()))
    wrong = [*(f"gone:    {line}" for line in listed - exposed), *(f"missing: {line}" for line in exposed - listed)]
    if wrong:
        pytest.fail("\n".join((f"{document.name}: run `python tests/house/reference.py`", *wrong)), pytrace=False)


def test_every_metric_has_a_meaning_in_the_reference() -> None:
    assert all(metric.meaning for metric in reference.metrics())
    assert all(what for _, what in reference.commands())
    assert len(reference.metrics()) > 50
    assert len(reference.commands()) > 50


def test_every_field_of_a_topology_is_listed_with_what_it_is() -> None:
    """Every class that a document of a topology is made of, and of each every field."""
    listed = set(reference.PLACES_OF_A_TOPOLOGY.values())
    assert listed == {one for one in vars(reference.schema).values() if _is_a_part(one)}
    for kind in listed:
        for name, default, what, write in reference.fields(kind):
            assert default, name
            assert what, name
            assert write, name


def _is_a_part(one: object) -> bool:
    schema = reference.schema
    return isinstance(one, type) and issubclass(one, schema.Doc) and one not in (schema.Doc, schema.LawDoc)


def test_metrics_that_the_documents_name_are_exposed() -> None:
    """By their whole name, a counter also without its `_total`."""
    packages = {"farhop_cli", "farhop_drill", "farhop_lab", "farhop_wire"}
    exposed = {metric.name for metric in reference.metrics()} | packages
    exposed |= {name.removesuffix("_total") for name in exposed}
    documents = [*(reference.ROOT / "docs").rglob("*.md"), reference.ROOT / "README.md"]
    gone = [
        f"{document.name}: {name}"
        for document in sorted(documents)
        for name in sorted(set(re.findall(r"\bfarhop_[a-z0-9_]*[a-z0-9]\b", document.read_text())) - exposed)
    ]
    if gone:
        pytest.fail("\n".join(("these metrics are not there (any more):", *gone)), pytrace=False)


def test_every_header_of_farhop_s_own_is_listed() -> None:
    """What a client may send, what an answer has, and what balancers say to each other."""
    named = re.compile(r"x-farhop-[a-z]+(?:-[a-z]+)*")
    packages = ("farhop", "global_lb", "regional_lb")
    sources = [path for package in packages for path in (reference.ROOT / package).rglob("*.py")]
    used = {name for path in sources for name in named.findall(path.read_text())}
    listed = set(named.findall((reference.ROOT / "docs" / "reference" / "headers.md").read_text()))
    assert used == listed
