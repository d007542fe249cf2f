"""What every configuration class is made of: YAML into a checked model, every error at once with its path.

Each package owns the class of what can be configured there, made of `Part`; `app/config` of a tier assembles. A secret
is written in a file as `env:NAME` or `file:PATH`, never as itself, and no message repeats a value: it may be a secret.
A configuration that is only inspected, not on its own host, is read without the secrets that are absent (`load`). Never
knows what is configured, and never reads anything but what it is given.
"""

from __future__ import annotations

import difflib
import os
import re
from datetime import date
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pydantic_core import ErrorDetails

DAY_S = 86_400.0  # no wait is longer; the hop token says so, too


class ConfigError(Exception):
    """A configuration that cannot be used. `problems` are lines `path: what is wrong`."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
        self.problems = problems


ABSENT = "absent-and-not-looked-at"  # in place of a secret that need not be here; long enough for a key


def is_absent(value: SecretStr | str) -> bool:
    """Whether a value is the placeholder of a secret that is not available here."""
    return (value.get_secret_value() if isinstance(value, SecretStr) else value) == ABSENT


def left_out(info: ValidationInfo, what: str) -> bool:
    """Whether `load` was told to accept things that are not available here; if so, this one is noted."""
    if not isinstance(info.context, list):
        return False
    if what not in info.context:
        info.context.append(what)
    return True


def _resolve(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        return value
    how, _, reference = value.partition(":")
    if how == "env":
        found = os.environ.get(reference, "").strip()
        if not found:
            if left_out(info, f"environment variable {reference} is not set"):
                return ABSENT
            raise ValueError(f"environment variable {reference} is not set; set it, or name another")
        return found
    if how == "file":
        try:
            found = Path(reference).read_text("utf-8-sig").strip()  # some editors write a mark before it
        except OSError as error:
            if left_out(info, f"{reference}: {error.strerror}"):
                return ABSENT
            where = "" if Path(reference).is_absolute() else " from the folder in which the process starts"
            raise ValueError(
                f"cannot read {reference}: {error.strerror}; check the path{where} and its permissions"
            ) from None
        except ValueError:  # not UTF-8, whose error would quote it; or a NUL in the path
            raise ValueError("cannot read the secret: its file must be UTF-8 text") from None
        if not found:
            raise ValueError(f"the file {reference} is empty; put the secret into it")
        return found
    raise ValueError("a secret is given as env:NAME or file:PATH, never in the clear")


def _resolve_public(value: Any, info: ValidationInfo) -> Any:
    """Resolve a value that is not a secret, and may therefore be given literally."""
    known = isinstance(value, str) and value.startswith(("env:", "file:"))
    return _resolve(value, info) if known else value


Secret = Annotated[SecretStr, BeforeValidator(_resolve)]
PublicKey = Annotated[str, BeforeValidator(_resolve_public)]
# What differs between processes that share a file, such as the pods of a Deployment: itself, env:NAME or file:PATH.
FromOutside = BeforeValidator(_resolve_public)
Seconds = Annotated[float, Field(gt=0, le=DAY_S)]
Bytes = Annotated[int, Field(ge=1, le=1 << 40)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
Model = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]  # its name


_R = TypeVar("_R", bound="Callable[[Any], Iterable[str] | None]")
_RULES = "_farhop_rule"


def rule(method: _R) -> _R:
    """Mark a method of a Part as one that compares several of its fields. It yields `field: what is wrong, and the
    remedy` for each fault, or raises a ValueError for the only one. Where others find faults, too, all are told."""
    setattr(method, _RULES, True)
    return method


@cache
def _rules(kind: type) -> tuple[str, ...]:
    """The names of its rules, those of its bases first."""
    names = (name for base in reversed(kind.__mro__) for name, one in vars(base).items() if hasattr(one, _RULES))
    return tuple(dict.fromkeys(names))


class Part(BaseModel):
    """A part of a configuration: unknown fields are errors, values do not change. See `rule`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Fields that are not its own and indicate another kind of file: its name, as messages use it.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="after")
    def _by_its_rules(self) -> Self:
        faults: list[str] = []
        for name in _rules(type(self)):
            try:
                faults += getattr(self, name)() or ()
            except ValueError as error:
                faults.append(str(error))
        if not faults:
            return self
        each = [
            InitErrorDetails(type=PydanticCustomError("value_error", "{fault}", {"fault": fault}), loc=(), input=None)
            for fault in dict.fromkeys(faults)
        ]
        raise ValidationError.from_exception_data(type(self).__name__, each)


_P = TypeVar("_P", bound=BaseModel)


def redacted(config: BaseModel) -> dict[str, Any]:
    """A configuration as JSON-ready data, for operators: of each secret that there is one."""
    document: dict[str, Any] = config.model_dump(mode="json")
    return document


def load(kind: type[_P], path: Path, absent: list[str] | None = None) -> _P:
    """Read and check a configuration file. Raises ConfigError with every problem.

    With `absent` it is only looked at: a secret, key or certificate that is not here is noted there and no fault. A
    process is never made of what was read so.
    """
    document = _read(path)
    if not isinstance(document, dict):
        raise ConfigError(str(path), ["must be a mapping of fields; see docs/reference/configuration.md"])
    try:
        config = kind.model_validate(document, context=absent)
    except ValidationError as error:
        raise ConfigError(str(path), problems_of(error, kind=kind)) from None
    if problems := [_line(where, _FLAG) for where in _flags(document, config)]:
        raise ConfigError(str(path), problems)
    return config


_FLAG = "is yes or no (true or false); give a number"


def _flags(given: Any, read: Any, where: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Where a flag was given and a number was read: `yes`, `off` and the like, of which pydantic makes 1 and 0."""
    if isinstance(given, bool):
        if isinstance(read, int | float) and not isinstance(read, bool):
            yield where
    elif isinstance(given, dict):
        for name, value in given.items():
            known = read.get(name) if isinstance(read, dict) else getattr(read, str(name), None)
            yield from _flags(value, known, (*where, str(name)))
    elif isinstance(given, list) and isinstance(read, list | tuple) and len(given) == len(read):
        for index, value in enumerate(given):
            yield from _flags(value, read[index], (*where, index))


_QUOTED = re.compile(r"'[^']*'")
_TABBED = re.compile(rb" *\t")


class _Strict(yaml.SafeLoader):
    """A YAML loader for which a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, "a key is given twice; keep one", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Any:
    try:
        return parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror or error}"]) from None


def parsed(document: bytes, source: str) -> Any:
    """The content of a YAML or JSON document, unchecked. Raises ConfigError, which names `source`."""
    try:
        return yaml.load(document, Loader=_Strict)  # noqa: S506 - a SafeLoader, stricter
    except yaml.MarkedYAMLError as error:
        # Not the error's own text: that quotes the line, and a line may hold what should have been a secret.
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        problem = f"is not YAML: {position}{_QUOTED.sub('...', error.problem or error.context or 'malformed')}"
        if mark is not None and any(map(_TABBED.match, document.split(b"\n")[mark.line : mark.line + 1])):
            problem += "; indent with spaces, never with tabs"
    except yaml.YAMLError:
        problem = "is not YAML: it holds bytes that are not text; save it as UTF-8"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError:
        problem = "is not YAML: it holds a date or a number that does not exist; quote it"
    raise ConfigError(source, [problem])


_MISSING = "; give it, as docs/reference/configuration.md says"
_UNKNOWN = "unknown field; correct its name (docs/reference/configuration.md), or leave it out"
_NAMES_FIELD = re.compile(r"[a-z_.\[\]0-9]+: ")
_MAPPING = "must be a mapping, a `name: value` for each field"
_LIST = "must be a list, such as [one, two], or a line `- one` for each"
_SHAPES = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type"), _MAPPING),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), _LIST),
}
_NO_NUMBER = ("int_parsing", "float_parsing", "int_type", "float_type")
_UNITS = {"bytes": "bytes (64 MiB is 67108864)", "ms": "milliseconds", "s": "seconds", "days": "days"}
_LIKE = 0.7  # how alike two names are of which one is taken for the other, mistyped


def problems_of(error: ValidationError, at: str = "", kind: type[BaseModel] | None = None) -> list[str]:
    """A line for each thing wrong, with its path below `at`. Never a value: one may be a secret. `kind` is what it was
    to be: then a field's mistyped name is told with the right one."""
    return [f"{at}{_line(e['loc'], _message(e, kind))}" for e in error.errors(include_url=False)]


def _message(found: ErrorDetails, kind: type[BaseModel] | None) -> str:
    if found["type"] == "missing":
        return found["msg"] + _MISSING
    if found["input"] is None and found["type"].endswith("_type"):
        return "is empty; give a value, or leave the line out"
    if found["type"] in _SHAPES:
        return _SHAPES[found["type"]]
    if found["type"] == "string_type" and isinstance(found["input"], bool | int | float | date):
        return f"{found['msg']}; put it in quotes"  # `no`, 1e3 and 2026-12-01 are no text in YAML
    if found["type"] in _NO_NUMBER:
        return found["msg"] + _plain_number(str(found["loc"][-1]) if found["loc"] else "")
    if found["type"] != "extra_forbidden":
        return found["msg"]
    *above, name = found["loc"]
    if not above and isinstance(kind, type) and issubclass(kind, Part) and name in kind.elsewhere:
        return f"unknown field; it is one of {kind.elsewhere[str(name)]}: is this the right file?"
    close = difflib.get_close_matches(str(name)[:64], _fields(kind, above), n=1, cutoff=_LIKE)
    return f'unknown field; did you mean "{close[0]}"?' if close else _UNKNOWN


def _plain_number(name: str) -> str:
    """The remedy for a field that is to be a number: YAML's own, and its unit is that of the field's name."""
    words = name.split("_")
    unit = next((_UNITS[word] for word in words if word in _UNITS and "per" not in words), "")
    return f"; give a number without a unit or quotes{f', in {unit}' if unit else ''}"


def _fields(kind: Any, field_path: Sequence[int | str]) -> list[str]:
    """The names of the fields at a path; empty if they are unknown."""
    for step in (*field_path, None):
        while get_origin(kind) in (Annotated, Union, UnionType):
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if step is None:
                return list(kind.model_fields)
            field = kind.model_fields.get(str(step))
            kind = field.annotation if field is not None else None
        else:
            kind = get_args(kind)[-1] if get_args(kind) and step is not None else None  # of a list or a mapping
    return []


def _line(field_path: tuple[int | str, ...], message: str) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in field_path).lstrip(".")
    message = message.removeprefix("Value error, ")
    if not path and _NAMES_FIELD.match(message):
        return message  # of several fields together: it begins with the one to change
    return f"{path or 'document'}: {message}"
