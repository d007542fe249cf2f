"""Faults in a fleet on Docker compose or Kubernetes: containers and pods killed, paused and started again.

By the platform's own command, found by labels: `farhop.region` and `farhop.role` on containers (deploy/compose has
them), `farhop.dev/region` and `app.kubernetes.io/component` on what creates pods (the chart has them). Invariants:
nothing without these labels is touched, nor anything of another project or namespace; afterwards there are the same
containers and as many pods as before. Never starts what it did not stop.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop_lab.world.faults import FaultError
from farhop_lab.world.world_file import runs

if TYPE_CHECKING:
    from farhop_lab.world.faults import FaultCommand

FAULTS_FILE = Path(".farhop/faults.json")
COMMAND_S = 60.0
OUTPUT_CHARS_MAX = 300
# What each kind stops, by role. Pods cannot be paused, and links between regions do not belong to a container.
KILLS = {
    "kill-region": ("engine", "regional", "global"),
    "kill-engines": ("engine",),
    "kill-regional": ("regional",),
    "kill-global": ("global",),
}
PAUSES = {"stop-engines": "engine", "stop-etcd": "etcd"}


class FaultsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the process that injects faults in a deployed fleet takes commands, which need the token."""

    pid: int
    fleet: str
    control: str
    token: str


def describe(path: Path, faults: FaultsFile) -> None:
    """Write it, readable by its owner alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(faults))


def described(path: Path, fleet: str) -> FaultsFile | None:
    """The process that injects faults in this fleet, if one runs."""
    try:
        faults = msgspec.json.decode(path.read_bytes(), type=FaultsFile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return faults if faults.fleet == fleet and runs(faults.pid) else None


class Command(Protocol):
    """Runs one command and returns its output. FaultError if it fails."""

    async def __call__(self, *words: str) -> str: ...


async def command(*words: str) -> str:
    """See Command."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise FaultError(f"{words[0]}: {error.strerror or 'cannot be run'}") from None
    try:
        async with asyncio.timeout(COMMAND_S):
            printed, wrong = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise FaultError(f"{' '.join(words[:3])}: did not end within {COMMAND_S:g} s") from None
    if process.returncode:
        raise FaultError(f"{' '.join(words[:3])}: {wrong.decode(errors='replace').strip()[:OUTPUT_CHARS_MAX]}")
    return printed.decode(errors="replace")


class Containers:
    """The containers of one compose project on this machine's Docker."""

    def __init__(self, project: str, run: Command = command) -> None:
        self._project, self._run = project, run
        self._broken: dict[FaultCommand, list[str]] = {}  # by fault, the containers that it stopped or paused

    async def regions(self) -> list[str]:
        """The regions of which something runs there. FaultError if there are none."""
        regions = await self._regions()
        if not regions:
            why = "no running container with the label farhop.region; name the project as `docker compose ls` does"
            raise FaultError(f"compose project {self._project}: {why}")
        return regions

    async def _regions(self) -> list[str]:
        output = await self._run("docker", "ps", "--filter", self._label(), "--format", '{{.Label "farhop.region"}}')
        return sorted({line.strip() for line in output.splitlines()} - {""})

    async def known(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        _offered(wanted, {*KILLS, *PAUSES}, "containers")
        regions = await self._regions()
        for name in (wanted.region, wanted.hub):
            if name and name not in regions:
                raise FaultError(
                    f"no region {name!r} in project {self._project}; it has {', '.join(regions) or 'none'}"
                )
        if not await self._which(wanted):
            raise FaultError(f"{wanted.do}: nothing of that runs in project {self._project}")

    async def inject(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        found = self._broken[wanted] = await self._which(wanted)
        await self._run("docker", "pause" if wanted.do in PAUSES else "kill", *found)

    async def mend(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        found = self._broken.get(wanted, [])
        if not found:
            return
        if wanted.do in PAUSES:
            paused = await self._run("docker", "ps", "-q", "--no-trunc", "--filter", "status=paused")
            found = [one for one in found if one in paused.split()]
        if found:
            await self._run("docker", "unpause" if wanted.do in PAUSES else "start", *found)
        self._broken.pop(wanted, None)

    def _label(self) -> str:
        return f"label=com.docker.compose.project={self._project}"

    async def _which(self, wanted: FaultCommand) -> list[str]:
        """The running containers that it affects."""
        roles = KILLS.get(wanted.do) or (PAUSES[wanted.do],)
        region = wanted.region or wanted.hub
        found: list[str] = []
        for role in roles:
            labels = [
                self._label(),
                f"label=farhop.role={role}",
                *([f"label=farhop.region={region}"] if region else []),
            ]
            filters = [word for label in labels for word in ("--filter", label)]
            found += (await self._run("docker", "ps", "-q", "--no-trunc", *filters)).split()
        return found


class Pods:
    """Pods in one namespace of Kubernetes, by `kubectl` and a context of it ("": the current one)."""

    def __init__(self, namespace: str, context: str = "", run: Command = command) -> None:
        self._kubectl = ("kubectl", *(("--context", context) if context else ()), "--namespace", namespace)
        self._namespace, self._run = namespace, run
        self._replicas: dict[FaultCommand, dict[str, int]] = {}  # by fault, the replica counts of what it scaled down

    async def regions(self) -> list[str]:
        """The regions of which something is deployed there. FaultError if there are none."""
        form = 'jsonpath={range .items[*]}{.metadata.labels.farhop\\.dev/region}{"\\n"}{end}'
        output = await self._run(
            *self._kubectl, "get", "deployments,statefulsets", "--selector", "farhop.dev/region", "--output", form
        )
        regions = sorted({line.strip() for line in output.splitlines()} - {""})
        if not regions:
            why = "no deployment or stateful set with the label farhop.dev/region, which the chart sets"
            raise FaultError(f"namespace {self._namespace}: {why}")
        return regions

    async def known(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        _offered(wanted, set(KILLS), "pods")
        if not await self._which(wanted):
            raise FaultError(f"{wanted.do}: nothing of {wanted.region} runs in namespace {self._namespace}")

    async def inject(self, wanted: FaultCommand) -> None:
        """See FaultTarget. First scales to zero what creates pods; then kills the pods, without a grace period."""
        found = self._replicas[wanted] = await self._which(wanted)
        await self._run(*self._kubectl, "scale", "--replicas=0", *found)
        await self._run(
            *self._kubectl, "delete", "pods", "--selector", self._selector(wanted), "--grace-period=0", "--force",
            "--ignore-not-found", "--wait=false",
        )  # fmt: skip

    async def mend(self, wanted: FaultCommand) -> None:
        """See FaultTarget."""
        for name, replicas in tuple(self._replicas.get(wanted, {}).items()):
            await self._run(*self._kubectl, "scale", f"--replicas={replicas}", name)
            del self._replicas[wanted][name]
        self._replicas.pop(wanted, None)

    def _selector(self, wanted: FaultCommand) -> str:
        return f"farhop.dev/region={wanted.region},app.kubernetes.io/component in ({','.join(KILLS[wanted.do])})"

    async def _which(self, wanted: FaultCommand) -> dict[str, int]:
        """The deployments and stateful sets that it affects, and their replica counts."""
        form = 'jsonpath={range .items[*]}{.kind}/{.metadata.name} {.spec.replicas}{"\\n"}{end}'
        output = await self._run(
            *self._kubectl, "get", "deployments,statefulsets", "--selector", self._selector(wanted), "--output", form
        )
        found: dict[str, int] = {}
        for line in output.splitlines():
            name, _, replicas = line.strip().partition(" ")
            if name and replicas.isdigit() and int(replicas):
                found[name.lower()] = int(replicas)
        return found


def _offered(wanted: FaultCommand, kinds: set[str], what: str) -> None:
    if wanted.do not in kinds:
        raise FaultError(f"{wanted.do[:64]!r} is not made in {what}; there are {', '.join(sorted(kinds))}")
    if wanted.do != "stop-etcd" and not wanted.region:
        raise FaultError(f"{wanted.do}: give a region")
