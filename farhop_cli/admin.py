"""Requests to balancers' admin ports. No answer, or a malformed one, is an AdminError, never a crash."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from farhop.service.process import network_error
from farhop_cli.access import NO_ACCESS, Access, AdminError, QuestionError

ANSWER_S = 3.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
ERROR_BYTES_MAX = 4096


class AdminClient:
    """Asks admin ports, with short timeouts, and the credentials that each of them may get."""

    def __init__(self, access: Access = NO_ACCESS) -> None:
        self.access = access
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AdminClient:
        connector = aiohttp.TCPConnector(ssl=self.access.tls) if self.access.tls is not None else None
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S), connector=connector)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._client is not None:
            await self._client.close()

    def request(self, method: str, base: str, path: str, body: bytes | None = None, total_s: float = ANSWER_S) -> Any:
        """A request's context manager. AdminError if it must not be made."""
        assert self._client is not None  # the client was entered
        return self._client.request(
            method,
            base.rstrip("/") + path,
            data=body,
            headers=self.access.headers(base),
            allow_redirects=False,
            server_hostname=self.access.names.get(base) or None,
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=ANSWER_S),
        )


async def get(http: AdminClient, base: str, path: str) -> dict[str, Any] | None:
    """A balancer's answer under a path; None for a 404. Raises AdminError."""
    return await _ask(http, "GET", base, path, None)


async def explain(http: AdminClient, base: str, question: dict[str, Any]) -> dict[str, Any]:
    """Where a balancer would send a request. Raises AdminError."""
    answer = await _ask(http, "POST", base, "/explain", msgspec.json.encode(question))
    if answer is None:
        raise AdminError(f"{base} has no /explain; is it a balancer's admin port?")
    return answer


async def act(http: AdminClient, base: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Have a balancer perform an act. Raises AdminError."""
    answer = await _ask(http, "POST", base, path, msgspec.json.encode(body))
    if answer is None:
        raise AdminError(f"{base} has no {path}; is it an older build?")
    return answer


async def lines(http: AdminClient, base: str, path: str, total_s: float) -> AsyncIterator[bytes]:
    """The lines under a path as they come, for at most this time. Raises AdminError."""
    try:
        async with http.request("GET", base, path, total_s=total_s) as response:
            if response.status != 200:
                body = (await response.content.read(ERROR_BYTES_MAX)).decode(errors="replace")
                raise AdminError(f"{base} answered with status {response.status}: {' '.join(body.split())[:200]}")
            rest = b""
            async for chunk in response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line
                if len(rest) > LINE_BYTES_MAX:
                    raise AdminError(f"{base} sent a line of more than {LINE_BYTES_MAX} bytes")
    except TimeoutError:
        raise AdminError(f"{base} did not end within {total_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise AdminError(f"{base} cannot be reached: {network_error.in_words(error)}") from None


async def page(http: AdminClient, base: str, path: str) -> str:
    """The text under a path. Raises AdminError."""
    status, text = await _fetch(http, "GET", base, path, None)
    if status != 200:
        raise AdminError(f"{base}{path} answered with status {status}")
    return text.decode(errors="replace")


async def _fetch(http: AdminClient, method: str, base: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    try:
        async with http.request(method, base, path, body) as response:
            status, text = response.status, await response.content.read(ANSWER_BYTES_MAX)
            while chunk := await response.content.read(ANSWER_BYTES_MAX):
                text += chunk
                if len(text) > ANSWER_BYTES_MAX:
                    raise AdminError(f"{base} sent more than {ANSWER_BYTES_MAX} bytes")
    except TimeoutError:
        raise AdminError(f"{base} did not answer within {ANSWER_S:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise AdminError(f"{base} is not trusted: {_plain(error.certificate_error)}; see `admin.ca_file`") from None
    except (aiohttp.ClientError, OSError) as error:
        raise AdminError(f"{base} cannot be reached: {network_error.in_words(error)}") from None
    return status, text


async def _ask(http: AdminClient, method: str, base: str, path: str, body: bytes | None) -> dict[str, Any] | None:
    status, text = await _fetch(http, method, base, path, body)
    if status == 404:
        return None
    answer = _decoded(text)
    if status != 200 or answer is None:
        why = answer.get("error") if answer is not None else None
        if status in (401, 403):
            raise AdminError(f"{base} refuses us: {why or f'status {status}'}; see `admin.token` of the context")
        if status == 400 and why:
            raise QuestionError(str(why))
        raise AdminError(f"{base}{path} answered with status {status}: {why or 'no JSON object'}")
    return answer


def _plain(error: Exception) -> str:
    return getattr(error, "verify_message", "") or str(error)


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
