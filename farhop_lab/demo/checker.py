"""What every part of the demo uses: a running world, clients, and lines that show what was expected and seen.

Never reports what it did not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from farhop_lab.world.client import Delta, Result, ask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farhop_lab.world.world import World


class Check(msgspec.Struct, frozen=True):
    """One line of the demo."""

    part: str
    what: str
    expected: str
    seen: str
    held: bool


class Checker:
    """A running world, and the checks made on it so far."""

    def __init__(self, world: World, progress: Callable[[str], None]) -> None:
        self.world, self.progress = world, progress
        self.checks: list[Check] = []
        self.names = list(world.regions)

    def check(self, part: str, what: str, expected: str, seen: str, held: bool) -> None:
        """One line."""
        self.checks.append(Check(part, what, expected, seen, held))
        mark = "ok  " if held else "FAIL"
        self.progress(f"{mark} ({part}) {what:<56} expected: {expected:<34} seen: {seen}")

    async def ask(self, region: str, tenant: str, text: str, **options: Any) -> Result:
        """One chat request; returns its result."""
        return (await self.stream(region, tenant, text, **options))[1]

    async def stream(
        self,
        region: str,
        tenant: str,
        text: str,
        *,
        max_tokens: int = 24,
        headers: dict[str, str] | None = None,
        entries: Sequence[str] = (),
        begun: list[None] | None = None,
        history: Sequence[dict[str, str]] = (),
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[int, Result]:
        """A streamed request: the pieces received, and the result. `begun` is set at the first piece; `entries` are
        tried after the region's.
        """
        body = {
            "model": self.world.settings.model,
            "messages": [*history, {"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"tools": list(tools)} if tools else {}),
        }
        trusted = [run.entry for run in self.world.regions.values()]
        first = self.world.regions[region].entry
        pieces = 0
        result: Result | None = None
        async for event in ask([first, *entries], f"sk-farhop-{tenant}", body, headers=headers, trusted=trusted):
            if isinstance(event, Delta):
                pieces += 1
                if pieces == 1 and begun is not None:
                    begun.append(None)
            elif isinstance(event, Result):
                result = event
        assert result is not None  # the client always ends with a Result
        return pieces, result

    async def prompt_tokens(self, regions: Sequence[str]) -> float:
        """Prompt tokens that the engines of these regions have ever taken."""
        pages = [await self.page(f"{url}/metrics") for name in regions for url in self.world.regions[name].engine_urls]
        lines = [line for page in pages for line in page.splitlines()]
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prompt_tokens_total"))

    async def why(self, entry: str, result: Result) -> None:
        """An entry's record of the decision for a request that went elsewhere than expected."""
        asked = result.headers.get("x-farhop-decision", "unknown")
        decision = await self.page(f"{self.world.regions[entry].global_admin}/decisions/{asked}")
        self.progress(f"     {code_of(result)}; why, by {entry}'s global balancer: {decision}")

    async def page(self, url: str) -> str:
        """The page's body."""
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return await answer.text()

    async def status(self, admin: str) -> dict[str, Any]:
        """A balancer's status page."""
        async with aiohttp.ClientSession() as session, session.get(f"{admin}/status") as answer:
            document: dict[str, Any] = await answer.json()
            return document


def region_of(result: Result) -> str:
    """Where it was served, or its status."""
    return result.headers.get("x-farhop-region", f"none ({result.status})") if result.ok else _trouble(result)


def _trouble(result: Result) -> str:
    return f"{result.status} {result.error.code if result.error is not None else ''}"


def code_of(result: Result) -> str:
    """Status and error code."""
    return f"{result.status} {result.error.code if result.error is not None else 'none'}"
