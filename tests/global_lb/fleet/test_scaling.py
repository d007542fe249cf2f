"""What all regions together ask for, and when a pilot light burns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from worlds import MODEL, instance, seen

from farhop.balance.health.pilot_light import PilotConfig
from global_lb.fleet.scaling import HELD_S, Scaling

ALL = frozenset(("frankfurt", "london", "tokyo"))
PILOT = {"tokyo": PilotConfig(sleep_after_s=60.0)}


def view(**loads: float):
    """Regions of two replicas each, at most ten, whose load is worth so many."""
    return seen(
        *(instance(name, load_replicas=load, replicas_needed=round(load + 1.49), replicas_min=1, replicas_max=10)
          for name, load in loads.items())
    ).view  # fmt: skip


def look(scaling: Scaling, now: float, lost: frozenset[str] = frozenset(), on_map=ALL, **loads: float):
    return scaling.look(view(**loads), lambda name: name not in lost, on_map, now)


def desired(scaling: Scaling) -> dict[str, int]:
    return {name: models[MODEL] for name, models in scaling.by_region().items()}


def test_each_region_takes_on_its_share_of_the_worst_loss() -> None:
    scaling = Scaling()
    assert look(scaling, 0.0, frankfurt=4.0, london=1.0, tokyo=1.0) == []
    # The two others take 2 each of Frankfurt's 4; Frankfurt takes half of any other's 1.
    assert desired(scaling) == {"frankfurt": 5, "london": 3, "tokyo": 3}
    assert scaling.status("london") is None
    assert scaling.admitted_share("london", MODEL) == 1.0
    look(scaling, 1.0, frozenset({"frankfurt"}), frankfurt=4.0, london=3.0, tokyo=2.0)
    assert desired(scaling) == {"london": 5, "tokyo": 5}


@given(st.lists(st.floats(0.0, 3.0), min_size=3, max_size=3))
def test_without_any_one_region_the_others_hold_the_whole_load(loads: list[float]) -> None:
    of = dict(zip(sorted(ALL), loads, strict=True))
    scaling = Scaling()
    look(scaling, 0.0, **of)
    for lost in of:
        assert sum(n for name, n in desired(scaling).items() if name != lost) >= sum(loads) - 0.01


def test_bounds_of_each_region_hold_and_older_builds_say_nothing() -> None:
    scaling = Scaling()
    look(scaling, 0.0, frankfurt=90.0, london=0.0)
    assert desired(scaling) == {"frankfurt": 10, "london": 10}
    scaling.look(seen(instance("london")).view, lambda _: True, ALL, 1.0)
    assert desired(scaling) == {}


def test_a_pilot_light_covers_the_loss_in_place_of_spares() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=4.0, london=1.0, tokyo=0.0)
    assert desired(scaling) == {"frankfurt": 5, "london": 2, "tokyo": 1}
    assert (scaling.asleep("tokyo"), scaling.asleep("london")) == (True, False)
    changed = look(scaling, 1.0, frozenset({"frankfurt"}), frankfurt=4.0, london=1.0, tokyo=0.0)
    assert changed == ["tokyo"]
    assert desired(scaling) == {"london": 2, "tokyo": 3}  # London has 2 of the 5 that all of them carried
    status = scaling.status("tokyo")
    assert status == {"state": "waking", "why": f"frankfurt cannot be used for {MODEL}", "warm_share": 2 / 3}
    assert scaling.admitted_share("tokyo", MODEL) == 2 / 3


def engines_down(scaling: Scaling, now: float, least: int = 1, needed: int = 1) -> list[str]:
    """Frankfurt's balancer lives, and none of its engines."""
    down = instance("frankfurt", replicas_ready=0, replicas_needed=needed, replicas_min=least, replicas_max=10)
    rest = (
        instance(name, load_replicas=load, replicas_needed=round(load + 1.49), replicas_min=1, replicas_max=10)
        for name, load in (("london", 1.0), ("tokyo", 0.0))
    )
    return scaling.look(seen(down, *rest).view, lambda _: True, ALL, now)


def test_a_pilot_light_wakes_when_a_region_has_lost_its_engines_but_not_its_balancer() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=4.0, london=1.0, tokyo=0.0)
    assert engines_down(scaling, 1.0) == []  # a balancer that has just started reports the same
    look(scaling, 1.5, frankfurt=4.0, london=1.0, tokyo=0.0)
    assert engines_down(scaling, 2.0) == engines_down(scaling, 2.5 + 1.0) == []
    assert engines_down(scaling, 4.0) == ["tokyo"]
    assert scaling.status("tokyo")["why"] == f"frankfurt has no replica ready for {MODEL}"
    assert desired(scaling) == {"frankfurt": 1, "london": 2, "tokyo": 3}  # Frankfurt is to come back nevertheless


def test_a_region_scaled_to_zero_is_not_missed() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=0.0, london=1.0, tokyo=0.0)
    for now in (1.0, 4.0, 9.0):
        assert engines_down(scaling, now, least=0, needed=0) == []
    assert scaling.asleep("tokyo")


def test_a_pilot_light_sleeps_again_when_the_others_can_carry_the_load() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=1.0, tokyo=0.0)
    look(scaling, 1.0, frozenset({"frankfurt"}), frankfurt=1.0, tokyo=0.0)
    assert look(scaling, 2.0, frozenset({"frankfurt"}), frankfurt=1.0, tokyo=0.0) == ["tokyo"]
    assert scaling.status("tokyo")["state"] == "awake"
    assert look(scaling, 61.0, frankfurt=1.0, tokyo=0.0) == []
    assert look(scaling, 62.0, frankfurt=1.0, tokyo=0.0) == ["tokyo"]
    assert (scaling.status("tokyo")["why"], desired(scaling)["tokyo"]) == ("", 1)


def test_a_pilot_light_wakes_when_the_others_need_more_replicas_than_they_may_have() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=8.0, tokyo=0.0)
    assert scaling.asleep("tokyo")
    look(scaling, 1.0, frankfurt=14.0, tokyo=0.0)
    assert scaling.status("tokyo")["why"] == f"{MODEL} needs 15 replicas where there may be 10"
    assert desired(scaling) == {"frankfurt": 10, "tokyo": 4}


def test_a_region_that_never_served_or_left_the_map_is_not_missed() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frozenset({"london"}), frankfurt=1.0, london=1.0, tokyo=0.0)
    assert scaling.asleep("tokyo")
    look(scaling, 1.0, frankfurt=1.0, london=1.0, tokyo=0.0)
    look(scaling, 2.0, frozenset({"london"}), ALL - {"london"}, frankfurt=1.0, tokyo=0.0)
    assert scaling.asleep("tokyo")


def test_scaling_is_decided_twice_a_second_and_old_load_is_forgotten() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=4.0, tokyo=0.0)
    assert look(scaling, 0.4, frozenset({"frankfurt"}), tokyo=0.0) == []
    look(scaling, 0.6, frozenset({"frankfurt"}), tokyo=0.0)
    assert desired(scaling) == {"tokyo": 4}
    look(scaling, 1.0 + HELD_S, frozenset({"frankfurt"}), tokyo=0.0)
    look(scaling, 2.0 + HELD_S, frozenset({"frankfurt"}), tokyo=0.0)
    assert desired(scaling) == {"tokyo": 1}


def test_pilot_lights_follow_the_configuration() -> None:
    scaling = Scaling(PILOT)
    look(scaling, 0.0, frankfurt=1.0, tokyo=0.0)
    look(scaling, 1.0, frozenset({"frankfurt"}), frankfurt=1.0, tokyo=0.0)
    scaling.configure({"tokyo": PilotConfig(sleep_after_s=1.0), "london": PilotConfig()})
    assert not scaling.asleep("tokyo")
    assert scaling.asleep("london")
    scaling.configure({})
    assert scaling.pilots == {}
