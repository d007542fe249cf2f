"""`pytest -n 4`: the tests are collected once, and run by as many forks of the process that collected them.

Tests of one group run in one worker, in their order. A worker is a pytest like any other, but that it tells its reports
to who forked it. Never is a run good in which a test did not come to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

Group = list[pytest.Item]
_NUMBER_BYTES = 2  # of a group, in a queue


class Workers:
    """Runs what was collected on several cores. `grouped` tells who runs together: of each kind its groups.

    Workers begin with one kind each and go on with the next: so what waits and what computes is under way at once.
    """

    def __init__(self, count: int, grouped: Callable[[list[pytest.Item]], Sequence[list[Group]]]) -> None:
        self._count, self._grouped = count, grouped
        self._pids: dict[Connection, int] = {}

    @pytest.hookimpl
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In place of pytest's own. A worker returns from it, too, and ends as any pytest does."""
        if session.config.option.collectonly or session.testsfailed:
            return None  # pytest's own says so
        queues = [(_queue(len(groups)), groups) for groups in self._grouped(session.items)]
        for number in range(self._count):
            ours, theirs = Pipe(duplex=False)
            if (pid := _forked()) == 0:
                ours.close()
                for other in self._pids:
                    other.close()
                _become_worker(session, number, _Told(session, theirs))
                begin = number % len(queues)
                _work(session, [*queues[begin:], *queues[:begin]])
                return True
            theirs.close()
            self._pids[ours] = pid
        for queue, _ in queues:
            os.close(queue)
        try:
            self._listen(session)
        finally:
            for one, pid in self._pids.items():  # what does not end a test now ends its worker after it
                one.close()
                os.kill(pid, signal.SIGINT)
            for pid in self._pids.values():
                os.waitpid(pid, 0)
        return True

    def _listen(self, session: pytest.Session) -> None:
        """Pass on what workers tell, until all of them have ended."""
        missing, failed, hook = dict(enumerate(session.items)), set[Connection](), session.config.hook
        while self._pids:
            for one in wait(list(self._pids)):
                assert isinstance(one, Connection)
                try:
                    index, told = one.recv()
                except EOFError:
                    code = os.waitstatus_to_exitcode(os.waitpid(self._pids.pop(one), 0)[1])
                    if code != (pytest.ExitCode.TESTS_FAILED if one in failed else pytest.ExitCode.OK):
                        hook.pytest_runtest_logreport(
                            report=_fault("a worker", ("", None, ""), f"it ended with {code}")
                        )
                    continue
                item = missing.pop(index)
                hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
                for data in told:
                    report = hook.pytest_report_from_serializable(config=session.config, data=data)
                    hook.pytest_runtest_logreport(report=report)
                    if report.failed:
                        failed.add(one)
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        for item in missing.values():
            why = "not run to its end: its worker ended before"
            hook.pytest_runtest_logreport(report=_fault(item.nodeid, item.location, why))


class _Told:
    """In a worker: tells each test's reports when it has ended."""

    def __init__(self, session: pytest.Session, to: Connection) -> None:
        self._session, self._config, self._to = session, session.config, to
        self._numbers = {item.nodeid: index for index, item in enumerate(session.items)}
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of set-up, call and teardown."""
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        try:
            self._to.send((self._numbers[nodeid], self._reports))
        except BrokenPipeError:
            self._session.shouldstop = "nobody is told any more"
        self._reports = []


def _forked() -> int:
    """The fork's process id, in it 0. A thread would not live on in it, nor what it holds be let go."""
    assert threading.active_count() == 1, threading.enumerate()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # NumPy has threads of its own, and sees to them itself
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_worker(session: pytest.Session, number: int, told: _Told) -> None:
    """It says nothing itself, and has a folder and captured output of its own. It can be ended, also where a shell has
    its background jobs ignore that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = session.config
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(told)
    folder = config._tmp_path_factory.getbasetemp() / f"worker-{number}"
    folder.mkdir()
    config._tmp_path_factory._basetemp = folder
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _queue(count: int) -> int:
    """A pipe with the numbers of so many groups: each is read whole, by one worker."""
    queue, filled = os.pipe()
    os.set_blocking(filled, False)  # it fails if they do not fit, which were 32,768
    for number in range(count):
        os.write(filled, number.to_bytes(_NUMBER_BYTES, "big"))
    os.close(filled)
    return queue


def _work(session: pytest.Session, queues: Sequence[tuple[int, list[Group]]]) -> None:
    """Run the groups that are drawn from the queues."""
    for group in _drawn(queues):
        for item, following in zip(group, [*group[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)


def _drawn(queues: Sequence[tuple[int, list[Group]]]) -> Iterator[Group]:
    for queue, groups in queues:
        while number := os.read(queue, _NUMBER_BYTES):
            yield groups[int.from_bytes(number, "big")]


def _fault(name: str, location: tuple[str, int | None, str], why: str) -> pytest.TestReport:
    return pytest.TestReport(name, location, {}, "failed", why, "call")
