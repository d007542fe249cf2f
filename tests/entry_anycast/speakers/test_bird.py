"""BIRD's file, and its control socket as a small server speaks it; a real one is in tests/drills/test_anycast.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from inprocess import until

from entry_anycast.announcing.machine import Phase
from entry_anycast.speakers import bird
from entry_anycast.speakers.bird import Bird, BirdConfig, written
from entry_anycast.speakers.speaker import SpeakerError
from entry_anycast.speakers.watchdog import NOTHING

BOTH = ("192.0.2.1/32", "2001:db8::1/128")
ROUTES = "1007-192.0.2.1/32  unicast [farhop4 10:00] * (200)\n \tdev lo\n{more}0000 \n"
DRAINS = "1012-\tBGP.community: (65535,0)\n"
PROTOCOLS = (
    "2002-Name  Proto  Table  State  Since  Info\n1002-up  BGP  ---  up  10:00:00  Established   \n"
    " other  BGP  ---  start  10:00:00  Active  Socket: refused\n0000 \n"
)


def test_bird_file_contains_the_routes_of_the_phase() -> None:
    config = BirdConfig("/s", "/f")
    assert written(BOTH, Phase.WITHDRAWN, config) == NOTHING
    text = written(BOTH, Phase.ANNOUNCED, config)
    assert 'protocol static farhop4 {\n  ipv4;\n  route 192.0.2.1/32 via "lo";\n}' in text
    assert "farhop6" in text
    assert 'via "lo" { bgp_community.add((65535, 0)); };' in written(BOTH, Phase.DRAINING, config)
    longer = BirdConfig("/s", "/f", 65001, 2)
    assert "bgp_path.prepend(65001); bgp_path.prepend(65001);" in written(BOTH, Phase.DRAINING, longer)


def test_the_file_is_never_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / ".f.conf.new").symlink_to(other)
    bird.replace_file(tmp_path / "f.conf", "routes")
    assert ((tmp_path / "f.conf").read_text(), other.read_text()) == ("routes", "precious")
    (tmp_path / ".f.conf.new").symlink_to(other)
    monkeypatch.setattr(Path, "unlink", lambda _path: None)  # it comes back at once
    with pytest.raises(OSError, match="exists"):
        bird.replace_file(tmp_path / "f.conf", "more")
    assert ((tmp_path / "f.conf").read_text(), other.read_text()) == ("routes", "precious")


class FakeBird:
    """Answers by its file, as BIRD does."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.file = str(folder / "ctl"), folder / "farhop.conf"
        self.refuses = False
        self.takes = "0003 Reconfigured"
        self.disabled: list[str] = []
        self.met = 0

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._met, self.socket)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        writer.write(b"0001 BIRD 2.0.12 ready.\n")
        while line := (await reader.readline()).decode():
            content = self.file.read_text() if self.file.exists() else ""
            if line.startswith("configure"):
                answer = f"0002-Reading\n{'8002 line 3: syntax error' if self.refuses else self.takes}\n"
            elif line.startswith("disable farhop4"):
                self.disabled.append(line.split()[1])
                answer = "0009-farhop4: disabled\n0000 \n"
            elif line.startswith("disable"):
                answer = "9001 syntax error, unexpected CF_SYM_UNDEFINED\n"
            elif line.startswith("show protocols"):
                answer = PROTOCOLS
            else:
                more = DRAINS if "community" in content else ""
                answer = ROUTES.format(more=more) if "route" in content else "0000 \n"
            writer.write(answer.encode())
        writer.close()
        await writer.wait_closed()
        self.met -= 1

    async def close(self, server: asyncio.Server) -> None:
        server.close()
        await server.wait_closed()
        await until(lambda: not self.met)  # the connections' other ends


async def test_bird_announces_reports_its_state_and_withdraws_when_killed(tmp_path: Path) -> None:
    fake = FakeBird(tmp_path)
    server = await fake.serve()
    lost: list[str] = []
    bird = Bird(BirdConfig(fake.socket, str(fake.file)), BOTH[:1], 5.0, lost.append)
    await bird.start()
    for phase in (Phase.ANNOUNCED, Phase.DRAINING, Phase.WITHDRAWN, Phase.ANNOUNCED):
        await bird.update(phase)
        seen = await bird.observe()
        assert (seen.phase, dict(seen.sessions)) == (phase, {"up": True, "other": False})
    await bird.kill()
    assert fake.file.read_text() == NOTHING
    assert lost == []
    with pytest.raises(SpeakerError, match="is not connected"):
        await bird.observe()
    await fake.close(server)


async def test_a_configuration_that_bird_refuses_is_reported(tmp_path: Path) -> None:
    fake = FakeBird(tmp_path)
    fake.refuses = True
    server = await fake.serve()
    bird = Bird(BirdConfig(fake.socket, str(fake.file)), BOTH[:1], 5.0, lambda _why: None)
    with pytest.raises(SpeakerError, match="line 3: syntax error"):
        await bird.start()
    await bird.kill()
    await fake.close(server)


async def test_a_configuration_that_bird_queues_behind_another_counts_as_accepted(tmp_path: Path) -> None:
    """An operator has it configure itself at the same moment: ours is queued, and no reason to withdraw."""
    fake = FakeBird(tmp_path)
    fake.takes = "0005 Reconfiguration already in progress, queueing new config"
    server = await fake.serve()
    bird = Bird(BirdConfig(fake.socket, str(fake.file)), BOTH[:1], 5.0, lambda _why: None)
    await bird.start()
    await bird.update(Phase.ANNOUNCED)
    await bird.kill()
    assert (fake.file.read_text(), fake.disabled) == (NOTHING, [])
    await fake.close(server)


@pytest.mark.parametrize("broken", ["another's file", "our file"])
async def test_a_configuration_that_bird_refuses_keeps_no_route_announced(tmp_path: Path, broken: str) -> None:
    fake = FakeBird(tmp_path)
    server = await fake.serve()
    bird = Bird(BirdConfig(fake.socket, str(fake.file)), BOTH[:1], 5.0, lambda _why: None)
    await bird.start()
    await bird.update(Phase.ANNOUNCED)
    if broken == "our file":  # it cannot be emptied: a folder is in its place
        fake.file.unlink()
        fake.file.mkdir()
        fake.file = tmp_path / "none"
    else:
        fake.refuses = True
    await bird.kill()
    assert fake.disabled == ["farhop4"]
    await fake.close(server)


async def test_a_bird_that_is_not_there_or_whose_file_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    missing = Bird(BirdConfig(str(tmp_path / "none.ctl"), str(tmp_path / "routes")), BOTH[:1], 5.0, lambda _why: None)
    with pytest.raises(
        SpeakerError, match=r"none.ctl: No such file or directory; start bird, or name its control socket"
    ):
        await missing.start()
    fake = FakeBird(tmp_path)
    server = await fake.serve()
    nowhere = tmp_path / "nowhere" / "routes"
    bird = Bird(BirdConfig(fake.socket, str(nowhere)), BOTH[:1], 5.0, lambda _why: None)
    with pytest.raises(SpeakerError, match=rf"bird: cannot write {nowhere}: No such file or directory; give a path"):
        await bird.start()
    await bird.kill()
    await fake.close(server)
