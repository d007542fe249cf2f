"""Which replicas may take a request: those of its version, and when others."""

from __future__ import annotations

from worlds import MODEL, OTHER_MODEL, regional, replica

from farhop.balance.health.replica import Mode
from regional_lb.fleet.view import ReplicaProbed, variant_of
from regional_lb.scheduler.split import SplitConfig


def test_a_version_is_served_by_its_own_or_where_none_is_able_by_any() -> None:
    flow = regional(replica("r1", version="v1"), replica("r2", version="v2"))
    v2 = variant_of(MODEL, "v2")
    assert flow.eligibility.serving(v2, 0.0).names == ("r2",)
    assert flow.eligibility.serving(MODEL, 0.0).names == ("r1", "r2")
    assert flow.eligibility.serving(v2, 0.0, without=("r2",)).names == ("r1",)
    flow.splits.override({MODEL: SplitConfig(fallback=False)})
    assert flow.eligibility.serving(v2, 0.0, without=("r2",)).names == ()
    assert flow.eligibility.serving(variant_of(OTHER_MODEL, "v2"), 0.0).names == ()


def test_how_a_models_replicas_may_be_used_has_a_name() -> None:
    flow = regional(replica("r1"), replica("r2"), up=False)
    assert [flow.replicas.mode(model, 0.0) for model in (MODEL, OTHER_MODEL)] == [Mode.ALL_DOWN, Mode.EMPTY]
    for name in ("r1", "r2"):
        flow.handle(ReplicaProbed(name, True), 0.0)
    assert flow.replicas.mode(MODEL, 0.0) is Mode.NORMAL
