from __future__ import annotations

from collections import Counter

import xxhash

from farhop.balance.machine import Request, Tokens
from farhop_lab.sim.baselines.ring import Chwbl, ConsistentHash, Ring
from farhop_lab.sim.baselines.router import RouterState, Target

NAMES = ["us/0", "us/1", "us/2", "us/3"]


def ask(text: bytes = b"", session: int = 0) -> Request:
    return Request("r", "t", "m", len(text), len(text), (), 100.0, session=session, tokens=Tokens(text))


def state() -> RouterState:
    peers = [Target(name, name, balancer=True) for name in ("asia", "eu")]
    return RouterState("us", [*(Target(name, "us") for name in NAMES), *peers], {"us": 1.0, "eu": 91.0, "asia": 166.0})


def by_hand(names: list[str], each: int, key: int) -> list[str]:
    """Names in the order of the walk, each once."""
    points = sorted((xxhash.xxh64_intdigest(f"{name}{n}".encode()), name) for name in names for n in range(each))
    after = [name for point, name in points if point > key] + [name for point, name in points if point <= key]
    return list(dict.fromkeys(after))


def test_a_walk_starts_at_the_key_and_passes_every_name_once() -> None:
    for key in (0, 2**63, 2**64 - 1):
        assert list(dict.fromkeys(Ring(NAMES, 8).walk(key))) == by_hand(NAMES, 8, key)
        assert len(list(Ring(NAMES, 8).walk(key))) == 32


def test_key_keeps_its_node_when_other_nodes_are_excluded() -> None:
    picker, seen = ConsistentHash(), state()
    for session in range(1, 200):
        order = by_hand(NAMES, 256, session)
        assert picker.choose(ask(session=session), NAMES, seen, 0.0) == order[0]
        assert picker.choose(ask(session=session), [n for n in NAMES if n != order[0]], seen, 0.0) == order[1]


def test_other_routers_are_a_ring_of_their_own() -> None:
    picker, seen = ConsistentHash(), state()
    chosen = Counter(picker.choose(ask(text=b"%d" % n), ["asia", "eu"], seen, 0.0) for n in range(500))
    assert set(chosen) == {"asia", "eu"}
    assert min(chosen.values()) > 150, "512 points each"


def test_bounded_loads_skip_an_engine_with_too_much_load() -> None:
    picker, seen = Chwbl(), state()
    text = b"p" * 100 + b" and more that is not hashed"
    order = by_hand(NAMES, 256, xxhash.xxh64_intdigest(text[:100]))
    assert picker.choose(ask(text), NAMES, seen, 0.0) == order[0]
    # 1.25 x (7 + 1) / 4 = 2.5: two are within the bound, three are not.
    for name, load in zip(order, (3, 2, 1, 1), strict=True):
        seen.in_flight[name] = load
    assert picker.choose(ask(text), NAMES, seen, 0.0) == order[1]
    seen.in_flight[order[0]] = 2  # 1.25 x (6 + 1) / 4 = 2.19
    assert picker.choose(ask(text), NAMES, seen, 0.0) == order[0]


def test_only_the_first_hundred_characters_count() -> None:
    picker, seen = Chwbl(), state()
    chosen = {picker.choose(ask(b"s" * 100 + b"%d" % n), NAMES, seen, 0.0) for n in range(50)}
    assert len(chosen) == 1
    assert len({picker.choose(ask(b"%d" % n + b"s" * 100), NAMES, seen, 0.0) for n in range(50)}) == 4
