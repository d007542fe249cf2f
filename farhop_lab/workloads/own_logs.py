"""A user's own request log, whatever the names of its fields, as rows of a `log` trace.

A field is found by the names that gateways, SDKs, OpenTelemetry and published traces use (NAMES), or by the path that
the user gives. Never guesses a value: a missing field is an error that names it, except fields that a row can do
without. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from math import isfinite, nan
from typing import Any

import msgspec

from farhop_lab.workloads.traces import Blocks, LogRow

NAMES: Mapping[str, tuple[str, ...]] = {
    "at_s": (
        "at_s", "timestamp", "@timestamp", "time", "ts", "created", "created_at", "start_time", "startTime",
        "TIMESTAMP", "Timestamp", "startTimeUnixNano", "started_at", "request_created_at",
    ),
    "at_ms": ("at_ms", "timestamp_ms"),
    "new_tokens": (),
    "input_tokens": (
        "input_tokens", "prompt_tokens", "usage.prompt_tokens", "usage.input_tokens", "request_tokens", "inputTokens",
        "promptTokens", "usage.input", "usageDetails.input", "usage_details.input", "ContextTokens", "Request tokens",
        "input_length", "tokens_prompt", "gen_ai.usage.input_tokens", "attributes.gen_ai.usage.input_tokens",
        "gen_ai.usage.prompt_tokens", "attributes.gen_ai.usage.prompt_tokens",  # vLLM's, and older ones
    ),
    "output_tokens": (
        "output_tokens", "completion_tokens", "usage.completion_tokens", "usage.output_tokens", "response_tokens",
        "outputTokens", "completionTokens", "usage.output", "usageDetails.output", "usage_details.output",
        "GeneratedTokens", "Response tokens", "output_length", "tokens_completion", "gen_ai.usage.output_tokens",
        "attributes.gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens", "attributes.gen_ai.usage.completion_tokens",  # vLLM's, and older ones
    ),
    "session": (
        "session", "session_id", "conversation_id", "chat_id", "thread_id", "sessionId", "Session ID",
        "gen_ai.conversation.id", "attributes.gen_ai.conversation.id",
    ),
    "region": ("region",),
    "tools": ("tools", "request.tools"),
    "duration_s": ("duration_s", "latency_s", "Elapsed time"),
    "duration_ms": ("duration_ms", "latency_ms", "request_duration_ms", "delay_ms", "generation_time_ms"),
    "end": ("end", "end_time", "endTime", "endTimeUnixNano"),
    "pause_s": ("pause_s",),
    "pause_ms": ("pause_ms",),
    "hash_ids": ("hash_ids",),
}  # fmt: skip
"""Names of each field; a dot leads into an object. The first that is present counts, but none that was given for
another field. `at_ms` is in milliseconds from any zero; `at_s` and `end` in any unit that `_moment` tells apart.
`new_tokens`, if given, are those that a turn adds to its session, instead of all `input_tokens`.
"""
MOONCAKE_SESSIONS: Mapping[str, str] = {"at_ms": "timestamp", "pause_ms": "delay"}
"""Fields of AIPerf's and Dynamo's form of Mooncake's traces, where they are not what their names say elsewhere."""
_OF_MOONCAKE = frozenset(("session_id", "input_length", "output_length"))
_USAGE_TYPE = "farhop.request"
# Farhop's usage records are of the end of a request.
_USAGE = {
    "end": "time", "duration_ms": "data.duration_ms", "input_tokens": "data.input_tokens",
    "output_tokens": "data.output_tokens", "region": "data.entry_region",
}  # fmt: skip
_BEFORE = "parent_chat_id"
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")  # Anthropic's: not part of its input_tokens
_SHOWN, _SHOWN_CHARS = 4, 100
_OF_PROXIES = "%d/%b/%Y:%H:%M:%S %z"  # nginx's $time_local, Apache's %t
# Seconds since 1970 stay below the first bound for 3,000 years; larger numbers are in finer units.
_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (1e20, 1e9))


class FieldError(ValueError):
    """A line that cannot be a row: the text names the field and what was expected."""


def is_mooncake_session(line: Mapping[str, Any]) -> bool:
    """Whether it is of a trace with MOONCAKE_SESSIONS: other logs with these lengths have no blocks and no delays."""
    return line.keys() >= _OF_MOONCAKE and ("hash_ids" in line or "delay" in line)


def row_of(line: Mapping[str, Any], fields: Mapping[str, str], block_tokens: int = 0) -> tuple[LogRow, float | None]:
    """A log's line as a row, its time in seconds since 1970 or its own zero (nan: it only follows its session's line
    before, by its pause), and how long its answer took in seconds, if known. `fields` maps our names to paths;
    `block_tokens` is the length of each block of `hash_ids`. Raises FieldError.
    """
    fields = {**_USAGE, **fields} if line.get("type") == _USAGE_TYPE else fields
    given = frozenset(fields.values())
    found = {name: _found(line, _names(name, fields, given)) for name in NAMES}
    took_s = _took_s(found)
    session, pause_s = _name("session", found["session"]), _pause_s(found)
    has_time = found["at_s"] is not None or found["at_ms"] is not None
    is_by_its_end = not has_time and found["end"] is not None and took_s is not None
    if not (has_time or is_by_its_end or (session and pause_s is not None)):
        raise FieldError(_missing("at_s", line, fields))
    all_or_new = "new_tokens" if "new_tokens" in fields else "input_tokens"
    for name in (all_or_new, "output_tokens"):
        if found[name] is None:
            raise FieldError(_missing(name, line, fields))
    in_ms = found["at_ms"] is not None and ("at_ms" in fields or found["at_s"] is None)
    if is_by_its_end:  # as proxies log a request: when it is over
        at_s = _moment("end", found["end"]) - (took_s or 0.0)
    elif has_time:
        at_s = _number("at_ms", found["at_ms"]) / 1e3 if in_ms else _moment("at_s", found["at_s"])
    else:
        at_s = nan
    input_tokens = _tokens(all_or_new, found[all_or_new])
    if all_or_new not in fields:
        input_tokens += _beside(line)
    row = LogRow(
        at_s=at_s,
        input_tokens=input_tokens,
        output_tokens=_tokens("output_tokens", found["output_tokens"]),
        session=session,
        region=_name("region", found["region"]),
        pause_s=pause_s,
        blocks=_of_hashes(found["hash_ids"], block_tokens, input_tokens) or _blocks(line.get("blocks")),
        tools=_flag(found["tools"]),
    )
    if took_s is None and found["end"] is not None and has_time:
        took_s = _long_enough(_moment("end", found["end"]) - at_s)
    return row, took_s


def before(line: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """The request that this one goes on from, by its `session`: Qwen's traces have one of its own for each request."""
    return "" if "session" in fields else _name(_BEFORE, line.get(_BEFORE))


def spans_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The spans of a line that OpenTelemetry's collector exported; None for any other line. Raises FieldError."""
    if "resourceSpans" not in line:
        return None
    try:
        return msgspec.convert(line, _Export).spans()
    except msgspec.ValidationError as error:
        raise FieldError(f"resourceSpans: {error}; an export of OpenTelemetry's collector is expected") from None


class _Scope(msgspec.Struct):
    spans: list[dict[str, Any]] = []


class _Resource(msgspec.Struct):
    scope_spans: list[_Scope] = msgspec.field(name="scopeSpans", default_factory=list)


class _Export(msgspec.Struct):
    resource_spans: list[_Resource] = msgspec.field(name="resourceSpans")

    def spans(self) -> list[Mapping[str, Any]]:
        return [span for resource in self.resource_spans for scope in resource.scope_spans for span in scope.spans]


def _missing(name: str, line: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    names = NAMES[name]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    looked = fields.get(name) or f"{', '.join(names[:_SHOWN])}{more}"
    there = ", ".join(map(str, line))[:_SHOWN_CHARS] or "nothing"
    return f"no {name} (looked for {looked}; there is {there}); say where it is by --field {name}=PATH"


def _names(name: str, fields: Mapping[str, str], given: frozenset[str]) -> tuple[str, ...]:
    """Where a field is looked for. What was given for one is no other's: a `time` may be that of the end."""
    if name in fields:
        return (fields[name],)
    names = NAMES[name]
    return names if given.isdisjoint(names) else tuple(one for one in names if one not in given)


def _took_s(found: Mapping[str, Any]) -> float | None:
    """How long the answer took, if it says so."""
    if found["duration_s"] is not None:
        return _long_enough(_number("duration_s", found["duration_s"]))
    if found["duration_ms"] is not None:
        return _long_enough(_number("duration_ms", found["duration_ms"]) / 1e3)
    return None


def _pause_s(found: Mapping[str, Any]) -> float | None:
    """How long after its session's previous answer it came, if it says so."""
    if found["pause_s"] is not None:
        return max(0.0, _number("pause_s", found["pause_s"]))
    if found["pause_ms"] is not None:
        return max(0.0, _number("pause_ms", found["pause_ms"]) / 1e3)
    return None


def _long_enough(took_s: float) -> float:
    if took_s < 0.0:
        raise FieldError(f"an answer that took {took_s:g} s; 0 or more is expected")
    return took_s


def _beside(line: Mapping[str, Any]) -> int:
    """Prompt tokens that Anthropic counts beside `input_tokens`: those read from its cache, and those written there."""
    usage = line.get("usage", line)
    if not isinstance(usage, Mapping) or "input_tokens" not in usage or "prompt_tokens" in usage:
        return 0
    return sum(_tokens(name, usage[name]) for name in _CACHED if usage.get(name) is not None)


def _found(line: Mapping[str, Any], paths: tuple[str, ...]) -> Any:
    for path in paths:
        value = _at(line, path)
        if value is not None:
            return value
    return None


def _at(value: Any, path: str) -> Any:
    """The value at a path. Names may contain dots, and be those of OpenTelemetry's lists of attributes."""
    if isinstance(value, list):
        return next((_attribute(one) for one in value if isinstance(one, dict) and one.get("key") == path), None)
    if not isinstance(value, dict):
        return None
    found = value.get(path)
    at = path.find(".")
    while found is None and at > 0:
        if path[:at] in value:
            found = _at(value[path[:at]], path[at + 1 :])
        at = path.find(".", at + 1)
    return found


def _attribute(one: Mapping[str, Any]) -> Any:
    value = one.get("value")
    return next(iter(value.values()), None) if isinstance(value, dict) else value


def _moment(name: str, value: Any) -> float:
    """Seconds: a number is in s, ms, µs or ns, by its size; a text is a number, ISO 8601 (UTC unless it names a zone),
    or a time as nginx and Apache write it. A number comes first: milliseconds such as "1712010112345" are also a moment
    of 1712 in ISO 8601.
    """
    number = _finite(value)
    if number is not None:
        for below, per_s in _UNITS:
            if abs(number) < below:
                return number / per_s
    elif isinstance(value, str):
        text = value.strip()
        with suppress(ValueError):
            moment = datetime.fromisoformat(text.removesuffix(" UTC"))
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        with suppress(ValueError):
            return datetime.strptime(text.strip("[]"), _OF_PROXIES).timestamp()
    raise FieldError(f"{name}: {str(value)[:40]!r} is no moment; seconds, milliseconds or ISO 8601 are expected")


def _number(name: str, value: Any) -> float:
    number = _finite(value)
    if number is None:
        raise FieldError(f"{name}: {str(value)[:40]!r} is no number")
    return number


def _finite(value: Any) -> float | None:
    try:
        number = float(value) if not isinstance(value, bool) else nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


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


def _of_hashes(value: Any, block_tokens: int, input_tokens: int) -> Blocks:
    """Blocks of equal length, the last of which the prompt's end may cut."""
    if value is None or not block_tokens:
        return ()
    try:
        names = msgspec.convert(value, tuple[int | str, ...])
    except msgspec.ValidationError as error:
        raise FieldError(f"hash_ids: {error}; a list of blocks' names is expected") from None
    if not (len(names) - 1) * block_tokens < max(1, input_tokens):
        fits = f"{len(names)} blocks of {block_tokens} tokens are more than a prompt of {input_tokens}"
        raise FieldError(f"hash_ids: {fits}; give their length by --block-tokens")
    ends = [min(input_tokens, (n + 1) * block_tokens) for n in range(len(names))]
    return tuple((str(name), end - n * block_tokens) for n, (name, end) in enumerate(zip(names, ends, strict=True)))


def _flag(value: Any) -> bool:
    """Also of a text, as in CSV."""
    return value.strip().lower() not in ("", "0", "false", "no") if isinstance(value, str) else bool(value)


def _name(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():  # a column of numbers that lacks some, as pandas writes it
        value = int(value)
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)[:256]
    raise FieldError(f"{name}: a text is expected")
