"""Which instances can be asked, and what they offer: by reports, by what they share, and by refusals."""

from __future__ import annotations

from worlds import MODEL, OTHER_MODEL, capacity, instance, seen

from farhop.balance import outcome
from global_lb.fleet.instances import Instances
from global_lb.fleet.view import Instance

OWNER = instance("london", "a", wait_ms=50.0, slots_free=7, slots_total=8, usable_share=1.0, used_share=0.9)
OTHER = instance("london", "b", wait_ms=5.0, replicas_ready=0, slots_free=0, slots_total=0, usable_share=1.0)
USED = (("a", 0.3), ("b", 0.8))


def take(known: Instances, *instances: Instance) -> bool:
    """These are all there are of each of their regions. Whether other models can be asked for anywhere."""
    found = [known.take(name, region) for name, region in seen(*instances).view.regions.items()]
    return any(found)


def able(*instances) -> list[str]:
    known = Instances()
    take(known, *instances)
    return [i.name for i in known.able("london", MODEL)]


def test_an_instance_that_reaches_others_replicas_is_able_and_a_draining_one_is_not() -> None:
    assert able(OWNER, OTHER) == ["a", "b"]
    blind = instance("london", "b", replicas_ready=0, usable_share=0.0)
    assert able(OWNER, blind) == ["a"]
    assert able(OTHER) == ["b"]  # of a replica that moves to another instance, and that none reports for a moment
    assert able(OWNER, instance("london", "b", draining=True)) == ["a"]


def test_instances_of_a_region_share_slots_but_each_has_its_own_wait() -> None:
    known = Instances()
    take(known, OWNER, OTHER)
    offered = known.capacity(OTHER, MODEL)
    assert (offered.slots_free, offered.slots_total, offered.wait_ms) == (7, 8, 5.0)
    take(known, OTHER)
    assert known.capacity(OTHER, MODEL).slots_free == 0


def test_whether_others_can_be_asked_is_known() -> None:
    known, two = Instances(), instance("tokyo", models={OTHER_MODEL: capacity()})
    assert take(known, OWNER)
    assert not take(known, OWNER, OTHER)  # the same region for the same model
    assert take(known, OWNER, two)
    assert (known.serving(MODEL), known.serving(OTHER_MODEL)) == (("london",), ("tokyo",))
    assert not known.take("oslo", None)  # nothing was known about it
    assert known.take("london", None)
    assert known.serving(MODEL) == ()


def test_a_refusal_holds_until_the_next_report_and_keeps_what_is_shared() -> None:
    known, elsewhere = Instances(), instance("tokyo")
    take(known, OWNER, OTHER)
    known.refused(OTHER, MODEL, outcome.FOREIGN_FULL, 70.0)
    found = known.capacity(OTHER, MODEL)
    assert (found.wait_ms, found.headroom_foreign_tokens, found.slots_free) == (70.0, 0.0, 7)
    assert known.reported(OTHER, MODEL).wait_ms == 5.0
    take(known, OWNER, OTHER, elsewhere)  # another instance's report
    assert known.capacity(OTHER, MODEL).wait_ms == 70.0
    newer = instance("london", "b", wait_ms=6.0, received_at=OTHER.received_at + 1.0)
    take(known, OWNER, newer)
    assert known.capacity(newer, MODEL).wait_ms == 6.0
    take(known, OWNER, OTHER)
    assert known.capacity(OTHER, MODEL).wait_ms == 5.0  # forgotten, not only hidden


def test_a_region_s_use_is_by_slots_or_by_its_fullest_instance_if_none_has_slots() -> None:
    known = Instances()
    half = instance("london", "b", slots_total=24, used_share=0.5)
    take(known, OWNER, half)
    assert known.used_share("london", MODEL) == (0.9 * 8 + 0.5 * 24) / 32
    none = [instance("london", n, replicas_ready=0, slots_total=0, usable_share=1.0, used_share=u) for n, u in USED]
    take(known, *none)
    assert known.used_share("london", MODEL) == 0.8
