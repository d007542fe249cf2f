"""The limits in etcd: an unreadable document changes nothing, and buckets have one name everywhere."""

from datetime import UTC, datetime

from farhop.balance.quota import Quota
from farhop.service.limits.book import LimitBook, bucket_of, kind_and_whose
from farhop.store.contract import Change, ChangeKind, limit_key
from farhop.store.documents import limits as documents
from farhop.store.documents.limits import Limit, TenantLimits

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def test_documents_of_another_place_and_nonsense_change_nothing() -> None:
    refused: list[str] = []
    book = LimitBook(None, refused.append)  # type: ignore[arg-type]
    one = TenantLimits(
        tenant="acme", home="tokyo", limits=(Limit(tokens_per_day=86_400),), author="a", why="w", at=NOW,
        safe_share=0.5, safe=("tokyo/g1",),
    )  # fmt: skip
    book.changed(Change(ChangeKind.PUT, 1, limit_key("acme"), documents.encode(one)))
    book.changed(Change(ChangeKind.PUT, 2, limit_key("other"), documents.encode(one)))
    book.changed(Change(ChangeKind.PUT, 3, limit_key("acme"), b"nonsense"))
    assert refused == ["limit_misplaced", "limit_malformed"]
    assert list(book.lent_by("tokyo").values()) == [Quota(43_200.0, 0.5)]
    assert book.lent_by("virginia") == {}
    assert set(book.status()["problems"]) == {limit_key("acme"), limit_key("other")}
    book.changed(Change(ChangeKind.SNAPSHOT, 4))
    assert book.tenants() == {}


def test_bucket_name_contains_kind_and_holder() -> None:
    named = {
        ("requests", "tenant"): (Limit(), "requests_per_minute"),
        ("usd", "model"): (Limit(model="m"), "micro_usd_per_day"),
        ("output_tokens", "key"): (Limit(key="k", model="m"), "output_tokens_per_day"),
        ("concurrency", "user"): (Limit(key="k", each_user=True), "concurrency"),
    }
    buckets = {bucket_of('ac"me', *one): each for each, one in named.items()}
    assert len(buckets) == len(named)
    assert all(kind_and_whose(bucket) == each for bucket, each in buckets.items())
    assert kind_and_whose(bucket_of("acme", *named["concurrency", "user"]) + "4f2a") == ("concurrency", "user")
