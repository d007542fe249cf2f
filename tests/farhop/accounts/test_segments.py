"""Lines on the disk: whole or not at all, through a kill, a full disk and bounds; what is lost is counted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.accounts import segments
from farhop.accounts.segments import Bounds, Segments, read


def numbered(some: list[Any]) -> list[bytes]:
    return [b"%d\n" % one for one in some]


def numbers(folder: Path) -> list[int]:
    return [int(line) for _, line in read(folder)]


def until(true: Any, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "WAKE_S", 0.01)
    monkeypatch.setattr(segments, "RETRY_S", 0.02)


def test_in_order_in_files_of_a_bounded_size(tmp_path: Path) -> None:
    files = Segments(tmp_path / "a", Bounds(segment_bytes=50), numbered, time.monotonic, time.time)
    files.open()
    for n in range(10):
        for i in range(10):
            files.put(10 * n + i)
        until(lambda: files.written == 10 * n + 10)  # noqa: B023
    files.close()
    assert numbers(tmp_path) == list(range(100))
    assert not list(tmp_path.rglob("*.open"))
    assert len(list(tmp_path.rglob("*.jsonl"))) > 3
    assert (files.written, files.lost, files.trouble) == (100, 0, "")


@pytest.mark.parametrize("restarts", [False, True])
def test_files_stay_in_order_when_the_wall_clock_is_set_back(tmp_path: Path, restarts: bool) -> None:
    """Deliveries and audits read them in the order of their names."""
    wall_s = [time.time()]
    files = Segments(tmp_path, Bounds(segment_bytes=1), numbered, time.monotonic, lambda: wall_s[0])
    files.open()
    for n in range(6):
        files.put(n)
        until(lambda: files.written == n + 1 and len(list(tmp_path.glob("*.jsonl"))) == n + 1)  # noqa: B023
        wall_s[0] -= 3600.0
    if restarts:
        files.close()
        files = Segments(tmp_path, Bounds(), numbered, time.monotonic, lambda: wall_s[0])
        files.open()
        files.put(6)
        until(lambda: files.written == 1)
    files.close()
    assert numbers(tmp_path) == list(range(7 if restarts else 6))
    assert (files.lost, files.trouble) == (0, "")


def test_a_step_of_the_wall_clock_deletes_nothing_until_it_has_held_for_a_day(tmp_path: Path) -> None:
    now, wall_s, looks = [0.0], [time.time()], [0]

    def wall() -> float:
        looks[0] += 1
        time.sleep(0.02)  # meanwhile the test goes on: the time that passes during a look counts until the next
        return wall_s[0]

    files = Segments(tmp_path, Bounds(segment_bytes=1, keep_s=86_400.0), numbered, lambda: now[0], wall)
    files.open()
    files.put(1)
    until(lambda: list(tmp_path.glob("*.jsonl")))

    def measured_in(after_s: float) -> list[int]:
        now[0], wall_s[0] = now[0] + after_s, wall_s[0] + after_s
        for _ in range(2):  # once it looks again, what it looked at before is gone
            before, now[0] = looks[0], now[0] + 1.0
            until(lambda: looks[0] > before)  # noqa: B023
        return numbers(tmp_path)

    wall_s[0] += 4e7
    assert measured_in(20.0) == [1]
    wall_s[0] -= 4e7
    assert measured_in(20.0) == [1]
    wall_s[0] += 4e7
    assert measured_in(20.0) == [1]
    assert measured_in(86_000.0) == [1]
    assert measured_in(400.0) == []
    files.close()


@pytest.mark.parametrize("how", ["removed", "moved", "replaced", "with its folder"])
def test_where_the_open_file_is_taken_away_another_begins(tmp_path: Path, how: str) -> None:
    """It has what follows, and sorts after the one that is gone, also if the clock goes back."""
    folder, wall_s = tmp_path / "a" / "b", [time.time()]
    files = Segments(folder, Bounds(), numbered, time.monotonic, lambda: wall_s[0])
    files.open()
    for n in range(3):
        files.put(n)
    until(lambda: files.written == 3)
    (gone,) = folder.glob("*.open")
    wall_s[0] -= 3600.0
    if how == "moved":
        gone.rename(tmp_path / "kept")
    elif how == "replaced":
        gone.unlink()
        gone.write_bytes(b"")
    elif how == "removed":
        gone.unlink()
    else:
        shutil.rmtree(tmp_path / "a")
    for n in range(3, 6):
        files.put(n)
    until(lambda: files.written == 6)
    files.close()
    assert numbers(tmp_path) == [3, 4, 5]
    (whole,) = folder.glob("*.jsonl")
    assert whole.name > gone.name
    assert (files.lost, files.trouble) == (0 if how == "moved" else 3, "")


def test_records_that_a_full_disk_refused_are_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a write that a full disk cut short nothing stays, and the same lines are written later."""
    real, full = os.write, [False]

    def write(fd: int, data: Any) -> int:
        if full[0] and len(data) > 3:
            return real(fd, data[:3])
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(segments.os, "write", write)
    files = Segments(tmp_path, Bounds(waiting_max=10), numbered, time.monotonic, time.time)
    files.open()
    files.put(100)
    until(lambda: files.written == 1)
    full[0] = True
    for n in range(101, 121):
        files.put(n)
    until(lambda: files.trouble != "")
    assert "No space left" in files.trouble
    assert files.lost == 10
    assert numbers(tmp_path) == [100]
    full[0] = False
    until(lambda: files.written == 11)
    files.close()
    assert numbers(tmp_path) == list(range(100, 111))
    assert files.trouble == ""


def test_a_full_folder_holds_records_back_and_reports_it(tmp_path: Path) -> None:
    files = Segments(tmp_path, Bounds(segment_bytes=20, bytes_max=40, keep_s=0.0), numbered, time.monotonic, time.time)
    unread = True
    files.may_delete = lambda _path: not unread
    files.open()
    for n in range(1000, 1006):
        files.put(n)
        until(lambda: files.written == n - 999)  # noqa: B023
    for n in range(1006, 1012):
        files.put(n)
    until(lambda: "bytes_max" in files.trouble)
    unread = False
    until(lambda: files.written == 12)
    files.close()
    assert files.lost == 0


_WRITER = """
import sys, time
from pathlib import Path
from farhop.accounts.segments import Bounds, Segments
files = Segments(Path(sys.argv[1]), Bounds(segment_bytes=2000), lambda some: [b"%d\\n" % n for n in some],
                 time.monotonic, time.time)
files.open()
print(files.unclean, flush=True)
n = int(sys.argv[2])
while True:
    for _ in range(50):
        files.put(n); n += 1
    print(files.written, flush=True)
    time.sleep(0.01)
"""


def test_after_a_kill_the_segment_has_whole_lines_and_the_next_process_reports_it(tmp_path: Path) -> None:
    base = 0
    for round_ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(base)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            try:
                unclean = int(child.stdout.readline())
                written = 0
                while written < 300:
                    written = int(child.stdout.readline())
            finally:
                child.send_signal(signal.SIGKILL)
        assert unclean == (round_ > 0)
        found = [n for n in numbers(tmp_path) if n >= base]
        assert found == list(range(base, base + len(found)))  # nothing is missing in between
        assert len(found) >= written
        base += 1_000_000


@pytest.mark.parametrize("call", ["open", "fsync", "rename", "close"])
def test_killed_anywhere_in_a_rotation_it_leaves_an_open_file(tmp_path: Path, call: str) -> None:
    """Killed before and after each call to the system that a rotation makes; the next start counts it once."""
    for after in (False, True):
        folder = tmp_path / f"{after}"
        killed = subprocess.run([sys.executable, "-c", _KILLED, str(folder), call, str(after)], timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL
        files = Segments(folder, Bounds(), numbered, time.monotonic, time.time)
        files.open()
        files.close()
        assert files.unclean == 1
        assert numbers(folder) == list(range(50))


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from farhop.accounts.segments import Bounds, Segments
folder, call, after = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
files = Segments(folder, Bounds(segment_bytes=20), lambda some: [b"%d\\n" % n for n in some], time.monotonic, time.time)
files.open()
real = getattr(os, call)
def killed(*args, **more):
    if "rotate" in {frame.f_code.co_name.strip("_") for frame in frames()}:
        if after:
            real(*args, **more)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
def frames():
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
setattr(os, call, killed)
for n in range(50):
    files.put(n)
time.sleep(60)
"""


@pytest.mark.parametrize("rival", ["removed", "faster"])
def test_a_file_that_another_process_takes_for_a_dead_ones_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rival: str
) -> None:
    """Two processes of one name, as in a restart that overlaps: one begins a file while the other one starts."""
    call, before = ("flock", segments.fcntl) if rival == "removed" else ("open", segments.os)
    real, rivals = getattr(before, call), [True]

    def overtaken(*args: Any) -> Any:
        if rivals and (rival == "removed" or args[1] & os.O_EXCL):
            rivals.clear()
            other = Segments(tmp_path, Bounds(), numbered, time.monotonic, time.time)
            if rival == "removed":
                other.recover()
            else:
                args[0].touch()
        return real(*args)

    monkeypatch.setattr(before, call, overtaken)
    files = Segments(tmp_path, Bounds(), numbered, time.monotonic, time.time)
    files.open()
    files.put(1)
    files.close()
    assert (files.written, numbers(tmp_path)) == (1, [1])


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_start_survives_a_file_that_another_process_completes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (tmp_path / f"{1:020d}.jsonl.open").write_bytes(b"1\n")
    of = segments.os if call == "open" else segments.fcntl
    real = getattr(of, call)

    def completed(*args: Any) -> Any:
        for path in tmp_path.glob(f"{1:020d}.jsonl.open"):
            path.rename(segments.whole_of(path))
        return real(*args)

    monkeypatch.setattr(of, call, completed)
    files = Segments(tmp_path, Bounds(), numbered, time.monotonic, time.time)
    files.open()
    files.close()
    assert (files.unclean, numbers(tmp_path)) == (0, [1])


def test_a_file_that_is_completed_while_others_are_read_is_read_once(tmp_path: Path) -> None:
    for n, kind in ((1, segments.WHOLE), (2, segments.OPEN)):
        (tmp_path / f"{n:020d}{kind}").write_bytes(b"%d\n" % n)
    lines = read(tmp_path)
    found = [next(lines)[1]]
    (tmp_path / f"{2:020d}.jsonl.open").rename(tmp_path / f"{2:020d}.jsonl")
    assert [*found, *(line for _, line in lines)] == [b"1\n", b"2\n"]


@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"") + b"\n"), max_size=20), st.integers(0, 200))
@settings(max_examples=30)
def test_a_segment_cut_anywhere_keeps_its_whole_lines(tmp_path_factory: Any, lines: list[bytes], cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    data = b"".join(lines)[:cut]
    (folder / f"{1:020d}.jsonl.open").write_bytes(data)
    files = Segments(folder, Bounds(), numbered, time.monotonic, time.time)
    files.recover()
    assert b"".join(line for _, line in read(folder)) == data[: data.rfind(b"\n") + 1]
    assert files.unclean == 1
