"""What the tests of sources share: a source that is followed, and its announcements."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from inprocess import until

from regional_lb.engines.discovery.source import Failed, Found, Source


class Recorded:
    """All that a source told, and who was there last."""

    def __init__(self) -> None:
        self.steps: list[Found | Failed] = []

    @property
    def found(self) -> Found | None:
        return next((step for step in reversed(self.steps) if isinstance(step, Found)), None)

    @property
    def labels(self) -> list[str] | None:
        return None if self.found is None else [replica.label for replica in self.found.replicas]

    @property
    def failures(self) -> list[str]:
        return [step.why for step in self.steps if isinstance(step, Failed)]

    def draining(self) -> list[str]:
        assert self.found is not None
        return [replica.label for replica in self.found.replicas if replica.draining]

    async def come(self, *labels: str) -> None:
        """Until exactly these are there."""
        await until(lambda: self.labels == list(labels))


@contextlib.asynccontextmanager
async def following(source: Source) -> AsyncIterator[Recorded]:
    """A source at work. It may not end by itself."""
    found = Recorded()
    task = asyncio.create_task(source.follow(found.steps.append))
    try:
        yield found
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
