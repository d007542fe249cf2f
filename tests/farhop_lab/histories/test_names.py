"""The table of tags: it is unambiguous, and what both machines may be told has one."""

from __future__ import annotations

import random

from farhop.balance import machine
from farhop_lab.histories import names
from global_lb.routing.flow import GlobalFlow
from regional_lb.scheduler.flow import FlowConfig, RegionalFlow
from topology.law import Law
from topology.model import Topology


def test_every_event_has_a_tag() -> None:
    law = Law(Topology("t", 1, {}))
    region = RegionalFlow(FlowConfig("here", "a"), law, random.Random(1), lambda _: 1.0)
    entry = names.made(names.of_entry("here", law, "s", 3.0))
    assert isinstance(entry, GlobalFlow)
    kinds = set(names.KINDS)
    assert set(region.handlers) <= kinds
    assert set(entry.handlers) <= kinds


def test_every_command_has_a_tag() -> None:
    assert set(machine.Command.__subclasses__()) <= set(names.KINDS)


def test_subclass_uses_the_tag_of_its_base() -> None:
    class UsageWithText(machine.Usage, frozen=True):
        text: bytes = b""

    assert names.tag_of(UsageWithText(1, 2)) == names.tag_of(machine.Usage(1, 2))


def test_the_attributes_in_the_table_are_those_of_today() -> None:
    own = {
        "ViewSwapped": {"replicas", "regions"},
        "FlowConfig": {f"queue_{name}" for name in names.QUEUE},
    }  # the parts of these are not their fields
    for number, kind in zip(names.TAGS, names.KINDS, strict=True):
        known = {*getattr(kind, "__struct_fields__", ()), *getattr(kind, "__dataclass_fields__", ())}
        if known:
            missing = set(names.TAGS[number].fields) - known - own.get(kind.__name__, set())
            assert not missing, f"{kind.__name__} was renamed: {sorted(missing)} in farhop_lab.histories.names"


def test_every_field_is_kept_or_named_as_left_out() -> None:
    """What a machine is given and a history does not keep is decided otherwise in a replay, and nobody knows why."""
    for number, kind in zip(names.TAGS, names.KINDS, strict=True):
        if kind.__name__.startswith("_"):
            continue  # only old files have it
        fields = getattr(kind, "__struct_fields__", None) or getattr(kind, "model_fields", None)
        fields = fields or [field.name for field in getattr(kind, "__dataclass_fields__", {}).values() if field.init]
        left = set(fields) - set(names.TAGS[number].fields) - set(names.NOT_KEPT.get(kind.__name__, "").split())
        assert not left, f"{kind.__name__}: {sorted(left)} in farhop_lab.histories.names, at the end of its fields"
