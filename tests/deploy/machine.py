"""What the tests of deploy/ run on: a Docker engine, and images made here, since no registry is within reach of a test.

Whatever is made has the label `farhop.test` and is removed by who made it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from testcontainers.core.container import DockerContainer

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BUILD_S = 400.0  # on a slow disk the layers of an image take minutes

_ROOT_BYTES = 2 * 1024**3  # what a root and its archive take, and more
# Contents that a Debian root needs for Farhop to be installed on it, and those that make it a host that boots (units
# reload by its `kill`): one root for all tests, since making one takes a minute. Documentation is left out.
_PACKAGES = "python3,libstdc++6,ca-certificates,systemd,dbus,procps"
_WITHOUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


class MissingError(Exception):
    """This machine lacks what a test needs; the text says what."""


@contextmanager
def running(command: Sequence[str | Path], log: Path) -> Iterator[None]:
    """Runs a program beside the test, what it says in `log`; it is ended behind the test."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        process.kill()
        process.wait()


def run(
    *command: str, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. AssertionError, with what it said, where it fails and should not."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(environment or {})},
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert not check or ended.returncode == 0, f"{' '.join(command)}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    return ended


def docker(*arguments: str, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`docker …`."""
    return run("docker", *arguments, timeout_s=timeout_s, check=check)


@contextmanager
def container(image: str, *command: str, tmpfs: Sequence[str] = (), **options: Any) -> Iterator[DockerContainer]:
    """One that runs meanwhile, and is gone with its volumes afterwards. `options` are DockerContainer's, and what
    docker-py's `run` takes."""
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    testcontainers_config.ryuk_disabled = True  # its reaper is an image that would have to be pulled
    options = {"labels": {"farhop.test": "container"}, **options}
    made = DockerContainer(image, **options).with_command(list(command))
    for path in tmpfs:
        made.with_tmpfs_mount(path)
    with made:
        yield made


def _in_memory() -> str | None:
    """Where files are kept in memory, if there is room for a root and its archive; None: wherever files usually go."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > _ROOT_BYTES else None


def base_image(tag: str) -> None:
    """A root of Debian packages, imported as an image. MissingError where it cannot be made here."""
    if shutil.which("mmdebstrap") is None:
        raise MissingError("mmdebstrap is not installed, and images are built on a root of Debian packages")
    if os.geteuid() != 0:
        raise MissingError("mmdebstrap makes a root for a container only as root")
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )  # this machine's own list: its mirror is the one within reach
    with tempfile.TemporaryDirectory(prefix="farhop-base-", dir=_in_memory()) as folder:
        root = f"{folder}/root.tar"
        # Written out file by file, as for a root that should outlive a crash, it would take twice as long.
        options = ["--dpkgopt=force-unsafe-io", *(f"--dpkgopt=path-exclude={pattern}" for pattern in _WITHOUT)]
        made = run(
            "mmdebstrap", "--quiet", "--variant=essential", f"--include={_PACKAGES}", *options,
            release.get("VERSION_CODENAME", "stable").strip('"'), root, timeout_s=BUILD_S,
            environment={"TMPDIR": folder}, check=False,
        )  # fmt: skip
        if made.returncode:
            raise MissingError(f"mmdebstrap could not make a root: {made.stderr[-300:]}")
        docker("import", "--change", "LABEL farhop.test=base", root, tag, timeout_s=120.0)


def farhop_image(tag: str, base: str) -> str:
    """Built as `make image` does; what that says at its end."""
    build = (sys.executable, str(DEPLOY / "image" / "build.py"), "--base", base, "--tag", tag)
    return run(*build, timeout_s=BUILD_S).stdout.strip().splitlines()[-1]


def etcd_image(tag: str, base: str) -> None:
    """An etcd image with the binary that comes as a Python package, its data where compose has them."""
    from farhop_lab.world.etcd import find_binary

    with tempfile.TemporaryDirectory(prefix="farhop-etcd-") as folder:
        context = Path(folder)
        for name in ("etcd", "etcdctl"):
            shutil.copy(find_binary().with_name(name), context / name)
        (context / "Dockerfile").write_text(f"FROM {base}\nCOPY etcd etcdctl /usr/bin/\n")
        run("docker", "build", "--quiet", "--tag", tag, folder, timeout_s=120.0, environment={"DOCKER_BUILDKIT": "0"})


def prometheus_image(tag: str, base: str) -> None:
    """Prometheus as its own image starts it, of this machine's package. MissingError where that is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        raise MissingError("prometheus is not installed (Debian: prometheus)")
    with tempfile.TemporaryDirectory(prefix="farhop-prometheus-") as folder:
        context = Path(folder)
        shutil.copy(program, context / "prometheus")
        (context / "Dockerfile").write_text(
            f"FROM {base}\nCOPY prometheus /bin/\nWORKDIR /prometheus\nUSER 65534\n"
            'ENTRYPOINT ["/bin/prometheus"]\n'
            'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/tmp/prometheus"]\n'
        )
        run("docker", "build", "--quiet", "--tag", tag, folder, timeout_s=120.0, environment={"DOCKER_BUILDKIT": "0"})


def remove_images(tags: Sequence[str]) -> None:
    """Images made here, and the layers that only their builds used."""
    for tag in tags:
        docker("rmi", "--force", tag, check=False)
