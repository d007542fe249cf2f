"""Discovers replicas in Kubernetes: the endpoints of EndpointSlices, or the pods that an InferencePool selects.

Invariants: ready endpoints are taken; endpoints that are terminating and still serve get no new work; all others are
ignored; an invalid object is named and left out, and the others stay; objects that Kubernetes deletes are removed,
objects that cannot be asked about stay. Never writes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from farhop.service.process.tasks import Tasks
from regional_lb.engines.discovery import kube_api
from regional_lb.engines.discovery.kube_api import KubeError
from regional_lb.engines.discovery.source import EndpointError, Failed, Found, at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from regional_lb.engines.config import KubernetesSource, ReplicaConfig, Template
    from regional_lb.engines.discovery.source import OnUpdate

NAME_CHARS_MAX = 128
OBJECTIVES_MAX = 1024  # of a pool
_OWN = "farhop.dev/"  # annotations and labels that say it better than the template
_AGAIN_S = 10.0


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None

    def described(self) -> dict[str, Any]:
        """The settings of its replicas in its own annotations and labels."""
        labels = {**(self.labels or {}), **(self.annotations or {})}
        fields: dict[str, Any] = {
            field: labels[_OWN + field] for field in ("models", "engine", "gpu") if _OWN + field in labels
        }
        if "models" in fields:
            fields["models"] = [model for part in fields["models"].split(",") if (model := part.strip())]
        return fields


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: str = ""
    namespace: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions | None = None
    target_ref: _Target | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class _Slice(msgspec.Struct):
    metadata: _Meta
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _PodCondition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct, rename={"pod_ip": "podIP"}):
    pod_ip: str = ""
    conditions: list[_PodCondition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Meta
    status: _PodStatus | None = None


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _TargetPort(msgspec.Struct):
    number: int


class _PickerRef(msgspec.Struct, rename="camel"):
    failure_mode: str = "FailClose"  # the API's default


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: list[_TargetPort]
    endpoint_picker_ref: _PickerRef | None = None


class _Pool(msgspec.Struct):
    spec: _PoolSpec


class _PoolRef(msgspec.Struct):
    name: str = ""


class _ObjectiveSpec(msgspec.Struct, rename="camel"):
    priority: int = 0
    pool_ref: _PoolRef | None = None


class _Objective(msgspec.Struct):
    metadata: _Meta
    spec: _ObjectiveSpec


class _Kind(Protocol):
    """A watched kind of object, and how one becomes replicas."""

    def path(self, namespace: str) -> str: ...

    def replicas(self, thing: dict[str, Any], template: Template) -> Iterator[ReplicaConfig]:
        """Raises EndpointError, msgspec.ValidationError."""
        ...


class EndpointSlices:
    """`port` is a port's name or number; None where a slice has only one."""

    def __init__(self, port: str | int | None) -> None:
        self._port = port

    def path(self, namespace: str) -> str:
        """The API path of the list in this namespace."""
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def replicas(self, thing: dict[str, Any], template: Template) -> Iterator[ReplicaConfig]:
        """See _Kind."""
        slice_ = msgspec.convert(thing, _Slice)
        described = slice_.metadata.described()
        for endpoint in slice_.endpoints or ():
            draining = _draining(endpoint.conditions or _Conditions())
            if draining is None or not endpoint.addresses:
                continue
            # Of several addresses the first: the API says that they are interchangeable.
            host, target, port = endpoint.addresses[0], endpoint.target_ref, self._number(slice_)
            name = _named(target.namespace or slice_.metadata.namespace, target.name) if target is not None else ""
            yield at(template, host, port, name, f"{slice_.metadata.name} {host}", draining=draining, **described)

    def _number(self, slice_: _Slice) -> int:
        if isinstance(self._port, int):
            return self._port
        there = [port for port in slice_.ports or () if port.protocol in (None, "TCP") and port.port is not None]
        fitting = [port for port in there if self._port is None or port.name == self._port]
        if len(fitting) == 1 and fitting[0].port is not None:
            return fitting[0].port
        known = ", ".join(f"{port.name or '-'} ({port.port})" for port in there[:8]) or "none"
        raise EndpointError(f"{slice_.metadata.name}: has the ports {known}; choose one by `port`")


class Pods:
    """The pods of an InferencePool; each port of a pod is an endpoint."""

    def __init__(self, ports: tuple[int, ...]) -> None:
        self._ports = ports

    def path(self, namespace: str) -> str:
        """The API path of the list in this namespace."""
        return f"/api/v1/namespaces/{namespace}/pods"

    def replicas(self, thing: dict[str, Any], template: Template) -> Iterator[ReplicaConfig]:
        """See _Kind."""
        pod = msgspec.convert(thing, _Pod)
        status, meta = pod.status, pod.metadata
        if status is None or not status.pod_ip:
            return
        if not any(one.type == "Ready" and one.status == "True" for one in status.conditions or ()):
            return
        name = _named(meta.namespace, meta.name)
        for port in self._ports:
            own = name if len(self._ports) == 1 else f"{name}:{port}"[-NAME_CHARS_MAX:]
            leaving = meta.deletion_timestamp is not None
            yield at(template, status.pod_ip, port, own, f"{meta.name}:{port}", draining=leaving, **meta.described())


def _draining(conditions: _Conditions) -> bool | None:
    """False: takes work. True: finishes its work, takes no new. None: it does not count."""
    ready = conditions.ready is not False  # a missing condition is true, and `serving` is then like `ready`
    if conditions.terminating:
        return True if (ready if conditions.serving is None else conditions.serving) else None
    return False if ready else None


def _named(namespace: str, name: str) -> str:
    """Two namespaces may have a `vllm-0` each. Of a long one the end: there it differs from its siblings."""
    return f"{namespace}/{name}"[-NAME_CHARS_MAX:] if name else ""


class _ReplicaCache:
    """The replicas of the objects of one kind, kept by object."""

    def __init__(self, label: str, kind: _Kind, template: Template) -> None:
        self._label, self._kind, self._template = label, kind, template
        self._replicas: dict[str, tuple[ReplicaConfig, ...]] = {}
        self._problems: dict[str, str] = {}

    def take(self, step: kube_api.Step) -> Found | Failed:
        if isinstance(step, kube_api.Lost):
            return Failed(self._label, step.why)
        if isinstance(step, kube_api.Listed):
            self._replicas, self._problems = {}, {}
            for thing in step.objects:
                self._put(thing)
        elif step.gone:
            self._replicas.pop(_key(step.object), None)
            self._problems.pop(_key(step.object), None)
        else:
            self._put(step.object)
        return self._found()

    def _put(self, thing: dict[str, Any]) -> None:
        key = _key(thing)
        try:
            self._replicas[key] = tuple(self._kind.replicas(thing, self._template))
            self._problems.pop(key, None)
        except (EndpointError, msgspec.ValidationError) as error:
            self._replicas.pop(key, None)
            self._problems[key] = str(error) if isinstance(error, EndpointError) else f"{key}: {error}"

    def _found(self) -> Found:
        """While slices are rewritten an endpoint may be in two of them: an entry that takes work has precedence."""
        by_place: dict[tuple[str, int], ReplicaConfig] = {}
        for key in sorted(self._replicas):
            for replica in self._replicas[key]:
                place = (replica.address.host, replica.address.port)
                if place not in by_place or by_place[place].draining:
                    by_place[place] = replica
        replicas = sorted(by_place.values(), key=lambda replica: replica.label)
        return Found(self._label, tuple(replicas), tuple(self._problems.values()))


def _key(thing: dict[str, Any]) -> str:
    meta = thing.get("metadata")
    return str(meta.get("name")) if isinstance(meta, dict) else ""


class Kubernetes:
    """See the module's docstring."""

    def __init__(self, config: KubernetesSource, rng: Random, api: kube_api.Api | None = None) -> None:
        self._config, self.label = config, config.label
        self._api = api or kube_api.Api(config, rng)
        self._pods, self._asked = Tasks(), Tasks()
        self.failure_mode = ""  # of the pool's gateway, as it says; "" where there is no pool
        self.objectives: dict[str, int] = {}  # priorities by the names of the pool's InferenceObjectives
        self.objectives_trouble = ""

    async def follow(self, on_update: OnUpdate) -> None:
        """See Source."""
        await self._api.open()
        try:
            namespace = await self._namespace(on_update)
            if self._config.pool is not None:
                await self._follow_pool(namespace, self._config.pool, on_update)
            else:
                selector = self._config.selector or f"kubernetes.io/service-name={self._config.service}"
                await self._follow(namespace, EndpointSlices(self._config.port), selector, on_update)
        finally:
            await self._asked.close()
            await self._pods.close()
            await self._api.close()

    async def _namespace(self, on_update: OnUpdate) -> str:
        while True:
            try:
                return self._api.namespace()
            except KubeError as error:
                on_update(Failed(self.label, str(error)))
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self, namespace: str, kind: _Kind, selector: str, on_update: OnUpdate) -> None:
        cache = _ReplicaCache(self.label, kind, self._config.replica)
        async with contextlib.aclosing(self._api.follow(kind.path(namespace), {"labelSelector": selector})) as steps:
            async for step in steps:
                on_update(cache.take(step))

    async def _follow_pool(self, namespace: str, name: str, on_update: OnUpdate) -> None:
        """Follow the pods by the pool's selector, and by another when it changes; no pods when the pool is gone."""
        if self._config.objectives is not None:
            self._asked.start(
                self._follow_objectives(namespace, self._config.objectives, name), f"objectives of {name}"
            )
        path = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"
        spec: _PoolSpec | None = None  # also None after a failure: then the pods are listed again, and it is over
        async with contextlib.aclosing(self._api.follow(path, {"fieldSelector": f"metadata.name={name}"})) as steps:
            async for step in steps:
                if isinstance(step, kube_api.Lost):
                    on_update(Failed(self.label, step.why))
                    spec = None
                    continue
                try:
                    now = _pool(step, name)
                except msgspec.ValidationError as error:
                    on_update(Failed(self.label, f"the InferencePool {name} makes no sense: {error}"))
                    spec = None
                    continue
                self.failure_mode = _failure_mode(now)
                if now is None:
                    await self._pods.close()
                    on_update(Found(self.label, (), (f"there is no InferencePool {name} in {namespace}; create it",)))
                elif now != spec:
                    await self._pods.close()
                    pods = Pods(tuple(port.number for port in now.target_ports))
                    selector = ",".join(f"{key}={value}" for key, value in sorted(now.selector.match_labels.items()))
                    self._pods.start(self._follow(namespace, pods, selector, on_update), f"pods of {name}")
                spec = now

    async def _follow_objectives(self, namespace: str, api: str, pool: str) -> None:
        """Follow the pool's InferenceObjectives. The last known ones stay while they cannot be read."""
        path = f"/apis/{api}/namespaces/{namespace}/inferenceobjectives"
        async with contextlib.aclosing(self._api.follow(path, {})) as steps:
            async for step in steps:
                if isinstance(step, kube_api.Lost):
                    self.objectives_trouble = step.why
                    continue
                self.objectives_trouble = ""
                things = step.objects if isinstance(step, kube_api.Listed) else [step.object]
                if isinstance(step, kube_api.Listed):
                    self.objectives = {}
                for thing in things:
                    self.objectives.pop(_key(thing), None)
                    if isinstance(step, kube_api.Changed) and step.gone:
                        continue
                    try:
                        one = msgspec.convert(thing, _Objective)
                    except msgspec.ValidationError as error:
                        self.objectives_trouble = f"the InferenceObjective {_key(thing)} makes no sense: {error}"
                        continue
                    ref = one.spec.pool_ref
                    if ref is not None and ref.name == pool and len(self.objectives) < OBJECTIVES_MAX:
                        self.objectives[one.metadata.name] = one.spec.priority


def _failure_mode(pool: _PoolSpec | None) -> str:
    if pool is None:
        return ""
    return "FailClose" if pool.endpoint_picker_ref is None else pool.endpoint_picker_ref.failure_mode


def _pool(step: kube_api.Listed | kube_api.Changed, name: str) -> _PoolSpec | None:
    """The pool's present state, None if there is no pool. Raises msgspec.ValidationError."""
    things = step.objects if isinstance(step, kube_api.Listed) else [] if step.gone else [step.object]
    for thing in things:
        if _key(thing) == name:
            return msgspec.convert(thing, _Pool).spec
    return None
