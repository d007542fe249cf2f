"""A drill as a document: steps, blast radius, hypotheses, abort conditions, a bound. Read whole, every error at once.

Pure. Invariants: a drill that was read has an end, something that ends it early, something that can be measured, and
breaks nothing outside its blast radius. Never guesses: a name that the fleet does not have is an error.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from farhop.loose_json import as_dict, dicts
from farhop_drill.windows import Window, WindowError, window_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DOCUMENT_BYTES_MAX = 64 * 1024
PROBLEMS_MAX = 50
DURATION_MAX_S = 4 * 3600.0
SOAK_MAX_S = 3600.0
CANARIES_MAX = 200_000  # of a run, all of them kept until it is judged

# What a drill can do, and each action's required and optional fields. Traffic: by overrides that end by themselves.
TRAFFIC: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "drain": (("region",), ("share", "over_s")),
    "bias": (("region", "ms"), ()),
    "pin": (("tenant", "region"), ()),
    "drain-entry": (("entry",), ()),
    "refuse": (("region",), ("share", "model")),
    "law-epoch": ((), ()),
}
# Fault: real signals and links, by the process that runs the world.
FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kill-region": (("region",), ()),
    "kill-engines": (("region",), ()),
    "kill-global": (("region",), ()),
    "kill-regional": (("region",), ()),
    "stop-engines": (("region",), ()),
    "slow-engines": (("region", "factor"), ()),
    "freeze-link": (("region", "to"), ()),
    "cut-link": (("region", "to"), ()),
    "stop-etcd": ((), ("hub",)),
}
TAKES_A_REGION_AWAY = frozenset({"kill-region", "kill-engines", "kill-regional", "stop-engines", "drain", "refuse"})
TAKES_A_SHARE = frozenset({"drain", "refuse"})


class Measure(msgspec.Struct, frozen=True):
    """What can be measured: its unit and meaning; `live`: also each second, over the last seconds, for aborts."""

    unit: str
    what: str
    live: bool = False


MEASURES: Mapping[str, Measure] = {
    "canaries": Measure("requests", "canary requests that ended in the drill"),
    "rto_s": Measure("s", "t4 - t0: from the injection until new requests are served again as they should be"),
    "detect_s": Measure("s", "t1 - t0: until a global balancer says that something is wrong there"),
    "decide_s": Measure("s", "t2 - t0: until the first affected request is served elsewhere"),
    "shifted_90_s": Measure("s", "t3 - t0: from when 90 % of the affected requests are served elsewhere"),
    "shifted_99_s": Measure("s", "t3 - t0: the same of 99 %"),
    "restore_s": Measure("s", "from the decision to restore until no injected fault remains"),
    "failback_s": Measure("s", "t5 - t0 of the restoration: until the region serves its own again"),
    "requests_failed": Measure("requests", "that ended without a first byte", live=True),
    "error_share": Measure("share", "of canaries that failed, begun or not", live=True),
    "streams_lost": Measure("streams", "that had begun and did not end whole"),
    "stream_bytes_lost": Measure("bytes", "of answers that should have come and did not"),
    "stream_bytes_doubled": Measure("bytes", "of answers that came and should not have"),
    "residency_violations": Measure("answers", "from a region that the law does not allow", live=True),
    "ttft_before_p99_ms": Measure("ms", "time to the first token before the injection, 99th percentile"),
    "ttft_during_p50_ms": Measure("ms", "the same from the injection to the restoration, median"),
    "ttft_during_p99_ms": Measure("ms", "the same, 99th percentile", live=True),
    "ttft_after_p99_ms": Measure("ms", "the same after the restoration"),
    "elsewhere_share": Measure("share", "of the affected requests that another region served"),
    "spill_usd": Measure("USD", "of egress, what canaries served away from home cost"),
    "survivors_utilisation": Measure("share", "the fullest region outside the blast radius, at its peak", live=True),
    "pilot_light_s": Measure("s", "until every balancer that answers has woken a pilot light that was asleep"),
    "law_followed_s": Measure("s", "until every balancer that answers uses the law's new epoch"),
}

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_PLACEHOLDER = re.compile(r"\{([a-z_]{1,32})\}")

Seconds = Annotated[float, Field(ge=0.0, le=SOAK_MAX_S, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1, max_length=400)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BlastRadius(_Part):
    """What may be touched: regions, tenants ("*": all), and the largest share of a region's new requests."""

    regions: Annotated[list[str], Field(min_length=1, max_length=64)]
    tenants: Annotated[list[str], Field(min_length=1, max_length=256)] = ["*"]
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


class Injection(_Part):
    """One thing done: `do` says what; the rest is what that needs (TRAFFIC, FAULTS)."""

    do: str
    region: str = ""
    to: str = ""
    entry: str = ""
    tenant: str = ""
    hub: str = ""
    model: Annotated[str, Field(max_length=256)] = ""
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    over_s: Annotated[float, Field(ge=0.0, le=600.0)] = 0.0
    ms: Annotated[float, Field(ge=-60_000.0, le=60_000.0)] = 0.0
    factor: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0

    @property
    def target(self) -> str:
        """What it acts on: two of one target replace each other."""
        named = (self.do, self.tenant, self.region, self.to, self.entry, self.hub, self.model)
        return "/".join(part for part in named if part)


class Step(_Part):
    """What is injected, and for how long it stays in place."""

    name: Text
    inject: Annotated[list[Injection], Field(min_length=1, max_length=8)]
    soak_s: Annotated[float, Field(ge=0.5, le=SOAK_MAX_S)]


class Hypothesis(_Part):
    """What should hold: a measure (MEASURES), and its bound."""

    measure: str
    at_most: Annotated[float | None, Field(allow_inf_nan=False)] = None
    at_least: Annotated[float | None, Field(allow_inf_nan=False)] = None
    name: str = ""

    def __str__(self) -> str:
        bounds = (f"{sign} {value:g}" for sign, value in (("<=", self.at_most), (">=", self.at_least))
                  if value is not None)  # fmt: skip
        return self.name or f"{self.measure} {' and '.join(bounds)}"

    def holds(self, value: float) -> bool:
        """Whether a measured value is within the bounds. NaN is not."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most) and not math.isnan(value)


class Abort(_Part):
    """What ends the drill early: a measure over the last seconds that is `above` a bound for `for_s`."""

    measure: str
    above: Annotated[float, Field(allow_inf_nan=False)]
    for_s: Annotated[float, Field(ge=0.0, le=60.0)] = 0.0


class Canaries(_Part):
    """The probe: requests per second over all entries and tenants, and what a good answer is."""

    rate_per_s: Annotated[float, Field(gt=0.0, le=50.0)] = 12.0
    tenants: list[str] = []
    entries: list[str] = []
    model: str = ""
    answer_tokens: Annotated[int, Field(ge=1, le=512)] = 32
    long_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.25
    long_tokens: Annotated[int, Field(ge=1, le=4096)] = 160
    ttft_ms: Annotated[float, Field(gt=0.0, le=60_000.0)] = 1000.0


class Drill(_Part):
    """A drill. `before_s`: how long the steady state is measured; `after_s`: the longest wait for the return. Times in
    seconds; windows in UTC."""

    drill: str
    title: Text
    description: Annotated[str, Field(max_length=4000)] = ""
    kind: Literal["traffic", "fault"]
    blast_radius: BlastRadius
    canaries: Canaries = Canaries()
    before_s: Annotated[float, Field(ge=1.0, le=600.0)] = 5.0
    steps: Annotated[list[Step], Field(min_length=1, max_length=16)]
    after_s: Annotated[float, Field(ge=0.0, le=1800.0)] = 20.0
    hypotheses: Annotated[list[Hypothesis], Field(min_length=1, max_length=32)]
    aborts: Annotated[list[Abort], Field(min_length=1, max_length=32)]
    duration_max_s: Annotated[float, Field(gt=0.0, le=DURATION_MAX_S)]
    windows: Annotated[list[str], Field(max_length=32)] = []
    utilisation_max: Annotated[float, Field(gt=0.0, le=1.0)] = 0.85
    rollback: Literal["always"] = "always"

    @property
    def open_windows(self) -> list[Window]:
        """When it may begin."""
        return [window_of(text) for text in self.windows]

    @property
    def planned_s(self) -> float:
        """What its phases add up to."""
        return self.before_s + sum(step.soak_s for step in self.steps) + self.after_s

    def lost(self) -> frozenset[str]:
        """The regions that some step takes away, whole or in part."""
        return frozenset(one.region for step in self.steps for one in step.inject if one.do in TAKES_A_REGION_AWAY)

    def share_lost(self, region: str) -> float:
        """The largest share of a region that some step takes away."""
        shares = [
            one.share if one.do in TAKES_A_SHARE else 1.0
            for step in self.steps
            for one in step.inject
            if one.do in TAKES_A_REGION_AWAY and one.region == region
        ]
        return max(shares, default=0.0)


class Names(msgspec.Struct, frozen=True):
    """What a fleet has, for names to be checked against. `entries` and `hubs` may be empty."""

    regions: frozenset[str]
    tenants: frozenset[str]
    entries: frozenset[str] = frozenset()
    hubs: frozenset[str] = frozenset()


class DrillError(Exception):
    """A drill that cannot be used; `problems` has all that is wrong with it."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.source, self.problems = source, tuple(problems)[:PROBLEMS_MAX]
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}"
        return f"{self.source}: {len(self.problems)} problems" + "".join(f"\n  {one}" for one in self.problems)


def parsed(text: bytes, source: str) -> dict[str, Any]:
    """The mapping in a YAML (or JSON) document. Raises DrillError."""
    if len(text) > DOCUMENT_BYTES_MAX:
        raise DrillError(source, [f"larger than {DOCUMENT_BYTES_MAX} bytes; is it a drill?"])
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        position = f" at line {mark.line + 1}" if mark is not None else ""
        raise DrillError(source, [f"not YAML{position}"]) from None
    if not isinstance(raw, dict):
        raise DrillError(source, ["a drill is a mapping that begins with `drill: NAME`"])
    return raw


def read(text: bytes, source: str, names: Names | None = None, given: Mapping[str, str] | None = None) -> Drill:
    """The drill in a document, with parameters `given`. With `names` it is checked against a fleet, too. DrillError."""
    raw = parsed(text, source)
    problems: list[str] = []
    filled = _filled(raw, given or {}, problems)
    drill: Drill | None = None
    try:
        drill = Drill.model_validate(filled)
    except ValidationError as error:
        problems += [_line(item["loc"], item["msg"], item["type"]) for item in error.errors(include_url=False)]
    problems += _beyond_shape(filled, names)
    if problems or drill is None:
        raise DrillError(source, problems)
    return drill


# -- parameters


def parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A document's parameters and their defaults."""
    return dict(as_dict(raw.get("parameters")))


def _filled(raw: dict[str, Any], given: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    known = parameters(raw)
    strange = sorted(set(given) - set(known))
    problems += [f"--set {name}: no such parameter; {_there_is(name, known)}" for name in strange]
    values = dict(known)
    for name, text in given.items():
        try:
            values |= {name: yaml.safe_load(text)} if name in known else {}
        except (yaml.YAMLError, ValueError, RecursionError):
            problems.append(f"--set {name}: {text[:64]!r} is no value as YAML has it; put it into quotes")

    def fill(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {name: fill(one, f"{path}.{name}".lstrip(".")) for name, one in value.items()}
        if isinstance(value, list):
            return [fill(one, f"{path}[{at}]") for at, one in enumerate(value)]
        if not isinstance(value, str):
            return value
        unknown = [name for name in _PLACEHOLDER.findall(value) if name not in values]
        problems.extend(f"{path}: {{{name}}} is no parameter; {_there_is(name, values)}" for name in unknown)
        whole = _PLACEHOLDER.fullmatch(value)
        if whole is not None and whole[1] in values:
            return values[whole[1]]
        return _PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), value)

    return {name: fill(one, str(name)) for name, one in raw.items() if name != "parameters"}


# -- what the shape does not check


def _beyond_shape(raw: Mapping[str, Any], names: Names | None) -> list[str]:
    """Errors of meaning, looked for in whatever is there, however malformed the rest."""
    found: list[str] = []
    if not isinstance(raw.get("drill"), str) or not _NAME.fullmatch(raw["drill"]):
        found.append("drill: give a name of a-z, 0-9 and '-'")
    found += _of_measures(raw)
    found += _of_injections(raw, names)
    found += _of_time(raw)
    if names is not None:
        radius, probe = as_dict(raw.get("blast_radius")), as_dict(raw.get("canaries"))
        for at, name in enumerate(_texts(radius.get("regions"))):
            found += _unknown(f"blast_radius.regions[{at}]", name, names.regions, "region")
        for at, name in enumerate(_texts(radius.get("tenants"))):
            found += [] if name == "*" else _unknown(f"blast_radius.tenants[{at}]", name, names.tenants, "tenant")
        for at, name in enumerate(_texts(probe.get("tenants"))):
            found += _unknown(f"canaries.tenants[{at}]", name, names.tenants, "tenant")
        for at, name in enumerate(_texts(probe.get("entries"))):
            found += _unknown(f"canaries.entries[{at}]", name, names.regions, "region")
    return found


def _of_measures(raw: Mapping[str, Any]) -> list[str]:
    found = []
    for at, one in enumerate(dicts(raw.get("hypotheses"))):
        name = one.get("measure")
        if isinstance(name, str) and name not in MEASURES:
            found.append(f"hypotheses[{at}].measure: {name[:64]!r} cannot be measured; {_there_is(name, MEASURES)}")
        if one.get("at_most") is None and one.get("at_least") is None:
            found.append(f"hypotheses[{at}]: give `at_most` or `at_least`")
    live = [name for name, one in MEASURES.items() if one.live]
    for at, one in enumerate(dicts(raw.get("aborts"))):
        name = one.get("measure")
        if isinstance(name, str) and name not in live:
            found.append(f"aborts[{at}].measure: {name[:64]!r} is not measured each second; {_there_is(name, live)}")
    return found


def _of_injections(raw: Mapping[str, Any], names: Names | None) -> list[str]:
    found: list[str] = []
    radius = as_dict(raw.get("blast_radius"))
    regions, share = set(_texts(radius.get("regions"))), radius.get("share", 1.0)
    tenants = set(_texts(radius.get("tenants"))) or {"*"}
    actions = FAULTS if raw.get("kind") == "fault" else TRAFFIC if raw.get("kind") == "traffic" else FAULTS | TRAFFIC
    for k, step in enumerate(dicts(raw.get("steps"))):
        for at, one in enumerate(dicts(step.get("inject"))):
            path, do = f"steps[{k}].inject[{at}]", one.get("do")
            if not isinstance(do, str):
                continue
            if do not in actions:
                other = "" if do not in FAULTS | TRAFFIC else f"; it is not for a {raw.get('kind')} drill"
                found.append(f"{path}.do: {do[:64]!r} cannot be done{other}; {_there_is(do, actions)}")
                continue
            needed, allowed = actions[do]
            found += [f"{path}.{name}: missing; {do} needs it" for name in needed if not one.get(name)]
            strange = sorted(set(map(str, one)) - {"do", *needed, *allowed})
            found += [f"{path}.{name}: {do} does not take it" for name in strange]
            region = one.get("region")
            if isinstance(region, str) and region and do != "pin" and regions and region not in regions:
                found.append(f"{path}.region: {region[:64]!r} is outside blast_radius.regions")
            if do in TAKES_A_SHARE and isinstance(share, int | float) and _number(one.get("share"), 1.0) > share:
                found.append(f"{path}.share: {one.get('share', 1.0)} is more than blast_radius.share {share}")
            if "*" not in tenants and do != "pin":
                found.append(f"{path}.do: {do} touches every tenant; blast_radius.tenants must be ['*'], or use `pin`")
            if do == "pin" and "*" not in tenants and one.get("tenant") not in tenants:
                found.append(f"{path}.tenant: outside blast_radius.tenants")
            if names is not None:
                found += _known_names(path, one, names)
    return found


def _known_names(path: str, one: Mapping[str, Any], names: Names) -> list[str]:
    found: list[str] = []
    for field, known, kind in (
        ("region", names.regions, "region"), ("to", names.regions, "region"), ("tenant", names.tenants, "tenant"),
        ("entry", names.entries, "entry"), ("hub", names.hubs, "hub"),
    ):  # fmt: skip
        value = one.get(field)
        if isinstance(value, str) and value:
            found += _unknown(f"{path}.{field}", value, known, kind)
    return found


def _of_time(raw: Mapping[str, Any]) -> list[str]:
    found = []
    for at, text in enumerate(_texts(raw.get("windows"))):
        try:
            window_of(text)
        except WindowError as error:
            found.append(f"windows[{at}]: {error}")
    steps = dicts(raw.get("steps"))
    planned = _number(raw.get("before_s"), 5.0) + _number(raw.get("after_s"), 20.0)
    planned += sum(_number(step.get("soak_s"), 0.0) for step in steps)
    most = raw.get("duration_max_s")
    if isinstance(most, int | float) and not isinstance(most, bool) and planned > most:
        found.append(
            f"duration_max_s: {most:g} s is less than its phases take ({planned:g} s); raise it or shorten them"
        )
    rate = _number(as_dict(raw.get("canaries")).get("rate_per_s"), 12.0)
    if isinstance(most, int | float) and rate * most > CANARIES_MAX:
        found.append(f"canaries.rate_per_s: {rate:g} for {most:g} s are more than {CANARIES_MAX} requests; ask fewer")
    return found


def _unknown(path: str, name: str, known: Iterable[str], kind: str) -> list[str]:
    names = sorted(known)
    return [] if name in names else [f"{path}: {name[:64]!r} is no {kind} of this fleet; {_there_is(name, names)}"]


def _there_is(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name[:64], names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(names[:24])}" if names else "there is none"


_REMEDIES = {
    "duration_max_s": "; a drill must be bounded: give the seconds after which it is aborted, at most 4 hours",
    "aborts": "; give at least one condition that ends the drill early, such as {measure: error_share, above: 0.2}",
}


def _line(loc: tuple[int | str, ...], message: str, kind: str) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc).lstrip(".")
    what = {"missing": "missing", "extra_forbidden": "is no field of a drill"}.get(kind, message.lower())
    return f"{path}: {what}{_REMEDIES.get(str(loc[0]) if loc else '', '')}"


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
