"""Numbers and booleans in other forms than an API defines, read as engines read them.

vLLM, SGLang and other engines that check bodies with pydantic accept `"6"`, 6.0 and true as an integer, and 1, "on" or
"false" as a boolean: they are read here by pydantic itself. Stricter engines (llama.cpp's numbers may have a fraction,
and its booleans are never numbers) refuse by themselves what they do not accept: the body is sent on as it came. Never
changes what is sent on, and never guesses: what pydantic does not accept is neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNTS = frozenset(("max_tokens", "max_completion_tokens", "max_output_tokens"))
_TRUTHS = frozenset(("stream", "store", "background"))
_OPTIONS, _OPTION = "stream_options", "include_usage"
_LOOKED_AT = _COUNTS | _TRUTHS | {_OPTIONS}

_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


T = TypeVar("T", int, bool)


def as_read(body: bytes) -> bytes | None:
    """The body with numbers and booleans written as its API has them; None if they are already, or cannot be
    converted.
    """
    try:
        return _as_read(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # it is no object, or a number beyond all numbers is in it: its reader says so


def _as_read(body: bytes) -> bytes | None:
    document = _raw(body)
    found = {name: document[name] for name in _LOOKED_AT & document.keys()}
    for name, value in found.items():
        document[name] = msgspec.Raw(
            _option(bytes(value)) if name == _OPTIONS else _read(truth if name in _TRUTHS else count, bytes(value))
        )
    if all(bytes(document[name]) == bytes(value) for name, value in found.items()):
        return None
    return msgspec.json.encode(document)


def _read(reader: Callable[[Any], int | None], value: bytes) -> bytes:
    read = reader(msgspec.json.decode(value))
    return value if read is None else msgspec.json.encode(read)


def _option(value: bytes) -> bytes:
    if value[:1] != b"{":
        return value
    options = _raw(value)
    if (given := options.get(_OPTION)) is not None:
        options[_OPTION] = msgspec.Raw(_read(truth, bytes(given)))
    return msgspec.json.encode(options)


def count(value: Any) -> int | None:
    """A whole number; None if the value is not one."""
    if value is None or type(value) is int:
        return value
    return _taken(int, value)


def truth(value: Any) -> bool | None:
    """The value as a boolean; None if it is not one."""
    if isinstance(value, bool) or value is None:
        return value
    return _taken(bool, value)


def _taken(kind: type[T], value: Any) -> T | None:
    from pydantic import TypeAdapter, ValidationError  # hardly ever needed, and not light

    adapter = _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))
    try:
        taken: T = adapter.validate_python(value)
    except ValidationError:
        return None
    return taken


_ADAPTERS: dict[Any, Any] = {}
