"""ExaBGP's helper: lines both ways, and its end with either side's."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from entry_anycast.speakers import pipe


def test_lines_pass_both_ways_until_one_side_ends(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "api"))
        listening.listen()
        listening.settimeout(20.0)
        process = subprocess.Popen(
            [sys.executable, "-I", pipe.__file__, str(tmp_path / "api")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        way, _ = listening.accept()
        assert process.stdin is not None
        assert process.stdout is not None
        way.sendall(b"announce route x\n")
        assert process.stdout.readline() == b"announce route x\n"
        process.stdin.write(b"done\n")
        process.stdin.flush()
        assert way.recv(64) == b"done\n"
        way.close()
        assert process.wait(timeout=20.0) == 0
        process.communicate()
