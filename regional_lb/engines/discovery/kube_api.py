"""The part of the Kubernetes API that a watcher needs: one object, or a list and every change after it.

Invariants: the token is read again for every request and sent only over TLS; redirects are not followed; after a gap
(410 Gone, or an outage) all objects are listed again, and nothing is guessed; a watch that falls silent is abandoned.
Never writes, and never interprets an object.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp
import msgspec

from farhop.balance.backoff import Backoff
from farhop.service.process import network_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from random import Random

    from regional_lb.engines.config import KubernetesSource

OBJECTS_MAX = 20_000  # in one list
PAGE = 500  # objects in one answer
ANSWER_BYTES_MAX = 64 * 1024 * 1024
EVENT_BYTES_MAX = 4 * 1024 * 1024  # etcd, below that API, holds no object larger than 1.5 MiB
SECRET_BYTES_MAX = 64 * 1024
_GOOD_S = 1.0  # a watch that lasted this long needs no pause before the next
_DETAILS = {
    401: "the API server does not know our token; check token_file",
    403: "we may not read it; grant our service account get, list and watch",
    404: "there is no such thing; check the name and the namespace, and that the resource's CRD is installed",
}


class KubeError(Exception):
    """The API server cannot be asked, or refused. The message says where and the remedy."""


class _GoneError(Exception):
    """The API server no longer keeps the changes since this version."""


class Timing(msgspec.Struct, frozen=True):
    """`timeout_s`: for an answer; `watch_s`: after which a watch is renewed; `margin_s`: after which, in addition, a
    silent watch counts as lost.
    """

    timeout_s: float = 10.0
    watch_s: float = 60.0
    margin_s: float = 10.0
    first_s: float = 0.2
    limit_s: float = 10.0


class Listed(msgspec.Struct, frozen=True):
    """All existing objects; forget all others."""

    objects: list[dict[str, Any]]


class Changed(msgspec.Struct, frozen=True):
    """One object was added, changed or deleted."""

    object: dict[str, Any]
    gone: bool


class Lost(msgspec.Struct, frozen=True):
    """The API server cannot be asked; a Listed follows when it can."""

    why: str


Step: TypeAlias = Listed | Changed | Lost


class _Event(msgspec.Struct):
    type: str
    object: dict[str, Any]


_event = msgspec.json.Decoder(_Event)
_object = msgspec.json.Decoder(dict[str, Any])


class Api:
    """One API server. `environ`: the process's environment, which describes the pod's cluster."""

    def __init__(
        self,
        config: KubernetesSource,
        rng: Random,
        timing: Timing | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._config, self._rng, self._timing, self._environ = config, rng, timing or Timing(), environ
        self._session: aiohttp.ClientSession | None = None
        self._trusted: tuple[int, ssl.SSLContext] | None = None

    async def open(self) -> None:
        """Prepare for requests; nothing is sent yet."""
        self._session = aiohttp.ClientSession(read_bufsize=EVENT_BYTES_MAX, trust_env=False)

    async def close(self) -> None:
        """Cancel all requests."""
        if self._session is not None:
            await self._session.close()

    def namespace(self) -> str:
        """The one configured, else that of our pod. Raises KubeError."""
        if self._config.namespace is not None:
            return self._config.namespace
        namespace = _read(self._config.namespace_file)
        if not namespace:
            raise KubeError("not running in a pod that has a namespace; set `namespace`")
        return namespace

    async def follow(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[Step, None]:
        """A list and what follows it, without end. `aclose()` it when done."""
        backoff = Backoff(self._rng, self._timing.first_s, self._timing.limit_s)
        version = ""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                if not version:
                    objects, version = await self._list(path, params)
                    yield Listed(objects)
                async with contextlib.aclosing(self._watch(path, params, version)) as events:
                    async for event in events:
                        version = _version(event.object) or version
                        if event.type != "BOOKMARK":
                            yield Changed(event.object, gone=event.type == "DELETED")
            except _GoneError:
                version = ""
            except KubeError as error:
                version = ""
                yield Lost(str(error))
            if loop.time() - began_s >= _GOOD_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _list(self, path: str, params: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
        """All objects, page by page, and their resource version. Raises KubeError, _GoneError."""
        objects: list[dict[str, Any]] = []
        more = ""
        while True:
            page = await self._answer(path, {**params, "limit": str(PAGE), **({"continue": more} if more else {})})
            items, meta = page.get("items") or [], page.get("metadata")
            if not isinstance(items, list) or not isinstance(meta, dict):
                raise KubeError(f"{path}: the answer is no list; is this a Kubernetes API?")
            objects += [item for item in items if isinstance(item, dict)]
            more = str(meta.get("continue") or "")
            if not more:
                return objects, _version(page) or "0"
            if len(objects) > OBJECTS_MAX:
                raise KubeError(f"{path}: more than {OBJECTS_MAX} objects; narrow the selector")

    async def _answer(self, path: str, params: Mapping[str, str]) -> dict[str, Any]:
        """The JSON answer to a GET. Raises KubeError, _GoneError."""
        timeout = aiohttp.ClientTimeout(total=self._timing.timeout_s)
        try:
            async with self._get(path, params, timeout) as response:
                _check(path, response.status)
                body = await response.content.read(ANSWER_BYTES_MAX + 1)
                while not response.content.at_eof() and len(body) <= ANSWER_BYTES_MAX:
                    body += await response.content.read(ANSWER_BYTES_MAX + 1 - len(body))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(f"{self.base_url()}{path}: {network_error.in_words(error)}") from None
        if len(body) > ANSWER_BYTES_MAX:
            raise KubeError(f"{path}: an answer of more than {ANSWER_BYTES_MAX} bytes")
        try:
            return _object.decode(body)
        except (ValueError, RecursionError):
            raise KubeError(f"{path}: the answer is no JSON object; is this a Kubernetes API?") from None

    async def _watch(self, path: str, params: Mapping[str, str], version: str) -> AsyncGenerator[_Event, None]:
        """Events until the stream ends or breaks off: both are gone on from. Raises KubeError, _GoneError."""
        timing = self._timing
        query = {
            **params, "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(timing.watch_s))),
        }  # fmt: skip
        silent_s = timing.watch_s + timing.margin_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timing.timeout_s, sock_read=silent_s)
        try:
            response = await self._get(path, query, timeout)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise KubeError(f"{self.base_url()}{path}: {network_error.in_words(error)}") from None
        async with response:
            _check(path, response.status)
            while True:
                try:
                    line = await response.content.readline()
                except ValueError:
                    raise KubeError(f"{path}: an event of more than {EVENT_BYTES_MAX} bytes") from None
                except (aiohttp.ClientError, OSError, TimeoutError):
                    return
                if not line.endswith(b"\n"):
                    return  # the end, or a part of an event, which will be sent again
                if line.strip():
                    yield _read_event(path, line)

    def _get(self, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout) -> Any:
        assert self._session is not None
        base = self.base_url()
        headers = {"accept": "application/json", "user-agent": "farhop"}
        context: ssl.SSLContext | bool = True
        if base.startswith("https://"):
            context = self._context()
            token = _read(self._config.token_file)
            if token:
                headers["authorization"] = f"Bearer {token}"
        return self._session.get(
            base + path, params=params, headers=headers, timeout=timeout, ssl=context, allow_redirects=False
        )

    def base_url(self) -> str:
        if self._config.api is not None:
            return self._config.api
        host, port = (self._environ.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
        if not host:
            raise KubeError("not running in a cluster (KUBERNETES_SERVICE_HOST is not set); set `api`")
        return f"https://[{host}]:{port or 443}" if ":" in host else f"https://{host}:{port or 443}"

    def _context(self) -> ssl.SSLContext:
        """The TLS context: the cluster's authority, read again when its file changes; without one, the system's
        authorities.
        """
        path = Path(self._config.ca_file)
        try:
            changed = path.stat().st_mtime_ns if path.exists() else 0
            if self._trusted is None or self._trusted[0] != changed:
                self._trusted = changed, ssl.create_default_context(cafile=str(path) if changed else None)
        except (ssl.SSLError, OSError) as error:
            raise KubeError(f"ca_file: {path}: {error.strerror or error}; give a PEM file") from None
        return self._trusted[1]


def _check(path: str, status: int) -> None:
    if status == 410:
        raise _GoneError
    if status != 200:
        raise KubeError(f"{path}: status {status}: {_DETAILS.get(status, 'the API server cannot answer now')}")


def _read_event(path: str, line: bytes) -> _Event:
    """The event in a line of a watch. Raises KubeError, _GoneError."""
    try:
        event = _event.decode(line)
    except (ValueError, RecursionError):
        raise KubeError(f"{path}: a line of the watch is no event; is this a Kubernetes API?") from None
    if event.type == "ERROR":
        if event.object.get("code") == 410:
            raise _GoneError
        raise KubeError(f"{path}: the watch failed: {str(event.object.get('message'))[:200]}")
    return event


def _version(thing: dict[str, Any]) -> str:
    meta = thing.get("metadata")
    return str(meta.get("resourceVersion") or "") if isinstance(meta, dict) else ""


def _read(path: str) -> str:
    """A small file's text, "" if there is none."""
    try:
        with Path(path).open("rb") as file:
            return file.read(SECRET_BYTES_MAX).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
