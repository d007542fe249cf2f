"""`farhop demo`: its exit code is the demo's verdict."""

import asyncio
import os
import signal

import pytest

from farhop_cli import demo
from farhop_lab.world.etcd import EtcdLabError


@pytest.mark.parametrize(("held", "code"), [(True, 0), (False, 1)])
def test_the_verdict_is_the_exit_code(cli, monkeypatch, held, code):
    async def run(progress):
        progress("demo: passed")
        return held

    monkeypatch.setattr(demo.demo, "run", run)
    result = cli.run("demo")
    assert (result.exit_code, result.stdout) == (code, "demo: passed\n")


@pytest.mark.parametrize("error", [EtcdLabError("no etcd binary"), OSError("no space left")])
def test_unsuitable_machine_is_reported_in_one_line(cli, monkeypatch, error):
    async def run(progress):
        raise error

    monkeypatch.setattr(demo.demo, "run", run)
    assert cli.failed(cli.run("demo"), 2) == f"farhop: demo: {error}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_by_a_signal_it_unwinds_its_world_first(cli, monkeypatch, number):
    unwound = []

    async def run(progress):
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(60.0)
        finally:
            unwound.append(True)

    monkeypatch.setattr(demo.demo, "run", run)
    assert "stopped before its end" in cli.failed(cli.run("demo"), 1)
    assert unwound
