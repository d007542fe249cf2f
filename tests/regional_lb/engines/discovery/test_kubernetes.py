"""What EndpointSlices, pods and an InferencePool say, over a real HTTP double of the API server."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
from inprocess import until
from kube_double import OBJECTIVES, PODS, POOLS, SLICES, Cluster
from sources import following

from regional_lb.engines.config import KubernetesSource, Template
from regional_lb.engines.discovery.kube_api import Api, Listed, Timing
from regional_lb.engines.discovery.kubernetes import EndpointSlices, Kubernetes, Pods, _ReplicaCache

PACE = Timing(timeout_s=30.0, watch_s=30.0, margin_s=0.2, first_s=0.01, limit_s=0.05)
SERVICE = {"kubernetes.io/service-name": "vllm"}


def source(cluster: Cluster, **more: Any) -> Kubernetes:
    fields = {"kind": "kubernetes", "api": cluster.url, "namespace": "gpus", "replica": {"models": ["m"]}, **more}
    config = KubernetesSource.model_validate(fields)
    return Kubernetes(config, Random(1), Api(config, Random(2), PACE, os.environ))


def endpoint(name: str, host: str, **conditions: bool | None) -> dict[str, Any]:
    return {
        "addresses": [host],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": name, "namespace": "gpus"},
    }


def ports(*there: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "port": port, "protocol": "TCP"} for name, port in there]


HTTP = ports(("http", 8000))


async def test_endpoints_of_a_service_come_drain_and_go() -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(SLICES, "s1", SERVICE, endpoints=[endpoint("a", "10.0.0.1", ready=True)], ports=HTTP)
        await cluster.put(SLICES, "x", {"kubernetes.io/service-name": "x"}, endpoints=[endpoint("x", "9.9.9.9")])
        async with following(source(cluster, service="vllm")) as result:
            await result.come("gpus/a")
            assert result.found is not None
            assert str(result.found.replicas[0].address) == "10.0.0.1:8000"
            both = [endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=False)]
            await cluster.put(SLICES, "s2", SERVICE, endpoints=[endpoint("c", "10.0.0.3")], ports=HTTP)
            await cluster.put(SLICES, "s1", SERVICE, endpoints=both, ports=HTTP)
            await result.come("gpus/a", "gpus/c")  # readiness is not given: ready
            both = [endpoint("a", "10.0.0.1", ready=False, serving=True, terminating=True), endpoint("b", "10.0.0.2")]
            await cluster.put(SLICES, "s1", SERVICE, endpoints=both, ports=HTTP)
            await result.come("gpus/a", "gpus/b", "gpus/c")
            assert result.draining() == ["gpus/a"]
            both[0]["conditions"]["serving"] = False
            await cluster.put(SLICES, "s1", SERVICE, endpoints=both, ports=HTTP)
            await result.come("gpus/b", "gpus/c")
            await cluster.delete(SLICES, "s2")
            await result.come("gpus/b")
            await cluster.delete(SLICES, "s1")
            await result.come()
            assert result.failures == []


async def test_an_api_that_refuses_leaves_the_replicas_unchanged() -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(SLICES, "s1", SERVICE, endpoints=[endpoint("a", "10.0.0.1")], ports=HTTP)
        async with following(source(cluster, service="vllm")) as result:
            await result.come("gpus/a")
            await until(lambda: cluster.streams)
            cluster.status = 403
            cluster.disconnect()
            await until(lambda: result.failures)
            assert "grant our service account get, list and watch" in result.failures[0]
            assert result.labels == ["gpus/a"]


def pod(name: str, host: str, ready: bool = True, leaving: bool = False, **text: str) -> dict[str, Any]:
    meta: dict[str, Any] = {"annotations": {f"farhop.dev/{field}": value for field, value in text.items()}}
    if leaving:
        meta["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    status = {"podIP": host, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}
    return {"metadata": meta, "status": status}


def pool(app: str, *numbers: int) -> dict[str, Any]:
    selector = {"matchLabels": {"app": app, "tier": "gpu"}}
    return {"spec": {"selector": selector, "targetPorts": [{"number": number} for number in numbers]}}


async def test_an_inference_pool_selects_pods_and_may_change_its_mind() -> None:
    cluster = Cluster()
    async with cluster.running():
        for name, app, host in (("a", "one", "10.0.0.1"), ("b", "one", "10.0.0.2"), ("c", "two", "10.0.0.3")):
            await cluster.put(PODS, name, {"app": app, "tier": "gpu"}, **pod(name, host))
        await cluster.put(POOLS, "other", {}, **pool("two", 1))
        async with following(source(cluster, pool="llama")) as result:
            await result.come()
            assert result.found is not None
            assert result.found.problems == ("there is no InferencePool llama in gpus; create it",)
            await cluster.put(POOLS, "llama", {}, **pool("one", 8000))
            await result.come("gpus/a", "gpus/b")
            labels = {"app": "one", "tier": "gpu"}
            await cluster.put(PODS, "a", labels, **pod("a", "10.0.0.1", leaving=True))
            await until(lambda: result.draining() == ["gpus/a"])
            await cluster.put(PODS, "b", labels, **pod("b", "10.0.0.2", ready=False))
            await cluster.put(
                PODS, "d", labels, **pod("d", "10.0.0.4", models="base, lora", engine="sglang", gpu="H100")
            )
            await result.come("gpus/a", "gpus/d")
            assert result.found is not None
            own = result.found.replicas[1]
            assert (own.models, own.engine, own.gpu) == (["base", "lora"], "sglang", "H100")
            await cluster.put(POOLS, "llama", {}, **pool("two", 8000, 8001))
            await result.come("gpus/c:8000", "gpus/c:8001")  # each port is an engine of its own
            await cluster.put(POOLS, "llama", {}, spec={"selector": 7})
            await until(lambda: result.failures)
            assert "makes no sense" in result.failures[0]
            assert result.labels == ["gpus/c:8000", "gpus/c:8001"]
            count = len(result.steps)
            await cluster.put(POOLS, "llama", {}, **pool("two", 8000, 8001))
            await until(lambda: len(result.steps) > count)  # reported again: the problem had ended
            assert result.steps[-1] == result.found
            await cluster.delete(POOLS, "llama")
            await result.come()


async def test_pool_gives_failure_mode_and_objectives_give_priority() -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(POOLS, "llama", {}, **pool("one", 8000))
        for name, of, priority in (("chat", "llama", 7), ("batch", "llama", -2), ("other", "qwen", 9)):
            await cluster.put(OBJECTIVES, name, {}, spec={"priority": priority, "poolRef": {"name": of}})
        asked = source(cluster, pool="llama", objectives="llm-d.ai/v1alpha2")
        async with following(asked):
            await until(lambda: asked.objectives == {"chat": 7, "batch": -2})
            assert asked.failure_mode == "FailClose"  # values that the API reads as true
            spec = pool("one", 8000)["spec"] | {"endpointPickerRef": {"name": "epp", "failureMode": "FailOpen"}}
            await cluster.put(POOLS, "llama", {}, spec=spec)
            await until(lambda: asked.failure_mode == "FailOpen")
            await cluster.put(OBJECTIVES, "batch", {}, spec={"priority": 1, "poolRef": {"name": "llama"}})
            await cluster.delete(OBJECTIVES, "chat")
            await until(lambda: asked.objectives == {"batch": 1})
            await cluster.put(OBJECTIVES, "batch", {}, spec={"priority": "high"})
            await until(lambda: asked.objectives_trouble != "")
            assert "the InferenceObjective batch makes no sense" in asked.objectives_trouble
            await cluster.delete(POOLS, "llama")
            await until(lambda: asked.failure_mode == "")


async def test_an_unknown_engine_is_named_and_the_rest_goes_on() -> None:
    cluster = Cluster()
    async with cluster.running():
        await cluster.put(POOLS, "llama", {}, **pool("one", 8000))
        labels = {"app": "one", "tier": "gpu"}
        await cluster.put(PODS, "a", labels, **pod("a", "10.0.0.1", engine="tensorrt"))
        await cluster.put(PODS, "b", labels, **pod("b", "10.0.0.2"))
        await cluster.put(PODS, "c", labels, status={"podIP": 7})
        async with following(source(cluster, pool="llama")) as result:
            await result.come("gpus/b")
            assert result.found is not None
            engine, nonsense = result.found.problems
            assert engine.startswith("a:8000.engine: is unknown; there is vllm")
            assert nonsense.startswith("c: Expected `str`")


def found(kind: EndpointSlices | Pods, *things: dict[str, Any]) -> tuple[dict[str, int], tuple[str, ...]]:
    step = _ReplicaCache("k", kind, Template(models=["m"])).take(Listed(list(things)))
    assert not hasattr(step, "why")
    return {replica.label: replica.address.port for replica in step.replicas}, step.problems  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("port", "there", "number"),
    [
        (None, HTTP, 8000), ("metrics", ports(("http", 1), ("metrics", 2)), 2), (7, HTTP, 7), (7, None, 7),
        (None, ports(("http", 1), ("metrics", 2)), None), ("grpc", HTTP, None), (None, None, None),
    ],
)  # fmt: skip
def test_a_port_is_given_by_name_or_number(port: str | int | None, there: Any, number: int | None) -> None:
    thing = {"metadata": {"name": "s", "namespace": "gpus"}, "endpoints": [endpoint("a", "10.0.0.1")], "ports": there}
    replicas, problems = found(EndpointSlices(port), thing)
    assert replicas == ({} if number is None else {"gpus/a": number})
    assert all("choose one by `port`" in problem for problem in problems)
    assert bool(problems) == (number is None)


@pytest.mark.parametrize(
    ("expected", "draining"),
    [
        ({}, False), ({"ready": True}, False), ({"ready": False}, None), ({"ready": False, "serving": True}, None),
        ({"terminating": True}, True), ({"terminating": True, "ready": False}, None),
        ({"terminating": True, "ready": False, "serving": True}, True), ({"terminating": True, "serving": False}, None),
        ({"terminating": False, "ready": None, "serving": None}, False),
    ],
)  # fmt: skip
def test_missing_conditions_have_the_apis_default(expected: dict[str, Any], draining: bool | None) -> None:
    thing = {
        "metadata": {"name": "s"},
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": expected}],
        "ports": HTTP,
    }
    step = _ReplicaCache("k", EndpointSlices(None), Template(models=["m"])).take(Listed([thing]))
    assert [one.draining for one in step.replicas] == ([] if draining is None else [draining])  # type: ignore[union-attr]


def test_an_endpoint_in_two_slices_stands_once_and_rather_as_one_that_works() -> None:
    leaving = endpoint("a", "10.0.0.1", ready=False, serving=True, terminating=True)
    slices = [
        {"metadata": {"name": name, "namespace": "gpus"}, "endpoints": [one], "ports": HTTP}
        for name, one in (("s1", leaving), ("s2", endpoint("a", "10.0.0.1", ready=True)), ("s3", leaving))
    ]
    step = _ReplicaCache("k", EndpointSlices(None), Template(models=["m"])).take(Listed(slices))
    assert [replica.draining for replica in step.replicas] == [False]  # type: ignore[union-attr]


def test_names_stay_within_their_length_and_apart() -> None:
    ends = [endpoint("p" * 200 + end, f"10.0.0.{end}") for end in "12"]
    replicas, _ = found(EndpointSlices(1), {"metadata": {"name": "s", "namespace": "gpus"}, "endpoints": ends})
    assert {len(name) for name in replicas} == {128}
    assert len(replicas) == 2
    bare = {"addresses": ["10.0.0.3"]}
    replicas, _ = found(EndpointSlices(1), {"metadata": {"name": "s"}, "endpoints": [bare]})
    assert replicas == {"10.0.0.3:1": 1}
