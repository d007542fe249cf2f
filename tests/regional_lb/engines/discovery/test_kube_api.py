"""List and watch against a real HTTP double of the API server: pages, bookmarks, 410, breaks, silence, TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from inprocess import until
from kube_double import PODS, Cluster

from farhop.service.config.certificates import load
from farhop.service.config.endpoints import ListenTls
from farhop.service.process.clock import wall
from farhop_lab.world.certs import Authority
from regional_lb.engines.config import KubernetesSource
from regional_lb.engines.discovery import kube_api
from regional_lb.engines.discovery.kube_api import Api, Changed, KubeError, Listed, Lost, Step, Timing

TIMING = Timing(timeout_s=30.0, watch_s=30.0, margin_s=0.2, first_s=0.01, limit_s=0.05)


class Recorded:
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def names(self) -> list[str]:
        """As a reader who believes every step has it."""
        known: set[str] = set()
        for step in self.steps:
            if isinstance(step, Listed):
                known = {thing["metadata"]["name"] for thing in step.objects}
            elif isinstance(step, Changed):
                name = {step.object["metadata"]["name"]}
                known = known - name if step.gone else known | name
        return sorted(known)

    def count(self, kind: type) -> int:
        return sum(isinstance(step, kind) for step in self.steps)

    async def know(self, *names: str) -> None:
        await until(lambda: self.names() == list(names))


def api(cluster: Cluster, timing: Timing = TIMING, **more: Any) -> Api:
    fields = {"kind": "kubernetes", "service": "vllm", "api": cluster.url, **more}
    return Api(KubernetesSource.model_validate(fields), Random(1), timing, {})


@contextlib.asynccontextmanager
async def following(cluster: Cluster, timing: Timing = TIMING, **more: Any) -> AsyncIterator[Recorded]:
    found, client = Recorded(), api(cluster, timing, **more)

    async def follow() -> None:
        async for step in client.follow(PODS, {"labelSelector": "app=a"}):
            found.steps.append(step)

    await client.open()
    task = asyncio.create_task(follow())
    try:
        yield found
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await client.close()


A = {"app": "a"}


async def test_a_list_comes_in_pages_and_what_follows_in_order(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    cluster = Cluster()
    async with cluster.running():
        for number in range(5):
            await cluster.put(PODS, f"p{number}", A)
        await cluster.put(PODS, "other", {"app": "b"})
        async with following(cluster, token_file=str(token)) as text:
            await text.know("p0", "p1", "p2", "p3", "p4")
            assert len(cluster.lists) == 3  # two in a page
            assert text.count(Listed) == 1
            await cluster.delete(PODS, "p0")
            await cluster.put(PODS, "p5", A)
            await text.know("p1", "p2", "p3", "p4", "p5")
            assert set(cluster.tokens) == {None}  # there is no TLS to carry one
            assert text.count(Lost) == 0


async def test_a_break_is_gone_on_from_where_bookmarks_say_without_a_new_list() -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(PODS, "p0", A)
        async with following(cluster) as found:
            await found.know("p0")
            await until(lambda: cluster.streams)
            await cluster.bookmark()
            text = str(cluster.version)
            await cluster.put(PODS, "p1", A)
            await found.know("p0", "p1")
            cluster.disconnect()
            await until(lambda: len(cluster.watches) == 2)
            assert int(cluster.watches[1]["resourceVersion"]) == int(text) + 1
            await cluster.put(PODS, "p2", A)
            await found.know("p0", "p1", "p2")
            assert (len(cluster.lists), found.count(Lost)) == (1, 0)


@pytest.mark.parametrize("as_event", [True, False])
async def test_forgotten_revisions_are_listed_again(as_event: bool) -> None:
    cluster = Cluster()
    cluster.gone_as_event = as_event
    async with cluster.running():
        await cluster.put(PODS, "p0", A)
        async with following(cluster) as found:
            await until(lambda: cluster.streams)
            cluster.objects[PODS].clear()  # nothing is notified
            await cluster.put(PODS, "p1", {"app": "b"})
            await cluster.put(PODS, "p2", {"app": "b"})
            await cluster.forget()
            cluster.forgotten += 1
            cluster.version += 1
            await found.know()
            assert found.count(Lost) == 0


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "check token_file"), (403, "grant our service"), (404, "CRD"), (503, "503"), (307, "307")],
)
async def test_a_refusal_is_named_with_the_remedy_and_what_was_known_stands(status: int, says: str) -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(PODS, "p0", A)
        async with following(cluster) as found:
            await until(lambda: cluster.streams)
            cluster.status = status
            cluster.disconnect()
            await until(lambda: found.count(Lost) >= 2)
            lost = next(step for step in found.steps if isinstance(step, Lost))
            assert says in lost.why
            assert found.names() == ["p0"]
            cluster.status = 200
            await until(lambda: found.count(Listed) == 2)


async def test_an_api_that_is_slow_or_away_is_lost_and_asked_again() -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(PODS, "p0", A)
        cluster.slow = asyncio.Event()
        async with following(cluster, Timing(timeout_s=0.05, first_s=0.01, limit_s=0.02)) as found:
            await until(lambda: found.count(Lost))
            cluster.slow.set()
            await found.know("p0")
    async with following(cluster) as found:  # nothing listens there any more
        await until(lambda: found.count(Lost))


async def test_a_watch_that_falls_silent_is_opened_again() -> None:
    cluster = Cluster()
    timing = Timing(watch_s=0.0, margin_s=0.1, first_s=0.01, limit_s=0.02)
    async with cluster.running(), following(cluster, timing) as found:
        await until(lambda: len(cluster.watches) >= 3)  # the fake itself would go on for a second each
        assert (found.count(Listed), found.count(Lost)) == (1, 0)


async def test_the_token_and_the_authority_are_read_again_and_sent_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("api", hosts=("127.0.0.1",))
    context = load(ListenTls(cert_file=pair.cert_file, key_file=pair.key_file).files, wall()).context
    context.set_alpn_protocols(["http/1.1"])
    token = tmp_path / "token"
    token.write_text("first\n")
    cluster = Cluster()
    async with cluster.running(context):
        files = {"token_file": str(token), "ca_file": authority.ca_file}
        async with following(cluster, **files) as found:
            await until(lambda: cluster.streams)
            assert cluster.tokens[0] == "Bearer first"
            token.write_text("second\n")
            cluster.disconnect()
            await until(lambda: cluster.tokens[-1] == "Bearer second")
            assert found.count(Lost) == 0
        (tmp_path / "other").mkdir()
        files["ca_file"] = Authority(tmp_path / "other").ca_file
        asked = len(cluster.tokens)
        async with following(cluster, **files) as found:
            await until(lambda: found.count(Lost))
            assert "certificate is not trusted" in found.steps[0].why  # type: ignore[union-attr]
            assert len(cluster.tokens) == asked  # it never left


async def test_a_list_with_too_many_objects_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "OBJECTS_MAX", 1)
    cluster = Cluster()
    cluster.page = 1
    async with cluster.running():
        for number in range(3):
            await cluster.put(PODS, f"p{number}", A)
        async with following(cluster) as found:
            await until(lambda: found.count(Lost))
            assert "more than 1 objects; narrow the selector" in found.steps[0].why  # type: ignore[union-attr]


def test_error_outside_a_cluster_names_the_setting_to_give(tmp_path: Path) -> None:
    config = KubernetesSource(kind="kubernetes", service="x", namespace_file=str(tmp_path / "namespace"))
    nowhere = Api(config, Random(1), TIMING, {})
    with pytest.raises(KubeError, match="set `namespace`"):
        nowhere.namespace()
    with pytest.raises(KubeError, match="set `api`"):
        nowhere.base_url()
    (tmp_path / "namespace").write_text("gpus\n")
    assert nowhere.namespace() == "gpus"
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert Api(config, Random(1), TIMING, inside).base_url() == "https://[fd00::1]:6443"
