"""Limits as documents: read as written, and refused by the name of what is at fault or contradicts another."""

from datetime import UTC, datetime

import pytest

from farhop.balance.quota import Quota
from farhop.store.documents import limits
from farhop.store.documents.document import DocumentError
from farhop.store.documents.limits import Limit, RootClaim, TenantLimits

NOW = datetime(2026, 11, 23, tzinfo=UTC)
GOOD = {"tenant": "acme", "home": "virginia", "author": "ann", "why": "test", "at": NOW}
SMALL = Limit(requests_per_minute=10)


def test_a_tenants_limits_are_read_as_they_were_written():
    for more in ({}, {"safe_share": 0.2, "safe": ("tokyo/g1",)}, {"seq": 7}):
        one = TenantLimits(**GOOD, limits=(SMALL, Limit(key="k1", model="m", tokens_per_day=5)), **more)
        assert limits.decode(limits.encode(one)) == one
        assert one.place == "/farhop/v1/limit/acme"
    assert Limit(key="k1", tokens_per_day=5).sizes() == {"tokens_per_day": 5}
    assert [limits.period_s(name) for name in ("tokens_per_day", "tokens_per_minute", "concurrency")] == [
        86_400.0, 60.0, 0.0
    ]  # fmt: skip
    assert [limits.kind_of(name) for name in ("input_tokens_per_day", "concurrency")] == ["input_tokens", "concurrency"]
    shared = TenantLimits(**GOOD, limits=(SMALL,), safe_share=0.5, safe=("a/b", "a/c"))
    assert shared.parts(SMALL, "requests_per_minute", 60) == (Quota(30.0, 0.5), Quota(15.0, 0.25))
    each = Limit(each_user=True, requests_per_minute=60)
    assert shared.parts(each, "requests_per_minute", 60)[0] == Quota(60.0, 1.0), "users have no safe share"
    assert shared.parts(SMALL, "concurrency", 5) == (Quota(3.0, 0.0), Quota(1.0, 0.0)), "slots are whole"
    assert shared.parts(SMALL, "micro_usd_per_day", 86_400) == (Quota(86_400.0, 1.0), Quota(0.0, 0.0)), "nor has money"
    assert shared.parts(SMALL, "requests_per_minute", 1) == (Quota(1.0, 1 / 60), Quota(0.0, 0.0)), "no part holds one"
    own = TenantLimits(**GOOD, limits=(SMALL,), safe_share=1.0, safe=("a/b",))
    kept, reserved = own.parts(SMALL, "requests_per_minute", 60)
    assert (kept.depth, kept.slots, reserved) == (0.0, False, Quota(60.0, 1.0)), "what holds nothing is no slots"
    assert own.parts(SMALL, "concurrency", 5)[0].slots
    assert (limits.kind_of("micro_usd_per_month"), limits.period_s("micro_usd_per_month")) == ("usd", 2_592_000.0)
    pooled = Limit(pool="gold", requests_per_minute=60, concurrency=5, micro_usd_per_day=86_400)
    pools = {name: shared.parts(pooled, name, 60)[0].pool for name in pooled.sizes()}
    assert pools == {"requests_per_minute": "gold/requests_per_minute", "concurrency": "", "micro_usd_per_day": ""}
    claim = RootClaim(region="virginia", instance="r1", address="h:1", seq=1, first_lease=1, marks={"b": 3})
    assert limits.decode_root(limits.encode_root(claim)) == claim
    assert claim.place == "/farhop/v1/limit-root/virginia"


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("tenant", {"tenant": ""}), ("home", {"home": " "}), ("author", {"author": ""}), ("why", {"why": ""}),
        ("limits", {"limits": tuple(Limit(model=f"m{n}", tokens_per_day=1) for n in range(257))}),
        ("limits[0]", {"limits": (Limit(),)}),
        ("limits[1]", {"limits": (SMALL, SMALL)}),
        ("limits[0].key", {"limits": (Limit(key="\n", tokens_per_day=1),)}),
        ("limits[0].requests_per_day", {"limits": (Limit(requests_per_minute=10, requests_per_day=9),)}),
        ("limits[0].tokens_per_minute", {"limits": (Limit(tokens_per_minute=1, input_tokens_per_minute=2),)}),
        ("limits[0].micro_usd_per_month", {"limits": (Limit(micro_usd_per_day=10, micro_usd_per_month=9),)}),
        ("safe", {"safe": ("a/b", "a/b"), "safe_share": 0.1}),
        ("safe", {"safe": ("a/b",) * 257, "safe_share": 0.1}),
        ("safe_share", {"safe_share": 0.1}),
        ("safe_share", {"safe": ("a/b",)}),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field, more):
    with pytest.raises(DocumentError) as caught:
        limits.encode(TenantLimits(**{**GOOD, "limits": (SMALL,), **more}))
    assert caught.value.field == field


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_garbage_is_refused(document):
    with pytest.raises(DocumentError):
        limits.decode(document)
    with pytest.raises(DocumentError):
        limits.decode_root(document)
