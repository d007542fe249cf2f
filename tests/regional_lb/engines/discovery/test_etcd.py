"""Over a real etcd: engines come under leases of their own, go with them, and talk nonsense."""

from __future__ import annotations

import contextlib
from random import Random

import msgspec
from inprocess import until
from sources import following

from farhop.store.contract import Change, ChangeKind, StoreError, replica_prefix
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings
from farhop_lab.memory_store import MemoryStore
from farhop_lab.world.etcd import EmbeddedEtcd
from regional_lb.engines.config import EtcdSource, Template
from regional_lb.engines.discovery import etcd as module
from regional_lb.engines.discovery.etcd import EtcdKeys

CONFIG = EtcdSource(kind="etcd", replica=Template(models=["m"]))
PREFIX = "/farhop/v1/replica/virginia/"


def value(host: str, **more: object) -> bytes:
    return msgspec.json.encode({"url": f"http://{host}:8000", **more})


async def test_engines_come_and_go_with_their_keys_through_an_outage() -> None:
    assert replica_prefix("virginia") == PREFIX
    async with EmbeddedEtcd() as etcd:
        store = EtcdStore(EtcdSettings((etcd.endpoint,), timeout_s=1.5), Random(1))
        await store.open()
        try:
            await store.put(PREFIX + "a", value("10.0.0.1", models=["own"]))
            await store.put("/farhop/v1/replica/virginia-2/x", value("10.0.0.9"))
            async with following(EtcdKeys(CONFIG, "virginia", store)) as found:
                await found.come("a")
                assert found.found is not None
                assert found.found.replicas[0].models == ["own"]
                own = await store.publish(PREFIX + "b", value("10.0.0.2"), 5.0)  # as an engine's sidecar would
                await found.come("a", "b")
                await own.update(value("10.0.0.2", draining=True))
                await until(lambda: found.draining() == ["b"])
                await own.withdraw()
                await found.come("a")
                await store.put(PREFIX + "a", b'{"url": 7}')
                await until(lambda: found.found is not None and found.found.problems)
                assert found.labels == ["a"]  # its earlier entry stays
                etcd.pause()
                await until(lambda: found.failures)
                assert found.labels == ["a"]
                etcd.resume()
                await store_put(store, PREFIX + "c", value("10.0.0.3"))
                await until(lambda: found.labels is not None and "c" in found.labels)
                await store.delete(PREFIX + "c")
                await until(lambda: found.labels is not None and "c" not in found.labels)
        finally:
            await store.close()


async def store_put(store: EtcdStore, key: str, text: bytes) -> None:
    for _ in range(50):
        with contextlib.suppress(StoreError):
            await store.put(key, text)
            return
    raise AssertionError("etcd did not come back")


def test_a_wrong_value_in_etcd_does_not_affect_other_replicas() -> None:
    source = EtcdKeys(CONFIG, "virginia", MemoryStore(Random(1)))

    def put(key: str, text: bytes):
        return source.changed(Change(ChangeKind.PUT, key=PREFIX + key, value=text))

    assert [replica.label for replica in put("a", value("1")).replicas] == ["a"]
    for text, says in (
        (b"{", "is not JSON"), (b"[]", "must be a mapping"), (b'{"url":"http://x:1","name":"n"}', "leave it out"),
        (b'{"url":"http://x:1","engine":"tensorrt"}', "there is vllm"), (b"[" * 60_000, "is not JSON"),
        (b" " * (module.VALUE_BYTES_MAX + 1), "at most 65536"),
    ):  # fmt: skip
        step = put("b", text)
        assert [replica.label for replica in step.replicas] == ["a"]
        assert PREFIX + "b" in step.problems[0]
        assert says in step.problems[0]
    assert "must be " + PREFIX + "NAME" in put("c/d", value("1")).problems[1]
    assert put("b", value("2")).problems[0].startswith(PREFIX + "c/d")  # repaired
    gone = source.changed(Change(ChangeKind.DELETE, key=PREFIX + "a"))
    assert [replica.label for replica in gone.replicas] == ["b"]
    assert source.changed(Change(ChangeKind.SNAPSHOT)).replicas == ()
