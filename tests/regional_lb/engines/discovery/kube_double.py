"""A small double of the Kubernetes API on a real socket: lists in pages, watches with bookmarks, 410, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

SLICES = "/apis/discovery.k8s.io/v1/namespaces/gpus/endpointslices"
PODS = "/api/v1/namespaces/gpus/pods"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/gpus/inferenceobjectives"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/gpus/inferencepools"


def matches(labels: dict[str, str], selector: str) -> bool:
    """Only `k=v,k2=v2`."""
    return all(labels.get(part.split("=")[0]) == part.split("=")[1] for part in selector.split(",") if part)


class Cluster:
    """Objects by path and name. `status`: what every request is answered; `page`: objects in one answer.

    `forgotten`: watches from before this version get 410; `slow`: lists wait for it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, dict[str, Any]]] = {SLICES: {}, PODS: {}, POOLS: {}, OBJECTIVES: {}}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        self.version = 1000
        self.forgotten = 0
        self.status = 200
        self.page = 2
        self.gone_as_event = False
        self.slow: asyncio.Event | None = None
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.tokens: list[str | None] = []
        self.streams: set[web.StreamResponse] = set()
        self.url = ""
        self._moved = asyncio.Condition()

    async def put(self, path: str, name: str, labels: dict[str, str], **more: Any) -> None:
        """An object is new or another."""
        self.version += 1
        meta = more.pop("metadata", {})
        meta = {"name": name, "namespace": "gpus", "labels": labels, "resourceVersion": str(self.version), **meta}
        thing = {"metadata": meta, **more}
        kind = "MODIFIED" if name in self.objects[path] else "ADDED"
        self.objects[path][name] = thing
        await self._tell(kind, path, thing)

    async def delete(self, path: str, name: str) -> None:
        """An object is gone."""
        self.version += 1
        thing = self.objects[path].pop(name)
        thing["metadata"]["resourceVersion"] = str(self.version)
        await self._tell("DELETED", path, thing)

    async def _tell(self, kind: str, path: str, thing: dict[str, Any]) -> None:
        self.history.append((self.version, kind, path, msgspec.json.decode(msgspec.json.encode(thing))))
        async with self._moved:
            self._moved.notify_all()

    async def bookmark(self) -> None:
        """Time passed elsewhere: every watch is told how far it is."""
        self.version += 1
        await self._tell("BOOKMARK", "", {"metadata": {"resourceVersion": str(self.version)}})

    async def forget(self) -> None:
        """etcd below was compacted, and all watches break off."""
        self.forgotten = self.version
        self.history.clear()
        self.disconnect()

    def disconnect(self) -> None:
        """Every stream breaks in the midst of a line."""
        for stream in list(self.streams):
            transport = stream._req.transport
            transport.write(b'10\r\n{"type":"ADDED",')
            transport.abort()

    @contextlib.asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Cluster]:
        """Listen on a free port."""
        app = web.Application()
        for path in self.objects:
            app.router.add_get(path, self._get)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("authorization"))
        query = dict(request.query)
        (self.watches if "watch" in query else self.lists).append(query)
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if "watch" in query:
            return await self._watch(request, query)
        if self.slow is not None:
            await self.slow.wait()
        things = [thing for thing in self.objects[request.path].values() if self._chosen(thing, query)]
        start = int(query.get("continue", "0"))
        there = min(self.page, int(query["limit"]))
        meta = {"resourceVersion": str(self.version)}
        if start + there < len(things):
            meta["continue"] = str(start + there)
        return web.json_response({"kind": "List", "metadata": meta, "items": things[start : start + there]})

    def _chosen(self, thing: dict[str, Any], query: dict[str, str]) -> bool:
        field = query.get("fieldSelector", "")
        if field and field != f"metadata.name={thing['metadata']['name']}":
            return False
        return matches(thing["metadata"].get("labels", {}), query.get("labelSelector", ""))

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        seen = int(query["resourceVersion"])
        if seen < self.forgotten and not self.gone_as_event:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        stream = web.StreamResponse()
        await stream.prepare(request)
        if seen < self.forgotten:
            await stream.write(
                msgspec.json.encode({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}) + b"\n"
            )
            return stream
        self.streams.add(stream)
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while True:
                    for version, kind, path, thing in list(self.history):
                        if version > seen:
                            seen = version
                            if kind == "BOOKMARK" or (path == request.path and self._chosen(thing, query)):
                                await stream.write(msgspec.json.encode({"type": kind, "object": thing}) + b"\n")
                    async with self._moved:
                        await self._moved.wait_for(lambda seen=seen: bool(self.history) and self.history[-1][0] > seen)
        except (TimeoutError, ConnectionError):
            return stream
        finally:
            self.streams.discard(stream)
