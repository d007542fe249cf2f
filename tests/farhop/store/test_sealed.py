"""Readers see what counts, and writers sign: over one store, and below several that are merged."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from random import Random
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from farhop.store.contract import OVERRIDE_PREFIX, ChangeKind, override_key, report_key
from farhop.store.envelope import NO_KEYS, Keys, Signer, public_key
from farhop.store.hubs import Hubs, stores_of
from farhop.store.sealed import Sealed, inner
from farhop_lab.memory_store import MemoryCluster, MemoryStore

if TYPE_CHECKING:
    from farhop.store.contract import Change, Store

OPS = Signer(
    "ops",
    Ed25519PrivateKey.from_private_bytes(bytes(32)).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
)
KEYS = Keys({"ops": (public_key(OPS.public), ["drain"])})
TOKYO, PARIS = override_key("tokyo"), override_key("paris")


@pytest.fixture
async def cluster() -> MemoryCluster:
    return MemoryCluster()


def sealed(cluster: MemoryCluster, refused: list[str], signer: Signer | None = None) -> Sealed:
    return Sealed(MemoryStore(Random(1), cluster), KEYS, refused.append, signer)


async def changes(store: Store, *steps: object) -> list[Change]:
    """What a watch of drains tells of the steps, each taken when the one before was told or passed over."""
    seen: list[Change] = []

    async def watch() -> None:
        async with aclosing(store.watch(OVERRIDE_PREFIX)) as told_changes:
            async for change in told_changes:
                seen.append(change)

    await store.open()
    task = asyncio.create_task(watch())

    async def settled() -> None:
        """However long a round of the loop takes here."""
        await asyncio.sleep(0.02)
        for _ in range(40):
            await asyncio.sleep(0)

    for step in steps:
        await settled()
        step()  # type: ignore[operator]
    await settled()
    await store.close()
    await task
    return seen


async def test_a_writer_with_a_key_signs_and_readers_get_the_bare_document(cluster: MemoryCluster) -> None:
    refused: list[str] = []
    writer, reader = sealed(cluster, refused, OPS), sealed(cluster, refused)
    await writer.open()
    await reader.open()
    revision = await writer.put(TOKYO, b'{"a":1}')
    entry = await reader.get(TOKYO)
    assert entry is not None
    assert (entry.value, entry.revision) == (b'{"a":1}', revision)
    assert cluster.get(TOKYO).value == OPS.seal(TOKYO, b'{"a":1}')  # type: ignore[union-attr]
    await writer.put(TOKYO, OPS.seal(TOKYO, b'{"a":2}'), expect_revision=revision)  # signed elsewhere, and not twice
    await writer.put(PARIS, OPS.seal(TOKYO, b'{"a":3}'))
    await writer.put(report_key("tokyo", "r1"), b"{}")
    assert [one.value for one in await reader.list(OVERRIDE_PREFIX)] == [b'{"a":2}']
    assert await reader.get(PARIS) is None
    assert (await reader.get(report_key("tokyo", "r1"))).value == b"{}"  # type: ignore[union-attr]
    assert refused == ["drain_bad_signature", "drain_bad_signature"]
    keyless = Sealed(inner(reader), NO_KEYS)
    assert (await keyless.get(PARIS)).value == b'{"a":3}'  # type: ignore[union-attr]
    assert await reader.delete(TOKYO)
    await writer.close()
    await reader.close()


async def test_a_document_with_an_invalid_signature_changes_nothing_until_its_key_is_deleted(
    cluster: MemoryCluster,
) -> None:
    refused: list[str] = []
    cluster.put(PARIS, b"nobody signed")
    cluster.put(TOKYO, OPS.seal(TOKYO, b"1"))
    found = await changes(
        sealed(cluster, refused),
        lambda: cluster.put(TOKYO, b"nobody signed"),
        lambda: cluster.put(TOKYO, OPS.seal(TOKYO, b"2")),
        lambda: cluster.delete(TOKYO),
    )
    assert [(one.kind, one.value) for one in found[1:]] == [(ChangeKind.PUT, b"2"), (ChangeKind.DELETE, b"")]
    assert [entry.value for entry in found[0].entries] == [b"1"]
    assert refused == ["drain_unsigned", "drain_unsigned"]


async def test_ignored_documents_are_listed_with_the_reason_until_signed_or_deleted(cluster: MemoryCluster) -> None:
    oslo, rome = override_key("oslo"), override_key("rome")
    for key in (oslo, PARIS, rome, TOKYO):
        cluster.put(key, b"nobody signed")
    store = sealed(cluster, [])
    seen: list[set[str]] = []
    await changes(
        store,
        lambda: seen.append(set(store.ignored)),
        lambda: cluster.put(TOKYO, OPS.seal(TOKYO, b"1")),
        lambda: cluster.delete(PARIS),
        lambda: seen.append(set(store.ignored)),
    )
    assert seen == [{oslo, PARIS, rome, TOKYO}, {oslo, rome}]
    assert set(store.ignored.values()) == {"drain_unsigned"}
    cluster.delete(oslo)
    await changes(store, lambda: None)  # what a listing no longer has
    assert set(store.ignored) == {rome}


async def test_a_new_listing_with_an_unsigned_document_keeps_the_signed_one(cluster: MemoryCluster) -> None:
    store = MemoryStore(Random(1), cluster)
    cluster.put(TOKYO, OPS.seal(TOKYO, b"1"))

    def lose_and_find() -> None:
        store.outage()
        cluster.put(TOKYO, b"nobody signed")
        cluster.compact()
        store.restore()

    found = await changes(Sealed(store, KEYS), lose_and_find)
    snapshots = [[entry.value for entry in one.entries] for one in found if one.kind is ChangeKind.SNAPSHOT]
    assert snapshots
    assert all(snapshot == [b"1"] for snapshot in snapshots)
    assert not [one for one in found if one.kind is ChangeKind.PUT]


async def test_an_unsigned_document_in_one_hub_hides_nothing_in_another() -> None:
    clusters = [MemoryCluster(), MemoryCluster()]
    clusters[0].put(TOKYO, b'{"epoch":99}')
    clusters[1].put(TOKYO, OPS.seal(TOKYO, b'{"epoch":1}'))
    hubs = Hubs({n: sealed(one, []) for n, one in zip("ab", clusters, strict=True)}, Random(2))
    await hubs.open()
    entry = await hubs.get(TOKYO)
    assert entry is not None
    assert entry.value == b'{"epoch":1}'
    assert all(isinstance(inner(one), MemoryStore) for one in stores_of(hubs, "x").values())
    await hubs.close()
