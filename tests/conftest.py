"""What the tests of the whole share: one world of real processes for the session, driven from a thread of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import uvloop

os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # trio, which selenium brings: 60 modules in every worker
# NumPy's threads spin while they wait for work that none here is large enough for: up to a tenth of a worker's CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from farhop_lab.sim import huge_pages
from farhop_lab.world.fork_server import run_queue_s

if TYPE_CHECKING:  # a second of imports, which most single tests, and what distributes all tests, can do without
    from farhop_lab.world.client import Result
    from farhop_lab.world.world import WorldSettings

T = TypeVar("T")
_NAP_S = 0.005
SPANS_EVERY_MS = 500  # the processes that tests start

NEEDS = ("docker", "root", "browser", "history", "envoy", "chaos")  # the markers of `make test-system`
TESTS = Path(__file__).parent
DRILLS = TESTS / "drills"
# For processes that tests start: they do not need this machine's certificate authorities, which take 30 ms of CPU each
# to load. A world has none either (farhop_lab.world): with one environment one server forks all; a server costs 1 s.
NO_CERTIFICATES = {"SSL_CERT_FILE": os.devnull}
ASKS = b"running: RunningWorld"  # in the files whose tests share the world
SDKS = b"\nSDKS = "  # files that import modules that take a second to load (tests/flows/conftest.py)
VERSION_BEFORE = "e0c6e3d"  # the version that tests/deploy/test_skew.py runs beside this one
os.environ.setdefault("FARHOP_TEST_HOP", "x" * 32)  # the key between tiers that the tests' configurations name
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

# `make test` runs this share of the examples that a property test asks for, `make test-system` all of them.
EXAMPLES = float(os.environ.get("FARHOP_EXAMPLES", "1"))
EXAMPLES_MIN = 10  # at least so many are always run, if the test asks for as many


def played(named: int) -> int:
    """So many examples does a test of a property play that names so many.

    Only what is given within a test has to ask, and be marked `hypothesis`.
    """
    return max(min(named, EXAMPLES_MIN), round(EXAMPLES * named))


def further(cases: Iterable[T], *first: T) -> list[Any]:
    """The cases of a test that takes long for each: `make test` plays the first named, `make test-system` all."""
    return [
        case if case in first else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


# For all properties: the same examples in every run, and no result that depends on how busy the machine is,
settings.register_profile(
    "farhop", deadline=None, derandomize=True, max_examples=played(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("farhop")
# nor on the files that a worker has imported: Hypothesis would read all of them for constants, in each worker again.
assert callable(providers._get_local_constants)
providers._get_local_constants = lambda: providers._local_constants  # none


class RunningWorld:
    """A world on an event loop in a thread, so that plain tests (and the OpenAI SDK) can use it."""

    def __init__(self, settings: WorldSettings, folder: Path) -> None:
        from farhop_lab.world.world import World

        self.world = World(settings, folder)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 300.0) -> T:
        """Run a coroutine where the world lives, to its end."""
        return self.begin(work).result(timeout_s)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine where the world lives, meanwhile."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the world and its thread."""
        self.call(self.world.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def entry(self, region: str) -> str:
        """The URL at which clients enter in a region."""
        return self.world.regions[region].entry

    def ask(self, region: str, tenant: str, text: str, **options: Any) -> Result:
        """One chat request, streamed; redirects are followed inside this world."""
        from farhop_lab.world.client import answer

        body = {
            "model": self.world.settings.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": options.pop("max_tokens", 16),
            "stream": options.pop("stream", True),
        }
        entries = [run.entry for run in self.world.regions.values()]
        return self.call(answer([self.entry(region)], f"sk-farhop-{tenant}", body, trusted=entries, **options))


async def at_once(true: Callable[[], object], rounds: int = 40) -> None:
    """What waits for no clock is so when the loop has gone round so often, however long a round takes here."""
    for _ in range(rounds):
        if true():
            return
        await asyncio.sleep(0)
    assert true(), f"not so after {rounds} rounds of the loop"


async def soonest(measure: Callable[[], Awaitable[float]], below_s: float, tries: int = 20) -> None:
    """What is measured is below this at least once, less the least that a bare sleep was late beside it.

    What a busy machine adds to a time it does not add every time, or else it adds it to a sleep as well.
    """
    took_s: list[float] = []
    late_s: list[float] = []
    while not took_s or min(took_s) - min(late_s) >= below_s:
        assert len(took_s) < tries, f"never below {below_s} s: {took_s}, and sleeps late by {late_s}"
        began = time.monotonic()
        await asyncio.sleep(_NAP_S)
        late_s.append(max(0.0, time.monotonic() - began - _NAP_S))
        took_s.append(await measure())


def unhindered(*pids: int) -> Callable[[], float]:
    """The time since this was called, less that for which these processes (this one, if none is named) could have run
    and others had the cores: what a bar in seconds is held to."""
    watched = pids or (os.getpid(),)
    began, waited_s = time.monotonic(), sum(map(run_queue_s, watched))
    return lambda: time.monotonic() - began - (sum(map(run_queue_s, watched)) - waited_s)


def chaos() -> str | None:
    """Chaos Toolkit's command: it has an environment of its own, since it pins what we use, too."""
    named = os.environ.get("FARHOP_CHAOS")
    made = TESTS.parent / ".venv-chaos" / "bin" / "chaos"  # by `make chaos-tools`
    return next((one for one in (named, str(made)) if one and os.access(one, os.X_OK)), shutil.which("chaos"))


def _docker_answers() -> bool:
    """Whether a Docker engine answers. One that hangs is as good as none: tests that do not need it must run."""
    docker = shutil.which("docker")
    try:
        return (
            docker is not None
            and not subprocess.run([docker, "info"], capture_output=True, timeout=20.0, check=False).returncode
        )
    except subprocess.TimeoutExpired:
        return False


def _missing() -> dict[str, str]:
    """Of what markers ask for, what is not there, and why a test is skipped for it."""
    from farhop_lab.bench.proxies import ENVOY

    missing: dict[str, str] = {}
    if not _docker_answers():
        missing["docker"] = "no Docker engine answers `docker info`"
    git = shutil.which("git")
    asked = [git or "git", "cat-file", "-e", f"{VERSION_BEFORE}^{{commit}}"]
    if git is None or subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, check=False).returncode:
        missing["history"] = f"the repository's history does not reach back to {VERSION_BEFORE}"
    if os.geteuid() != 0:
        missing["root"] = "not run as root"
    if not any(map(shutil.which, BROWSERS)):
        missing["browser"] = f"none of {', '.join(BROWSERS)} is on the PATH"
    elif shutil.which("chromedriver") is None:
        missing["browser"] = "chromedriver (Debian's chromium-driver) is not on the PATH"
    if chaos() is None:
        missing["chaos"] = (
            "Chaos Toolkit is not here (`make chaos-tools`), nor `chaos` on the PATH or named by FARHOP_CHAOS"
        )
    if ENVOY.find() is None:
        missing["envoy"] = f"Envoy is {ENVOY.missing()}"
    return missing


WORLD = pytest.StashKey[RunningWorld]()  # in the session's configuration, while it runs


def _in_world(item: pytest.Item | None) -> bool:
    return item is not None and "running" in getattr(item, "fixturenames", ())


def _fewer_examples(items: list[pytest.Item]) -> None:
    """Of a hypothesis test the settings stand at its function, of a machine at its class."""
    owners = {
        id(owner): (owner, name)
        for item in items
        for owner, name in (
            (getattr(item, "cls", None), "settings"),
            (getattr(item, "function", None), "_hypothesis_internal_use_settings"),
        )
        if isinstance(getattr(owner, name, None), settings)
    }
    for owner, name in owners.values():
        named = getattr(owner, name)
        setattr(owner, name, settings(named, max_examples=played(named.max_examples)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run on several cores a file stays together, and all files that share the world are one, as are those
    that import others' SDKs. Every other worker begins with the drills, which wait more than they work, the others with
    all else: both are under way at once.

    Not by `--dist loadgroup`: its marks are of no effect with pytest 9.2, and every worker had worlds of its own.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    # The process that distributes the tests has not collected them: it knows only their names.
    texts = {f"{path.relative_to(TESTS.parent)}": path.read_bytes() for path in TESTS.rglob("test_*.py")}
    scopes = {file: "sdks" for file, text in texts.items() if SDKS in text}
    scopes |= {file: "world" for file, text in texts.items() if ASKS in text}

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return scopes.get(file, file)

        def _assign_work_unit(self, node: Any) -> None:
            drills = self.nodes.index(node) % 2 == 0
            first = next((one for one in self.workqueue if one.startswith(("world", "tests/drills/")) == drills), None)
            if first is not None:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays to the end: to look through it for garbage, then and later, is a quarter of the work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)  # as processes of Farhop do: objects made by the machines are freed with them
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares the world comes first, then the other drills: they wait more than they work, and should not be waited
    for at the end. What a marker asks for and the machine has not is a reason to skip, and the only one known here.
    """
    _fewer_examples(items)
    marked = any(item.get_closest_marker(name) for item in items for name in NEEDS)
    missing = _missing() if marked else {}
    for item in items:
        for name in missing:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=missing[name]))
    drills = f"{DRILLS}{os.sep}"
    items.sort(key=lambda item: (not _in_world(item), not str(item.path).startswith(drills)))


@pytest.fixture
async def engine() -> AsyncIterator[Any]:
    """An emulated engine in this process."""
    from inprocess import Engine  # most tests need none

    async with Engine().running() as running:
        yield running


@pytest.fixture
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunningWorld:
    """The default world, up, for all that ask for it. A test that breaks a part mends it before it ends."""
    stash = request.config.stash
    if WORLD not in stash:
        if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # in the folder of all workers, each worker has one
            only = tmp_path_factory.getbasetemp().parent / "world"
            only.touch()
            assert only.read_text() in ("", worker), f"a second world: {only.read_text()} has one, too (see ASKS)"
            only.write_text(worker)
        from farhop_lab.world.world import WorldSettings

        made = RunningWorld(WorldSettings(speedup=20.0), tmp_path_factory.mktemp("world"))
        try:
            made.call(made.world.start())
        except BaseException:
            made.close()
            raise
        stash[WORLD] = made
    return stash[WORLD]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The world ends with the last that asks for it: at rest it would take a fifth of a core from all others."""
    if WORLD in item.config.stash and not _in_world(nextitem):
        world = item.config.stash[WORLD]
        del item.config.stash[WORLD]
        world.close()


@pytest.fixture(scope="session", autouse=True)
def _spans_in_fewer_exports() -> Iterator[None]:
    """A quarter of what a world costs under load is exports of spans, by each of its dozen processes ten times a second
    as it has it. Few tests look at spans, and none at how soon they come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(SPANS_EVERY_MS))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_huge_pages() -> Iterator[None]:
    """A worker keeps hundreds of MB of tests: to have those on huge pages takes 0.7 s, more than any run here gains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "WORTH_IT", 1 << 60)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nobody_trusted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nor does a client in this process, or in one that has its environment, read whom this machine trusts: 20 ms each.
    One certificate, as the SDKs refuse a file without any. Images are built of what registries say, so those tests do.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not any(item.get_closest_marker("docker") for item in request.session.items):
            patch.setenv("SSL_CERT_FILE", str(TESTS / "nobody.pem"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_contexts_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands, in this process or another, find no contexts but those that a test makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.delenv("FARHOP_CONTEXT", raising=False)
        patch.delenv("FARHOP_ADMIN_TOKEN", raising=False)
        yield
