"""`farhop healthcheck` asks a real server; what is wrong is one line."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = self.path == "/healthz"
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"alive\n" if ready else b"\x1b[2J\n" if self.path == "/evil" else b"not ready\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Health)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def written(folder: Path, text: str) -> str:
    path = folder / "balancer.yaml"
    path.write_text(text)
    return str(path)


def test_alive_and_not_ready_by_the_configuration(cli, tmp_path: Path, port: int) -> None:
    config = written(tmp_path, f"admin: {{host: 0.0.0.0, port: {port}}}\nhop: {{keys: {{k1: env:NOT_SET}}}}\n")
    alive = cli.run("healthcheck", "--config", config)
    assert (alive.exit_code, alive.stdout) == (0, "alive\n")
    ready = cli.run("healthcheck", "--config", config, "--ready")
    assert ready.exit_code == 1
    assert ready.stdout == f"http://127.0.0.1:{port}/readyz: status 503: not ready\n"


def test_healthcheck_accepts_a_url(cli, port: int) -> None:
    assert cli.run("healthcheck", f"http://127.0.0.1:{port}/healthz").exit_code == 0


def test_control_characters_in_the_answer_are_not_printed(cli, port: int) -> None:
    assert cli.run("healthcheck", f"http://127.0.0.1:{port}/evil").stdout.endswith(
        "503: \N{REPLACEMENT CHARACTER}[2J\n"
    )


def test_a_check_without_a_fault_brings_no_tables_with_it() -> None:
    """It is run every few seconds beside each balancer: rich took a fifth of it."""
    told = "import sys, farhop_cli.healthcheck; print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_closed_admin_port_is_an_error(cli, tmp_path: Path) -> None:
    from farhop_lab.world.ports import free_ports

    (free,) = free_ports(1)
    result = cli.run("healthcheck", "--config", written(tmp_path, f"admin: {{port: {free}}}"))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "refused" in result.stderr


@pytest.mark.parametrize("text", ["admin: {}", "admin: 7", "[]", "admin: {port: x}", "admin: {port: 1", ""])
def test_a_configuration_without_an_admin_port_is_one_line(cli, tmp_path: Path, text: str) -> None:
    result = cli.run("healthcheck", "--config", written(tmp_path, text))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_no_configuration_and_no_url(cli, tmp_path: Path) -> None:
    result = cli.run("healthcheck", "--config", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    assert cli.run("healthcheck", "ftp://x").exit_code == 1
