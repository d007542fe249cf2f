"""The law in virtual time: each process follows what it hears, and its door says what the shipped one says."""

import json

from farhop.balance import outcome
from farhop.relay import answers
from farhop.service.authentication.authenticator import Caller
from farhop_lab.sim.law_client import elsewhere
from farhop_lab.sim.sites import flat, station
from farhop_lab.sim.world import World


def law(epoch: int, *allow: str) -> bytes:
    tenants = [{"name": "t", "residency": {"processing": {"allow": list(allow)}}}]
    return json.dumps(
        {"epoch": epoch, "author": "a", "why": "w", "at": "2026-05-01T12:00:00Z", "tenants": tenants}
    ).encode()


def world(**more) -> World:
    site = station(4, 0.5)
    return World(3, flat(["paris", "tokyo"], 40.0), {"paris": site, "tokyo": site}, **more)


def epochs(world: World) -> dict[str, int]:
    everybody = [*(one for those in world.balancers.values() for one in those), *world.regions.values()]
    return {one.name: one.flow.law.epoch for one in everybody}


def test_all_processes_except_deaf_ones_learn_of_the_law_within_the_lag() -> None:
    made = world()
    made.run(1.0)
    made.publish_law(law(4, "paris"), 0.5, deaf={"tokyo"})
    made.run(1.01)
    assert set(epochs(made).values()) == {1}
    made.run(2.0)
    assert epochs(made) == {"paris/g0": 4, "tokyo/g0": 4, "paris": 4, "tokyo": 1}


def test_a_region_that_returns_reads_the_present_law() -> None:
    made = world()
    made.run(1.0)
    made.kill("tokyo")
    made.publish_law(law(4, "paris"))
    made.run(1.5)
    assert epochs(made)["tokyo"] == 1
    made.revive("tokyo")
    assert epochs(made)["tokyo"] == 4


def test_invalid_law_is_ignored() -> None:
    made = world()
    made.publish_law(b"{")
    made.run(1.0)
    assert set(epochs(made).values()) == {1}
    assert made.regions["tokyo"].law_client.refused == ["law_malformed"]
    made.publish_law(b"")
    made.run(2.0)
    assert made.measures.violations == 0


def test_a_region_that_knows_more_refuses_and_another_serves() -> None:
    seen: list[tuple[str, str]] = []
    made = world(observer=lambda what, region, _process, _of: seen.append((what, region)))
    made.run(1.0)
    made.publish_law(law(4, "tokyo"), deaf={"paris/g0"})
    made.run(1.5)
    made.arrive("paris", "t")
    measures = made.run(5.0)
    assert (measures.outcomes, measures.refusals) == ({"served": 1}, {("paris", "unlawful_here"): 1})
    assert [one for one in seen if one[0] in ("read", "sent", "computed")] == [
        ("read", "paris"), ("sent", "paris"), ("sent", "tokyo"), ("computed", "tokyo"),
    ]  # fmt: skip


def test_entry_without_a_key_is_reported() -> None:
    made = world()
    answer = made.ask("paris", "sk-nobody")
    assert not isinstance(answer, str)
    assert answer.outcome.reason == "unknown_key"
    assert elsewhere(answer) is None
    assert not isinstance(made.regions["paris"].law_client.caller("sk-nobody", "eu"), Caller)


def test_origin_of_a_redirect_is_read() -> None:
    assert elsewhere(answers.redirect("http://tokyo.sim:80/v1/x?y=1", outcome.ENTRY_FORBIDDEN)) == "http://tokyo.sim:80"


def test_while_etcd_is_down_no_process_learns_of_changes_and_all_do_once_it_is_back() -> None:
    made = world()
    made.run(1.0)
    made.stop_etcd()
    made.publish_law(law(4, "paris"))
    made.drain("tokyo")
    made.kill_global("paris")
    made.start_global("paris")
    made.run(3.0)
    assert set(epochs(made).values()) == {1}
    made.start_etcd()
    made.run(4.0)
    assert set(epochs(made).values()) == {4}
    states = {
        str(one.flow.regions.liveness["tokyo"].read(one.relay.clock()).state)  # type: ignore[attr-defined]
        for those in made.balancers.values()
        for one in those
    }
    assert states == {"draining"}
