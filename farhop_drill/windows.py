"""When a drill may begin: windows by weekday and time of day, in UTC, and which runs of a schedule are due or missed.

Pure: a moment is (weekday 0..6 from Monday, minutes of the day) or seconds of the epoch. A window does not pass
midnight. Never decides whether the fleet is fit: checks do.
"""

from __future__ import annotations

import re

import msgspec

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_S = 86_400
_WINDOW = re.compile(r"([a-z]{3})(?:-([a-z]{3}))? +(\d{2}):(\d{2})-(\d{2}):(\d{2})")
_EPOCH_WEEKDAY = 3  # 1970-01-01 was a Thursday
LOOK_BACK_DAYS = 62


class WindowError(ValueError):
    """A window that cannot be read; the text says how one is written."""


class Window(msgspec.Struct, frozen=True):
    """On these weekdays, from one minute of the day on, until another (exclusive)."""

    days: tuple[int, ...]
    from_min: int
    to_min: int

    def holds(self, epoch_s: float) -> bool:
        """Whether a moment is within."""
        day, rest = divmod(int(epoch_s), DAY_S)
        return (day + _EPOCH_WEEKDAY) % 7 in self.days and self.from_min <= rest // 60 < self.to_min


def window_of(text: str) -> Window:
    """`mon-fri 09:00-17:00` or `tue 10:00-12:00`, UTC. Raises WindowError."""
    match = _WINDOW.fullmatch(text.strip().lower())
    if match is None or not {match[1], match[2] or match[1]} <= set(DAYS):
        raise WindowError(f"{text[:40]!r} is no window; give one such as 'mon-fri 09:00-17:00' (UTC)")
    first, last = DAYS.index(match[1]), DAYS.index(match[2] or match[1])
    begin, end = int(match[3]) * 60 + int(match[4]), int(match[5]) * 60 + int(match[6])
    if not (int(match[4]) < 60 and int(match[6]) < 60 and begin < end <= 24 * 60):
        raise WindowError(f"{text[:40]!r}: must end later on the same day than it begins")
    return Window(tuple((first + n) % 7 for n in range((last - first) % 7 + 1)), begin, end)


def is_open(windows: list[Window], epoch_s: float) -> bool:
    """Whether a drill may begin now; without windows it always may."""
    return not windows or any(window.holds(epoch_s) for window in windows)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A drill on a schedule: in one of its windows, `every_s` after the run before. `since_s`: when it was put there.
    `values` are its parameters."""

    drill: str
    windows: tuple[str, ...]
    every_s: float
    since_s: float
    values: dict[str, str] = {}
    author: str = ""


class Due(msgspec.Struct, frozen=True):
    """Whether it is to run now, and in which windows (their beginnings, epoch seconds) it should have run."""

    now: bool
    missed: tuple[int, ...] = ()


def due(planned: Planned, last_s: float | None, now_s: float) -> Due:
    """By the run before (its beginning; None: none yet). A window is missed if a run was due in it and it closed.

    Missed windows are reported and not made up for: two drills in a row teach no more than one. Looks back two
    months."""
    windows = [window_of(text) for text in planned.windows]
    next_s = planned.since_s if last_s is None else last_s + planned.every_s
    if next_s > now_s:
        return Due(False)
    missed: list[int] = []
    day = max(int(next_s) // DAY_S, int(now_s) // DAY_S - LOOK_BACK_DAYS)
    while day <= int(now_s) // DAY_S:
        for window in windows:
            begins, ends = day * DAY_S + window.from_min * 60, day * DAY_S + window.to_min * 60
            began = last_s is not None and begins <= last_s  # a window has one run
            if window.holds(begins) and not began and next_s < ends <= now_s:
                missed.append(begins)
                next_s = begins + planned.every_s
        day += 1
    return Due(now_s >= next_s and is_open(windows, now_s), tuple(missed))
