from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from farhop_lab.bench import proxies
from farhop_lab.bench.harness import ProxyEnvironment
from farhop_lab.bench.proxies import PROXIES, Proxy

BY_NAME = {proxy.name: proxy for proxy in PROXIES}


def environment(folder: Path) -> ProxyEnvironment:
    return ProxyEnvironment(folder, (("127.0.0.2", 9000), ("127.0.0.3", 9000)), 1024)


def test_missing_proxy_is_reported_with_its_remedy() -> None:
    absent = Proxy("Other", "pip install other", lambda: None, BY_NAME["Envoy"].command)
    assert absent.missing() == "not installed: pip install other"
    assert BY_NAME["plain aiohttp proxy"].missing() is None


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.name)
def test_every_proxy_is_given_its_port_and_targets(proxy: Proxy, tmp_path: Path) -> None:
    program, arguments = proxy.command("/usr/bin/binary", environment(tmp_path), 8123)
    content = " ".join([*program, *arguments]) + "".join(f.read_text() for f in tmp_path.rglob("*.*") if f.is_file())
    for part in ("8123", "127.0.0.2", "127.0.0.3"):
        assert part in content


def test_binaries_are_found_on_path_and_in_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "a-proxy"
    assert proxies.on_path("a-proxy") is None
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert proxies.on_path("a-proxy") == str(binary)
    assert proxies.in_wheel("no_such_package", "x") is None
    assert proxies.in_wheel("farhop_lab", "bench", "proxies.py") == proxies.__file__
    assert proxies.in_wheel("farhop_lab", "nothing") is None


def test_sglangs_router_is_found_under_its_own_name_though_its_command_is_called_smg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "on_path", lambda name: shutil.which(name, path=str(tmp_path)))
    command = tmp_path / "smg"
    for module, sglangs, smgs in (("sglang_router.cli", str(command), None), ("smg.cli", None, str(command))):
        command.write_text(f"#!/usr/bin/python3\nfrom {module} import main\nmain()\n")
        command.chmod(0o755)
        assert (proxies.find_sglang(), proxies.find_smg()) == (sglangs, smgs)


async def test_a_proxy_runs_and_ends(tmp_path: Path) -> None:
    from farhop_lab.bench import usage
    from farhop_lab.bench.harness import answers, engines

    async with engines(tmp_path, 1024, None) as here, BY_NAME["bare uvloop+httptools relay"].run(here) as running:
        assert await answers(running.host, running.port)
        assert usage.tree(running.pids)
    assert not usage.tree(running.pids)
    assert not await answers(running.host, running.port)
