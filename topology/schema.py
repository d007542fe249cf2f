"""The shape of a topology file: fields, types and ranges, each with what belongs there.

It knows nothing of how the parts refer to each other; that is `topology.references`. Every fault is found in one pass.
A field's description is the remedy shown when the field is missing or wrong, so it says what to write.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from topology.problems import Problem, did_you_mean, path_of, quoted

EPOCH_MAX = 2**53  # of a law; every JSON reader keeps it exactly
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{5,15}(Z|[+-][0-9]{2}:[0-9]{2})")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise PydanticCustomError("name", "not a name")
    return text


def _sha256(text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise PydanticCustomError("sha256", "not a SHA-256: 64 lower-case hexadecimal digits")
    return text


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        good = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good or url.path not in {"", "/"} or url.query or url.fragment or url.username is not None:
        raise PydanticCustomError("url", "not the URL of an entry")
    return text.rstrip("/")


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (colon and _HOST.fullmatch(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise PydanticCustomError("endpoint", "not host:port")
    return text


def _resume(value: object) -> object:
    """What YAML makes of `off`, and what was said before there were three words."""
    return {True: "text", False: "off"}[value] if isinstance(value, bool) else value


def _ipv4(text: str) -> str:
    return _public(text, IPv4Address, "ipv4", "not an IPv4 address that clients could connect to")


def _ipv6(text: str) -> str:
    return _public(text, IPv6Address, "ipv6", "not an IPv6 address that clients could connect to")


def _public(text: str, kind: type[IPv4Address] | type[IPv6Address], name: str, message: str) -> str:
    try:
        address = kind(text)
        good = not (address.is_multicast or address.is_unspecified) and "%" not in text
    except ValueError:
        good = False
    if not good:
        raise PydanticCustomError(name, message)
    return str(address)


def _domain(text: str) -> str:
    if not text:
        return ""
    labels = text.rstrip(".").lower().split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise PydanticCustomError("domain", "not a host name")
    return ".".join(labels)


def _printable(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise PydanticCustomError("said", "is blank, or holds unprintable characters")
    return text


def _moment(text: str) -> str:
    if not _MOMENT.fullmatch(text):
        raise PydanticCustomError("moment", "not a moment")
    return text


Name = Annotated[str, AfterValidator(_name)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Sha256 = Annotated[str, AfterValidator(_sha256)]
Url = Annotated[str, Field(max_length=512), AfterValidator(_url)]
Endpoint = Annotated[str, Field(max_length=512), AfterValidator(_endpoint)]
Ipv4 = Annotated[str, AfterValidator(_ipv4)]
Ipv6 = Annotated[str, AfterValidator(_ipv6)]
Domain = Annotated[str, AfterValidator(_domain)]
PlaceNames = Annotated[list[Name], Field(max_length=1024)]
SomePlaceNames = Annotated[list[Name], Field(min_length=1, max_length=1024)]

_NAME_HELP = "use 1 to 63 of a-z 0-9 . _ -, beginning and ending with a letter or digit (quote words like no, on, 1e3)"
_PARENTS_HELP = "list the jurisdictions this lies in"
_USD = Annotated[float, Field(ge=0, le=10_000)]


class Doc(BaseModel):
    """Strict, closed and frozen: no number from text, no unknown field, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class PlaceDoc(Doc):
    """A jurisdiction or a country."""

    name: Name = Field(title="what rules and regions call it", description=_NAME_HELP)
    within: PlaceNames = Field(
        title="the jurisdictions that it lies in, and so in whatever those lie in",
        default=[],
        description=_PARENTS_HELP,
    )


class RegionDoc(Doc):
    """A site with GPUs."""

    name: Name = Field(title="what configurations, rules and metrics call it", description=_NAME_HELP)
    city: str = Field(
        title="for people", default="", max_length=100, description="name its city in at most 100 characters"
    )
    country: Name = Field(title="where it stands", description="name one of `countries`")
    jurisdictions: PlaceNames = Field(
        title="further ones, beyond those of its country", default=[], description=_PARENTS_HELP
    )
    latitude: float = Field(
        title="degrees north; it decides which region is near to a client",
        ge=-90,
        le=90,
        description="give degrees north, -90 to 90",
    )
    longitude: float = Field(title="degrees east", ge=-180, le=180, description="give degrees east, -180 to 180")
    entry: list[Url] = Field(
        title="where clients reach its global balancers; a client that another entry may not read is sent there",
        default=[],
        max_length=64,
        description="list URLs such as https://tokyo.example.com:8443",
    )
    hub: Name = Field(title="the etcd cluster that its balancers publish to", description="name one of `hubs`")
    egress_usd_per_gb: _USD = Field(
        title="what a GB sent out of it costs, for `usd_weight_ms` and `egress_usd_per_hour` of routes",
        default=0.0,
        description="give US dollars per GB, 0 to 10000",
    )
    usd_per_gpu_hour: _USD = Field(
        title="what an hour of a GPU costs there, for `usd_weight_ms`",
        default=0.0,
        description="give US dollars per GPU hour, 0 to 10000",
    )


class EntryDoc(Doc):
    """An entry: the public addresses by which clients reach the global balancers of one site."""

    name: Name = Field(title="what drains, metrics and DNS call it", description=_NAME_HELP)
    region: Name = Field(title="where its global balancers are", description="name one of `regions`")
    ipv4: list[Ipv4] = Field(
        title="its public IPv4 addresses; several entries may share one (anycast)",
        default=[],
        max_length=16,
        description="list IPv4 addresses such as 203.0.113.10",
    )
    ipv6: list[Ipv6] = Field(
        title="its public IPv6 addresses; several entries may share one (anycast)",
        default=[],
        max_length=16,
        description="list IPv6 addresses such as 2001:db8::10",
    )
    host: Domain = Field(
        title="the name that leads to this entry alone (unicast), for redirects of long streams",
        default="",
        max_length=253,
        description="give a host name such as tokyo-1.example.com, or leave it out",
    )
    port: int = Field(
        title="where it listens for clients", default=443, ge=1, le=65535, description="give a port, 1 to 65535"
    )


class TenantRuleDoc(Doc):
    """A scope of a tenant's residency: what is not allowed here is forbidden, so `allow` must be said."""

    allow: SomePlaceNames = Field(
        title="places where it may be", description="list at least one place to allow; [world] is everywhere"
    )
    deny: PlaceNames = Field(
        title="places where it may not, though they are allowed: deny wins",
        default=[],
        description="list places to deny",
    )


class ModelRuleDoc(Doc):
    """What narrows a rule above it, so that leaving `allow` out takes nothing away."""

    allow: SomePlaceNames = Field(
        title="places that are left", default=["world"], description="list places to allow, or `deny: [world]` for none"
    )
    deny: PlaceNames = Field(title="places that are taken away", default=[], description="list places to deny")


class ResidencyDoc(Doc):
    """Where a tenant's requests may be read, computed, recorded and hinted at."""

    processing: TenantRuleDoc = Field(
        title="where prompts are computed",
        description="say where work may be done, such as `processing: {allow: [eu]}`",
    )
    entry: TenantRuleDoc | None = Field(
        title="where bodies may be read first; left out: anywhere",
        default=None,
        description="give `allow` and `deny`, or leave it out",
    )
    logging: TenantRuleDoc | None = Field(
        title="where spans and records may be; left out: as `processing`",
        default=None,
        description="give `allow` and `deny`, or leave it out",
    )
    hints: TenantRuleDoc | None = Field(
        title="where hashes of its prompts may be known; left out: as `processing`",
        default=None,
        description="give `allow` and `deny`, or leave it out",
    )
    on_exhausted: Literal["refuse", "wait"] = Field(
        title="what to do where lawful regions exist and none serves",
        default="refuse",
        description="say refuse or wait",
    )
    wait_max_s: float = Field(
        title="how long to wait then, with `wait`", default=0.0, ge=0, le=600, description="give seconds, 0 to 600"
    )


class KeyDoc(Doc):
    """An API key by its hash."""

    name: Name = Field(title="what records call it", description=_NAME_HELP)
    sha256: Sha256 = Field(
        title="hash of the key, never the key", description="write the output of `farhop hash-key`, in quotes"
    )
    within: PlaceNames = Field(
        title="places that its requests stay within, beside all else",
        default=[],
        description="list the places this key must stay within, or leave it out",
    )
    explain: bool = Field(
        title="its clients may ask for a route receipt",
        default=False,
        description="say true if its clients may ask why a request went where it did",
    )


class ObjectiveDoc(Doc):
    """What a request is worth that asks for its first token so soon."""

    ttft_ms: float = Field(
        title="for requests that ask for it within this many ms, or fewer",
        gt=0,
        le=3_600_000,
        description="give milliseconds above 0",
    )
    priority: int = Field(title="their priority", ge=0, le=9, description="give 0 to 9; a larger one is served first")


class TenantDoc(Doc):
    """Who is served, and under which law."""

    name: Name = Field(title="what records, routes and metrics call it", description=_NAME_HELP)
    keys: list[KeyDoc] = Field(
        title="its API keys", default=[], max_length=256, description="list keys, each with `name` and `sha256`"
    )
    residency: ResidencyDoc = Field(
        title="where its requests may go",
        description="add `residency: {processing: {allow: [...]}}`; a tenant without one is never served",
    )
    priority: int = Field(
        title="a larger one is served first and shed last",
        default=0,
        ge=0,
        le=9,
        description="give 0 to 9; a larger one is served first",
    )
    weight: float = Field(
        title="its share among tenants of its priority",
        default=1.0,
        gt=0,
        le=1000,
        description="give a share above 0, up to 1000",
    )
    share_prefixes: bool = Field(
        title="whether its prompts may share cached prefixes with other tenants that say so",
        default=False,
        description="say true or false",
    )
    resume: Annotated[Literal["off", "exact", "text"], BeforeValidator(_resume)] = Field(
        title="how its streams may continue from another replica or region when their own fails",
        default="text",
        description="say off (or false), exact, or text (or true)",
    )
    tiers: dict[Name, Annotated[int, Field(ge=0, le=9)]] = Field(
        title="priorities of requests that name a service tier or an inference objective",
        default={},
        max_length=32,
        description="map names such as `flex` to priorities, 0 to 9",
    )
    objectives: list[ObjectiveDoc] = Field(
        title="priorities of requests that ask for a time to the first token",
        default=[],
        max_length=32,
        description="list objectives such as `{ttft_ms: 500, priority: 7}`",
    )
    models: dict[ModelName, ModelRuleDoc] = Field(
        title="by model, what narrows `processing` further for this tenant",
        default={},
        max_length=1024,
        description="map model names to rules such as `{deny: [us]}`",
    )


class TopologyDoc(Doc):
    """A whole topology."""

    name: Name = Field(title="what messages call this world", description=_NAME_HELP)
    epoch: int = Field(
        title="version of the law in this file; every decision names it, and it only rises",
        ge=1,
        le=EPOCH_MAX,
        description="give a whole number from 1, raised with every change of the law",
    )
    jurisdictions: list[PlaceDoc] = Field(
        title="places that regions and countries may lie in",
        default=[],
        max_length=1024,
        description="list jurisdictions, with `name`",
    )
    countries: list[PlaceDoc] = Field(
        title="where regions stand; ones without a region may be named by rules",
        min_length=1,
        max_length=1024,
        description="list countries, with `name`",
    )
    regions: list[RegionDoc] = Field(
        title="sites with GPUs", min_length=1, max_length=256, description="list at least one region"
    )
    entries: list[EntryDoc] = Field(
        title="public addresses of global balancers: `farhop dns` answers them, `farhop anycast` announces them",
        default=[],
        max_length=1024,
        description="list entries, each with `name`, `region` and addresses",
    )
    hubs: dict[Name, Annotated[list[Endpoint], Field(max_length=16)]] = Field(
        title="etcd clusters by name; `[]`: given by configurations",
        min_length=1,
        max_length=256,
        description="map hub names to lists of etcd endpoints such as [etcd-1:2379], or []",
    )
    local_rtt_ms: float = Field(
        title="round trip between two hosts of one region",
        default=1.0,
        gt=0,
        le=1000,
        description="give milliseconds above 0, up to 1000",
    )
    rtt_ms: dict[Name, dict[Name, Annotated[float, Field(gt=0, le=60_000)]]] = Field(
        title="round trips between regions, each pair once, the same both ways; used until they are measured",
        default={},
        max_length=256,
        description="give milliseconds above 0 for every pair: `virginia: {tokyo: 166}`",
    )
    models: dict[ModelName, ModelRuleDoc] = Field(
        title="by model, a rule for all tenants",
        default={},
        max_length=1024,
        description="map model names to rules such as `{deny: [us]}`",
    )
    tenants: list[TenantDoc] = Field(
        title="who is served, and under which law", default=[], max_length=100_000, description="list tenants"
    )


class LawDoc(Doc):
    """The law alone, as it stands in etcd: what goes in the place of a topology's own, who wrote it, when and why.

    `at` is for people and never compared with a clock.
    """

    epoch: int = Field(
        title="larger than that of any law before",
        ge=1,
        le=EPOCH_MAX,
        description="give a whole number from 1, larger than that of the law before",
    )
    author: Annotated[str, AfterValidator(_printable)] = Field(
        title="who wrote it", max_length=128, description="say who, in 1 to 128 printable characters"
    )
    why: Annotated[str, AfterValidator(_printable)] = Field(
        title="why", max_length=256, description="say why, in 1 to 256 printable characters"
    )
    at: Annotated[str, AfterValidator(_moment)] = Field(
        title="when, by the author's clock, for people", description="give a moment such as 2026-05-01T12:00:00+00:00"
    )
    models: dict[ModelName, ModelRuleDoc] = Field(
        title="by model, a rule for all tenants",
        default={},
        max_length=1024,
        description="map model names to rules such as `{deny: [us]}`",
    )
    tenants: list[TenantDoc] = Field(
        title="who is served, and under which law",
        min_length=1,
        max_length=100_000,
        description="list at least one tenant",
    )


def problems_of(error: ValidationError, root: type[BaseModel] = TopologyDoc) -> list[Problem]:
    """Every fault of shape, in house words. Input values are left out: one of them may be a key. `root` is the class of
    the whole document, whose fields' descriptions are the remedies."""
    details = error.errors(include_url=False, include_input=False)
    plaintext = {item["loc"][:-1] for item in details if item["type"] == "extra_forbidden" and _is_key(item["loc"])}
    return [
        _problem(item, root)
        for item in details
        if not (item["type"] == "missing" and item["loc"][-1] == "sha256" and item["loc"][:-1] in plaintext)
    ]


def _is_key(loc: tuple[int | str, ...]) -> bool:
    return loc[-1] == "key" and len(loc) == 5 and (loc[0], loc[2]) == ("tenants", "keys")


def _problem(item: ErrorDetails, root: type[BaseModel]) -> Problem:
    loc = tuple(part for part in item["loc"] if part != "[key]")
    owner, field = _owner(loc, root)
    if item["type"] != "extra_forbidden":
        message = "missing" if item["type"] == "missing" else _uncapped(item["msg"])
        return Problem(path_of(*loc), message, _help(owner, field))
    if _is_key(loc):
        remedy = "put `sha256:` with the output of `farhop hash-key` in its place"
        return Problem(path_of(*loc), "a key in plain text must not stand in a file", remedy)
    fields = sorted(owner.model_fields)
    remedy = did_you_mean(str(loc[-1]), fields, f"known here: {', '.join(fields)}")
    return Problem(path_of(*loc), f"unknown field {quoted(str(loc[-1]))}", remedy)


def _help(owner: type[BaseModel], field: str) -> str:
    info = owner.model_fields.get(field)
    return (info.description if info else None) or "write a mapping of fields"


def _owner(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[type[BaseModel], str]:
    """The document class a location lies in, and its field; "" where the last part is no field of that class."""
    owner: type[BaseModel] = root
    field, at = "", cast("Any", root)
    for part in loc:
        at = _plain(at)
        if not (isinstance(at, type) and issubclass(at, BaseModel)):
            at = get_args(at)[-1] if get_args(at) else at
        elif part in at.model_fields:
            owner, field = at, str(part)
            at = at.model_fields[field].annotation
        else:
            return at, ""
    return owner, field


def _plain(annotation: Any) -> Any:
    """Without the wrapping of Annotated and of `| None`."""
    while get_origin(annotation) in {Annotated, Union, UnionType}:
        annotation = get_args(annotation)[0]
    return annotation


def _uncapped(text: str) -> str:
    return text[:1].lower() + text[1:]
