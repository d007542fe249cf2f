"""A real ExaBGP, without a neighbour that answers: its API, its acknowledgements, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
from importlib import metadata

import pytest

from entry_anycast.announcing.machine import Phase
from entry_anycast.speakers.exabgp import ExaBgp, ExaBgpConfig, Peer, check_installed, written
from entry_anycast.speakers.speaker import SpeakerError

PEERS = (
    Peer("127.0.0.2", 65000, "127.0.0.1", port=1),
    Peer("127.0.0.3", 65000, "127.0.0.1", port=1, password="secret", multihop=4, drain="prepend"),
)
CONFIG = ExaBgpConfig(65001, "10.0.0.1", PEERS)


def test_its_configuration_announces_nothing_and_offers_no_graceful_restart() -> None:
    text = written(CONFIG, "helper")
    assert "static" not in text
    assert "graceful" not in text
    assert 'outgoing-ttl 4; md5-password "secret";' in text


async def test_exabgp_announces_reports_its_state_and_refusals_and_dies_with_its_watchdog() -> None:
    lost: list[str] = []
    speaker = ExaBgp(ExaBgpConfig(65001, "10.0.0.1", PEERS[:1]), ("192.0.2.1/32",), 10.0, lost.append)
    await speaker.start()
    for phase in (Phase.ANNOUNCED, Phase.DRAINING, Phase.WITHDRAWN):
        await speaker.update(phase)
        seen = await speaker.observe()
        assert (seen.phase, dict(seen.sessions)) == (phase, {"127.0.0.2": False})
    with pytest.raises(SpeakerError, match="refused 'announce route x'"):
        await speaker.ask("announce route x")
    assert speaker.guarded is not None
    watchdog = speaker.guarded.pid
    assert watchdog is not None
    os.kill(watchdog, signal.SIGKILL)  # the kernel kills the speaker with it
    async with asyncio.timeout(20.0):
        while not lost:
            await asyncio.sleep(0.02)
        with pytest.raises(SpeakerError):
            while True:
                await speaker.observe()
    await speaker.kill()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (None, "exabgp is not installed; install it with: pip install"),
        ("6.0.0", "exabgp 6.0.0 is not version 5; install"),
    ],
)
def test_an_exabgp_that_is_not_there_or_another_is_one_line(
    version: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", of)
    with pytest.raises(SpeakerError, match=says):
        check_installed()
