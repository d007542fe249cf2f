"""JSON lines on stderr, one per event, with trace ids where there are any.

Libraries' own logs come out in the same form. Invariants: a field named for content or a credential is withheld, a long
text is cut, and a fault that repeats takes one line a period.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
import structlog

from farhop.telemetry.attributes import names_content

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor

LEVELS = ("debug", "info", "warning", "error", "critical")
TEXT_CHARS_MAX = 2048
FAULTS_MAX = 256
WITHHELD = "[withheld]"

# structlog takes the word `logger` for itself, so the name travels under another until it is printed.
_NAME = "_name"
# Chatty at INFO about every request they serve or make.
QUIET = ("aiohttp.access", "urllib3", "grpc")


class LogError(ValueError):
    """A log setting that cannot be used, said in one line."""


def configure(tier: str, region: str, instance: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Log as this balancer from now on; every line carries tier, region and instance. Raises LogError on a bad level.

    `stream` is stderr unless a test gives another.
    """
    threshold = _threshold(level)
    place = {"tier": tier, "region": region, "instance": instance}

    def placed(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        name = event.pop(_NAME, None)
        return {**place, **({} if name is None else {"logger": name}), **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        placed,
        structlog.processors.format_exc_info,
        guarded,
    ]
    out = stream if stream is not None else sys.stderr
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(serializer=_json)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    _adopt_libraries(shared, out, max(threshold, logging.WARNING))


def set_level(level: str) -> None:
    """Log from this level up from now on, as configured otherwise. Raises LogError on a bad level."""
    threshold = _threshold(level)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(threshold))
    logging.getLogger().setLevel(max(threshold, logging.WARNING))


def _threshold(level: str) -> int:
    if level.lower() not in LEVELS:
        raise LogError(f"log level {level!r} is unknown; use one of {', '.join(LEVELS)}")
    return logging.getLevelNamesMapping()[level.upper()]


def get(name: str) -> FilteringBoundLogger:
    """A logger whose lines have `logger: name`. Use fixed texts for events, and fields for what varies."""
    log: FilteringBoundLogger = structlog.get_logger(**{_NAME: name})
    return log


def guarded(_logger: object, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """A structlog processor: withholds what is named for content or a credential, cuts texts to 2,048 characters."""
    return {name: WITHHELD if names_content(name) else _short(value) for name, value in event.items()}


def _short(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
        return f"{value[:TEXT_CHARS_MAX]}… ({len(value)} characters)"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    return value


def _json(event: Mapping[str, Any], **_ignored: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def _adopt_libraries(shared: list[Processor], out: TextIO, threshold: int) -> None:
    """Send the standard library's logging (OpenTelemetry, aiohttp, grpc, asyncio) the same way, from warnings up."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(serializer=_json),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class Throttled:
    """Logs a fault at once, then at most once every `every_s`, with how often it came since. `clock` is monotonic.

    Faults are distinguished by event and `key`; past 256 of them the one quiet for longest is forgotten. A fault that
    stops in between leaves its last count unsaid until `flush`, which a tier calls from its periodic work.
    """

    __slots__ = ("_clock", "_every_s", "_log", "faults")

    def __init__(self, log: FilteringBoundLogger, every_s: float, clock: Callable[[], float]) -> None:
        if not every_s > 0:
            raise LogError(f"every_s is {every_s}; give a period above zero, in seconds")
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self.faults: dict[tuple[str, str], _Fault] = {}

    def warning(self, event: str, key: str = "", **fields: object) -> None:
        """Log the fault, or count it if it was logged lately."""
        self._throttle("warning", event, key, fields)

    def error(self, event: str, key: str = "", **fields: object) -> None:
        """As `warning`, at level error."""
        self._throttle("error", event, key, fields)

    def flush(self) -> None:
        """Log the counts whose period is over, and forget faults that no longer occur."""
        now = self._clock()
        for at, fault in list(self.faults.items()):
            if now - fault.logged_at >= self._every_s:
                del self.faults[at]
                if fault.suppressed:
                    self._emit(fault, at[0])

    def _throttle(self, level: str, event: str, key: str, fields: dict[str, object]) -> None:
        now = self._clock()
        at = (event, key)
        fault = self.faults.pop(at, None)
        if fault is None:
            if len(self.faults) >= FAULTS_MAX:
                quietest = next(iter(self.faults))
                forgotten = self.faults.pop(quietest)
                if forgotten.suppressed:
                    self._emit(forgotten, quietest[0])
            fault = _Fault(level, now - self._every_s, 0, fields)
        fault.suppressed += 1
        fault.fields = fields
        self.faults[at] = fault  # last in the dict: the first is the one quiet for longest
        if now - fault.logged_at >= self._every_s:
            self._emit(fault, event)
            fault.logged_at = now

    def _emit(self, fault: _Fault, event: str) -> None:
        times = {"times": fault.suppressed} if fault.suppressed > 1 else {}
        fault.suppressed = 0
        getattr(self._log, fault.level)(event, **fault.fields, **times)


class _Fault(msgspec.Struct):
    level: str
    logged_at: float
    suppressed: int
    fields: dict[str, object]
