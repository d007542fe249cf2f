"""Asking balancers' admin ports. What does not answer, or answers nonsense, is an AdminError, never a crash."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from farhop_lab.world.client import trouble

ANSWER_S = 3.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024


class AdminError(Exception):
    """A balancer that could not be asked, or refused to say; the text says why."""


class QuestionError(AdminError):
    """The question itself is at fault: another balancer would say the same."""


def session() -> aiohttp.ClientSession:
    """A session for admin ports: short of patience."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))


async def get(http: aiohttp.ClientSession, base: str, path: str) -> dict[str, Any] | None:
    """What a balancer says under a path; None if it knows nothing by it (404). Raises AdminError."""
    return await _ask(http, "GET", base, path, None)


async def explain(http: aiohttp.ClientSession, base: str, question: dict[str, Any]) -> dict[str, Any]:
    """Where a balancer would send a request. Raises AdminError."""
    answer = await _ask(http, "POST", base, "/explain", msgspec.json.encode(question))
    if answer is None:
        raise AdminError(f"{base} has no /explain; is it a balancer's admin port?")
    return answer


async def page(http: aiohttp.ClientSession, base: str, path: str) -> str:
    """The text under a path. Raises AdminError."""
    status, text = await _fetch(http, "GET", base, path, None)
    if status != 200:
        raise AdminError(f"{base}{path} answered with status {status}")
    return text.decode(errors="replace")


async def _fetch(
    http: aiohttp.ClientSession, method: str, base: str, path: str, body: bytes | None
) -> tuple[int, bytes]:
    try:
        async with http.request(method, base.rstrip("/") + path, data=body) as response:
            status, text = response.status, await response.content.read(ANSWER_BYTES_MAX)
            while chunk := await response.content.read(ANSWER_BYTES_MAX):
                text += chunk
                if len(text) > ANSWER_BYTES_MAX:
                    raise AdminError(f"{base} says more than {ANSWER_BYTES_MAX} bytes")
    except TimeoutError:
        raise AdminError(f"{base} did not answer within {ANSWER_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise AdminError(f"{base} cannot be reached: {trouble(error)}") from None
    return status, text


async def _ask(
    http: aiohttp.ClientSession, method: str, base: str, path: str, body: bytes | None
) -> dict[str, Any] | None:
    status, text = await _fetch(http, method, base, path, body)
    if status == 404:
        return None
    answer = _decoded(text)
    if status != 200 or answer is None:
        why = answer.get("error") if answer is not None else None
        if status == 400 and why:
            raise QuestionError(str(why))
        raise AdminError(f"{base}{path} answered with status {status}: {why or 'no JSON object'}")
    return answer


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
