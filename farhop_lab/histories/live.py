"""Histories of live processes: `python -m farhop_lab.histories.live` is the `farhop` command with its machine recorded.

Opt-in, and not in the product: the lab starts its processes this way if FARHOP_LAB_PROGRAM names this module, and each
writes its histories to the folder FARHOP_HISTORIES_TO when it ends (not if it is killed). With `pytest -p
farhop_lab.histories.live` machines made by tests are recorded, too.

    FARHOP_LAB_PROGRAM=farhop_lab.histories.live FARHOP_HISTORIES_TO=folder pytest tests/drills/test_pairs.py
    python -m farhop_lab.histories keep live-pairs folder/*.history
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from farhop_lab.histories import names
from farhop_lab.histories.recorder import HistoryRecorder, RecordingSession, write

TO, CALLS_MAX = "FARHOP_HISTORIES_TO", 20_000


def record(folder: Path) -> RecordingSession:
    """From now on every machine made in this process is recorded, and written when it ends."""
    session = RecordingSession()
    for one in session.patches():
        one.start()
    for kind in names.MACHINES:
        kind.__init__ = _recorded(kind.__init__, session)
    atexit.register(_write, session, folder)
    return session


def _recorded(begin: Any, session: RecordingSession) -> Any:
    def begun(flow: Any, config: Any, law: Any, rng: Any, of_tenant: Any, *more: Any) -> None:  # noqa: ARG001
        # A random generator of its own: the process's has other users, too.
        seed = f"live {len(session.recorders)}"
        begin(flow, config, law, names.dice(seed), of_tenant, *more)
        genesis = names.as_it_began(flow, config, law, seed, of_tenant, *more)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].partition(" ")[0]
        name = f"{genesis[0]} {config.region} {getattr(config, 'instance', '')} {test}".strip()
        session.add(HistoryRecorder(name, genesis, calls_max=CALLS_MAX), flow)

    return begun


def _write(session: RecordingSession, folder: Path) -> None:
    write(folder / f"{os.getpid()}.history", session.recorders)


if os.environ.get(TO):
    record(Path(os.environ[TO]))

if __name__ == "__main__":
    sys.argv[0] = "farhop"
    runpy.run_module("farhop_cli", run_name="__main__")
