"""What a pick is made from: asked any number of times it changes nothing, and it is what then happens."""

from __future__ import annotations

from msgspec.structs import replace
from worlds import MODEL, OTHER_MODEL, regional, replica, request

from farhop.balance.machine import (
    AttemptBegan,
    AttemptEnded,
    ClientLeft,
    Forward,
    PromptTokenized,
    Request,
    RequestArrived,
    Tokens,
    Usage,
)
from regional_lb.fleet.kv_events import Cleared, Linked, Lost, Stored
from regional_lb.scheduler.flow import RegionalFlow
from regional_lb.scheduler.pick import uncached_tokens
from regional_lb.scheduler.policy import Need
from regional_lb.scheduler.split import SplitConfig


def test_consider_changes_no_state_and_predicts_the_later_choice() -> None:
    flow = regional(replica("r1", prefill_ms_per_token=1.0), replica("r2"))
    asked = request("a")
    need = flow.selector.need_of(asked)
    assert need.prompt_tokens == 256.0
    picks = [flow.selector.consider(asked, need, 0.0) for _ in range(3)]
    assert [pick.chosen.replica for pick in picks] == ["r2"] * 3
    assert (flow.under_way, len(flow.replicas.ledger), flow.replicas.trie.nodes) == (0, 0, 0)
    _, forward = flow.handle(RequestArrived(asked), 0.0)
    assert isinstance(forward, Forward)
    assert forward.target == "r2"


def test_without_replicas_there_is_no_pick_and_no_wait() -> None:
    flow = regional(replica("r1"))
    asked = request("a", model=OTHER_MODEL)
    assert flow.selector.consider(asked, flow.selector.need_of(asked), 0.0) is None
    assert flow.selector.consider(request("b"), flow.selector.need_of(request("b")), 0.0, without=("r1",)) is None
    assert flow.wait_estimate.wait_ms(OTHER_MODEL, 0.0) == 0.0


def test_what_is_kept_free_is_no_reason_to_fall_back() -> None:
    flow = regional(replica("r1", version="v1"), replica("r2", version="v2"))
    flow.splits.override({MODEL: SplitConfig(weights={"v2": 1})})
    asked = request("a")
    need = flow.selector.need_of(asked)
    assert flow.selector.consider(asked, need, 0.0, aside=("r2",)) is None
    pick = flow.selector.consider(asked, need, 0.0, without=("r2",))
    assert pick is not None
    assert (pick.version, pick.split) == ("v1", "fallback")


def hits_of(flow: RegionalFlow, need: Need) -> dict[str, float]:
    """Tokens of the prompt that each able replica is taken to hold."""
    table = flow.eligibility.serving_table(MODEL, 0.0)
    uncached = uncached_tokens(need, table, *flow.selector.hits(need, table.of))
    return dict(zip(table.of.names, (need.prompt_tokens - uncached).tolist(), strict=True))


def blocks(*ids: int) -> bytes:
    return b"".join(bytes((n, 0, 0, 0)) * 16 for n in ids)


def test_an_engines_own_report_takes_precedence_over_the_estimate() -> None:
    flow = regional(*(replace(replica(name, kv_tokens=100_000), kv_ranks=1) for name in ("r1", "r2", "r3")))
    asked = replace(request("a", 4096), tokens=Tokens(blocks(1, 2, 3, 4)))
    for name in ("r1", "r2", "r3"):
        flow.replicas.trie.insert(name, asked.chain)
    for name, change in (("r1", Cleared()), ("r2", Lost())):
        for one in (Linked(up=True), change, Stored([1, 2], None, blocks(1, 2), 16)):
            flow.replicas.blocks.apply(name, 0, one)
    need = flow.selector.need_of(asked)
    assert (need.prompt_tokens, need.bytes_per_token) == (64.0, 64.0)
    assert hits_of(flow, need) == {"r1": 32.0, "r2": 64.0, "r3": 64.0}  # r2's is known to be at least 32
    choice = flow.selector.consider(asked, need, 0.0)
    assert choice is not None
    assert {scored.replica: (scored.exact, scored.hit_tokens) for scored in choice.ranked} == {
        "r1": (True, 32.0), "r2": (False, 64.0), "r3": (False, 64.0),
    }  # fmt: skip


def test_without_tokens_the_mirror_alone_counts() -> None:
    flow = regional(replace(replica("r1"), kv_ranks=1))
    flow.replicas.blocks.apply("r1", 0, Linked(up=True))
    flow.replicas.blocks.apply("r1", 0, Cleared())
    asked = request("a")
    flow.replicas.trie.insert("r1", asked.chain)
    assert hits_of(flow, flow.selector.need_of(asked)) == {"r1": 256.0}
    empty = replace(asked, tokens=Tokens(b""))
    assert flow.selector.need_of(empty).path is None


def test_blocks_cached_under_an_adapter_do_not_count_for_its_base() -> None:
    known = replace(replica("r1"), kv_ranks=1, adapters=frozenset({"sql"}), models=frozenset({MODEL, "sql"}))
    flow = regional(known)
    for one in (Linked(up=True), Cleared(), Stored([1, 2], None, blocks(1, 2), 16, "sql")):
        flow.replicas.blocks.apply("r1", 0, one)
    asked = replace(request("a"), tokens=Tokens(blocks(1, 2, 3)))
    assert hits_of(flow, flow.selector.need_of(asked)) == {"r1": 0.0}
    by_adapter = replace(asked, model="sql")
    assert hits_of(flow, flow.selector.need_of(by_adapter)) == {"r1": 32.0}


def test_consider_includes_the_prefill_replica_of_a_pair() -> None:
    flow = regional(replica("p", role="prefill", prefill_ms_per_token=0.05), replica("d", role="decode"))
    asked = request("a", 4000, divisible=True)
    need = flow.selector.need_of(asked)
    pick = flow.selector.consider(asked, need, 0.0)
    assert pick is not None
    assert pick.prefill is not None
    assert (pick.chosen.replica, pick.prefill.replica, pick.prefill_ms) == ("d", "p", 50.0)
    for other in (
        flow.selector.consider(asked, need, 0.0, whole=True),
        flow.selector.consider(asked, need, 0.0, without=("p",)),
        flow.selector.consider(request("b", 4000), need, 0.0),
    ):
        assert other is not None
        assert (other.prefill, other.prefill_ms) == (None, 100.0)


def test_tokens_are_not_waited_for_without_a_choice_or_without_kv_events() -> None:
    alone, mute, found = (regional(*(replace(replica(n), kv_ranks=1) for n in names)) for names in ("a", "ab", "ab"))
    for flow in (alone, found):
        flow.replicas.blocks.apply("a", 0, Linked(up=True))
        flow.replicas.blocks.apply("a", 0, Cleared())
    asked = request("r")
    assert [flow.wants_tokens(asked, 0.0) for flow in (alone, mute, found)] == [False, False, True]
    assert not found.wants_tokens(replace(asked, recomputed=True), 0.0)
    assert not found.wants_tokens(replace(asked, model="nowhere"), 0.0)
    assert not found.wants_tokens(replace(asked, lawful=frozenset({"tokyo"})), 0.0)  # it will be refused
    found.replicas.blocks.apply("a", 0, Linked(up=False))
    found.replicas.blocks.apply("a", 0, Lost(all=True))
    assert not found.wants_tokens(asked, 0.0)


def test_a_prefix_that_no_replica_holds_to_its_end_is_enough_for_a_decision() -> None:
    flow = regional(*(replace(replica(name), kv_ranks=1) for name in ("r1", "r2")))
    for name in ("r1", "r2"):
        for one in (Linked(up=True), Cleared()):
            flow.replicas.blocks.apply(name, 0, one)
    asked = request("r", 4096)

    def begun(*of: int) -> Request:
        return replace(asked, tokens=Tokens(blocks(*of), whole=False))

    assert not flow.wants_tokens(begun(1, 2, 3), 0.0)
    flow.replicas.blocks.apply("r2", 0, Stored([1, 2], None, blocks(1, 2), 16))
    assert flow.wants_tokens(begun(1), 0.0)  # too little evidence
    assert flow.wants_tokens(replace(asked, tokens=Tokens(blocks(1, 2) + blocks(9)[:4], whole=False)), 0.0)
    assert not flow.wants_tokens(replace(asked, tokens=Tokens(blocks(1, 2))), 0.0)  # there are no more
    assert not flow.wants_tokens(begun(1, 2, 9, 9), 0.0)
    _, forward = flow.handle(RequestArrived(begun(1, 2, 9, 9)), 0.0)
    assert isinstance(forward, Forward)
    assert forward.reasons.chosen.exact
    assert forward.reasons.chosen.hit_tokens == (32.0 if forward.target == "r2" else 0.0)
    assert forward.reasons.chosen.hit_tokens + forward.reasons.chosen.uncached_tokens > 500.0  # of the whole prompt
    assert flow.handle(PromptTokenized("r", Tokens(blocks(1, 2, 9, 9, *range(10, 70)))), 0.1) == []
    flow.handle(AttemptBegan("r", 1, 200), 0.2)
    flow.handle(AttemptEnded("r", 1, 200, Usage(1024, 4, cached_tokens=int(forward.reasons.chosen.hit_tokens))), 0.3)
    assert (flow.replicas.mirror.guard.miscounts, flow.replicas.mirror.guard.mispredictions) == (0, 0)


def test_a_prompt_read_beside_its_request_is_placed_by_its_tokens_if_it_still_waits() -> None:
    flow = regional(*(replace(replica(name, slots=1), kv_ranks=1) for name in ("r1", "r2")))
    for name in ("r1", "r2"):
        for one in (Linked(up=True), Cleared()):
            flow.replicas.blocks.apply(name, 0, one)
    for name in ("b", "c"):
        flow.handle(RequestArrived(request(name)), 0.0)
    flow.handle(RequestArrived(request("waits", 4096)), 0.0)
    assert not flow.wants_tokens(request("next"), 0.0)  # there is a line
    flow.replicas.blocks.apply("r2", 0, Stored([1, 2], None, blocks(1, 2), 16))
    for name in ("waits", "b", "gone"):
        assert flow.handle(PromptTokenized(name, Tokens(blocks(1, 2, 3, 4))), 0.1) == []
    went = [*flow.handle(ClientLeft("b"), 0.2), *flow.handle(ClientLeft("c"), 0.2)]
    (forward,) = (one for one in went if isinstance(one, Forward))
    assert forward.id == "waits"
    assert forward.reasons.chosen.exact
    assert forward.reasons.chosen.hit_tokens == (32.0 if forward.target == "r2" else 0.0)
