"""What an announcer's restart knows of the process before, from its state on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent))

from test_config import WORLD, made

from entry_anycast.announcing.machine import Fitness, Phase, Probed
from entry_anycast.app.main import AnycastProcess


def process(folder: Path) -> AnycastProcess:
    bird = {"bird": {"socket": str(folder / "none.ctl"), "file": str(folder / "routes.conf")}}
    etcd = {"endpoints": ["127.0.0.1:1"]}  # never asked
    config = made(speaker=bird, state_dir=str(folder / "state"), last_site="withdraw", etcd=etcd)
    found = AnycastProcess(config, WORLD, Random(1))
    found._remember()
    found.machine.speaker = "up"
    return found


def announce(found: AnycastProcess) -> Phase:
    for _ in range(3):
        found.react(Probed(Fitness.FIT))
    return found.machine.phase


async def test_killed_while_it_announced_it_holds_back_as_after_any_withdrawal(tmp_path: Path) -> None:
    killed = process(tmp_path)
    assert announce(killed) is Phase.ANNOUNCED
    await killed._tasks.close()  # and nothing else: no drain, no withdrawal
    for _ in range(2):  # killed again while it holds back
        again = process(tmp_path)
        assert announce(again) is Phase.WITHDRAWN
        assert 890.0 < again.machine.held_s(again.clock.now()) <= 900.0
        await again._tasks.close()
