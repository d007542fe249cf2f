"""A user's own request log, whatever the names of its fields, as rows of a `log` trace.

A field is found by the names that gateways and SDKs use (NAMES), or by the path that the user gives. Never guesses a
value: a missing field is an error that names it, except fields that a row can do without. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import msgspec

from farhop_lab.workloads.traces import Blocks, LogRow

NAMES: Mapping[str, tuple[str, ...]] = {
    "at_s": ("at_s", "timestamp", "@timestamp", "time", "ts", "created", "created_at", "start_time", "startTime"),
    "input_tokens": (
        "input_tokens", "prompt_tokens", "usage.prompt_tokens", "usage.input_tokens", "request_tokens", "inputTokens",
    ),
    "output_tokens": (
        "output_tokens", "completion_tokens", "usage.completion_tokens", "usage.output_tokens", "response_tokens",
        "outputTokens",
    ),
    "session": ("session", "session_id", "conversation_id", "chat_id", "thread_id", "sessionId"),
    "region": ("region",),
    "tools": ("tools", "request.tools"),
    "duration_s": ("duration_s", "latency_s"),
    "duration_ms": ("duration_ms", "latency_ms"),
}  # fmt: skip
"""Names of each field; a dot leads into an object. The first that is present counts."""
NEEDED = ("at_s", "input_tokens", "output_tokens")
# Seconds since 1970 stay below the first bound for 3,000 years; larger numbers are in finer units.
_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (1e20, 1e9))


class FieldError(ValueError):
    """A line that cannot be a row: the text names the field and what was expected."""


def row_of(line: Mapping[str, Any], fields: Mapping[str, str]) -> tuple[LogRow, float | None]:
    """A log's line as a row, its time in seconds since 1970 or its own zero, and how long its answer took in seconds,
    if known. `fields` maps our names to paths. Raises FieldError.
    """
    found = {name: _found(line, (fields[name],) if name in fields else names) for name, names in NAMES.items()}
    for name in NEEDED:
        if found[name] is None:
            looked = fields.get(name) or ", ".join(NAMES[name])
            raise FieldError(f"no {name} (looked for {looked}); say where it is by --field {name}=PATH")
    duration = found["duration_s"]
    scale = 1.0
    if duration is None:
        duration, scale = found["duration_ms"], 1e-3
    row = LogRow(
        at_s=_moment(found["at_s"]),
        input_tokens=_tokens("input_tokens", found["input_tokens"]),
        output_tokens=_tokens("output_tokens", found["output_tokens"]),
        session=_name("session", found["session"]),
        region=_name("region", found["region"]),
        pause_s=None if line.get("pause_s") is None else max(0.0, _number("pause_s", line["pause_s"])),
        blocks=_blocks(line.get("blocks")),
        tools=bool(found["tools"]),
    )
    return row, None if duration is None else _number("duration", duration) * scale


def _found(line: Mapping[str, Any], paths: tuple[str, ...]) -> Any:
    for path in paths:
        value: Any = line.get(path)
        if value is None and "." in path:
            value = line
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _moment(value: Any) -> float:
    """Seconds: a number is in s, ms, µs or ns, by its size; a text is ISO 8601 (UTC unless it names a zone)."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            pass
        else:
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    number = _number("at_s", value)
    for below, per_s in _UNITS:
        if abs(number) < below:
            return number / per_s
    raise FieldError(f"at_s: {str(value)[:40]} is no moment; give seconds, milliseconds or ISO 8601")


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number):
        raise FieldError(f"{name}: {str(value)[:40]!r} is no number")
    return number


def _tokens(name: str, value: Any) -> int:
    number = _number(name, value)
    if number < 0 or number != int(number):
        raise FieldError(f"{name}: {number:g} is no count of tokens; a whole number of 0 or more is expected")
    return int(number)


def _blocks(value: Any) -> Blocks:
    """As written by `farhop record`."""
    try:
        return msgspec.convert(value or (), Blocks)
    except msgspec.ValidationError as error:
        raise FieldError(f"blocks: {error}; a list of names and lengths in tokens is expected") from None


def _name(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)[:256]
    raise FieldError(f"{name}: a text is expected")
