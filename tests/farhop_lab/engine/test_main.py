"""The process: ready line, clean stop, and one clear line where a port is taken."""

import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

PROGRAM = "import sys; from farhop_lab.engine.main import *; run(EngineSettings(ports=[int(p) for p in sys.argv[1:]]))"


def _start(*ports: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, ports)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_engine_reports_readiness_and_stops_on_a_signal(how: signal.Signals) -> None:
    with _start(0, 0) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0], "no ready line within 60 s"
            line = process.stdout.readline()
            assert line.startswith("engine: serving llama-3.1-8b on 127.0.0.1:")
            addresses = line.split(" on ")[1].split()
            assert len(set(addresses)) == 2
            for address in addresses:
                with urllib.request.urlopen(f"http://{address}/health", timeout=60.0) as response:
                    assert response.status == 200
            process.send_signal(how)
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out, err) == (0, "", "")
        finally:
            process.kill()


def test_a_port_taken_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with _start(0, port) as process:
            out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith(f"engine: port {port}: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert err.count("\n") == 1
