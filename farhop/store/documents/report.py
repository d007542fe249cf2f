"""A regional balancer's report of its capacity: as a value, as JSON for etcd, and as a protobuf message for gRPC.

A report is refused as a whole (DocumentError) or trusted as a whole: no value outside its domain is accepted from
either path. Field names are those of the .proto file, so that etcdctl and gRPC show the same names. Never judges
whether a region can serve.
"""

from __future__ import annotations

import re
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from farhop_wire import region_pb2

from farhop.store.documents.document import DocumentError, check_size, check_text, read

DOCUMENT_LIMIT_BYTES = 256 * 1024  # etcd takes 1.5 MiB a request; a region's report is a few KiB
MODELS_LIMIT = 256
ACCEPTED_LIMIT = 4096  # global balancers
GPU_TYPES_LIMIT = 32
KNOWN_MAX = 4096  # names and addresses whose check is cached: the same ones come 20 times a second
BASES_LIMIT = 32  # of one model
TEXT_LIMIT = 256  # characters in a name
COUNT_LIMIT = 2**53  # the largest run of integers that every JSON reader keeps exactly
WAIT_LIMIT_MS = 86_400_000.0  # a day: beyond it a clock or unit is wrong
RATE_LIMIT_MS = 60_000.0  # a minute for one token
INCARNATION_LIMIT = 2**63 - 1  # int64 on the wire
CLOCK_LIMIT_MS = 1e15
VERSION_LIMIT = 2**31 - 1  # int32 on the wire
BYTES_PER_TOKEN_LIMIT = 4096.0
USED_LIMIT = 1e6

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})):([0-9]{1,5})")
# It becomes part of a header, so it holds nothing but a host and a port.
CLIENT_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]{2,64}\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252})(?::[0-9]{1,5})?")


class ModelReport(msgspec.Struct, frozen=True):
    """Capacity of one model and version at one balancer instance. Tokens are the model's own; slots are sequences.
    Unless stated otherwise, figures are of the replicas that this instance owns."""

    model: str
    replicas_ready: int
    replicas_total: int
    slots_total: int
    slots_free: int
    kv_tokens_total: int
    kv_tokens_free: int
    wait_ms: float  # until a new request's prefill would begin in this instance's queue
    prefill_ms_per_token: float
    tpot_ms: float  # with one more request in the batch
    bytes_per_token: float
    version: str = ""  # "": versions are not distinguished
    in_flight: int = 0
    queued_requests: int = 0  # in this instance's queue
    queued_tokens: int = 0  # in this instance's queue
    # 0..1: the share of all replicas that this instance can send to (also those that others own) left by health, slow
    # start and draining.
    usable_share: float = 1.0
    headroom_foreign_tokens: int = 0  # prompt tokens that it takes from other regions
    # 0 and up, of the same replicas as `usable_share`: requests per slot or the share of KV tokens taken, whichever is
    # more.
    used_share: float = 0.0
    batch_interference_ms: float = 0.0  # the time that each request adds to every token of all others at its replica
    base_unknown: bool = False  # it is an adapter whose base is unknown
    gpu_types: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()  # the models whose rules bind this one, too

    # Scaling (farhop.balance.scaling): of the whole region, whichever instance owns the replicas.
    load_replicas: float = 0.0  # how many replicas the recent load keeps at their target share
    replicas_needed: int = 0  # how many there should be, even if that is outside `replicas_min` and `replicas_max`
    replicas_min: int = 0
    replicas_max: int = 0  # 0: an older build, which does not report it

    # From the engines (farhop.balance.model_facts). 0 or "": unknown.
    max_model_len: int = 0  # tokens of prompt and answer together that every engine takes
    root: str = ""
    parent: str = ""
    context_tokens: int = 0  # the longest request, prompt and answer together, that one of the ready replicas can hold

    # The least that a request from another region which no other would take waits, in ms: the region's own go first. An
    # older build does not report it.
    foreign_wait_ms: float = 0.0


class RegionReport(msgspec.Struct, frozen=True, kw_only=True):
    """One regional balancer instance's report. Reports are ordered by (incarnation, seq), never by a wall clock."""

    region: str
    instance: str
    incarnation: int
    seq: int
    clock_ms: float  # the sender's own monotonic clock
    tier_address: str
    control_address: str
    admin_address: str = ""  # of the admin port, for operators' commands; "": none is offered
    draining: bool = False
    models: tuple[ModelReport, ...] = ()
    # By global balancer, the prompt bytes of its requests accepted since this instance started (bytes, since both tiers
    # count them alike).
    accepted_bytes: dict[str, float] = {}
    client_url: str = ""  # for redirected clients; "": none are accepted
    law_epoch: int = 0  # of the law in force there; 0: an older build, which does not report it
    admin_tls: bool = False  # whether the admin port uses TLS
    # The latest hop token that it reads (farhop.identity.hop_token.READ); 0: an older build, which does not report it.
    hop_version: int = 0


_DECODER = msgspec.json.Decoder(RegionReport)
_REPORT_OF, _MODEL_OF = attrgetter(*RegionReport.__struct_fields__), attrgetter(*ModelReport.__struct_fields__)


def encode(report: RegionReport) -> bytes:
    """The report as JSON, fields in the order above. Raises DocumentError for a report its reader would refuse."""
    check(report)
    document = msgspec.json.encode(report)
    check_size(len(document), DOCUMENT_LIMIT_BYTES)
    return document


def decode(document: bytes) -> RegionReport:
    """The report in a JSON document of at most 256 KiB. Fields it does not know are ignored: newer balancers may add.

    Raises DocumentError, naming the field, for any value outside its domain.
    """
    report = read(_DECODER, document, "report", DOCUMENT_LIMIT_BYTES)
    check(report)
    return report


def to_wire(report: RegionReport) -> region_pb2.Report:
    """The same report as the protobuf message. Raises DocumentError as `encode` does."""
    check(report)
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name != "models"}
    models = [region_pb2.ModelCapacity(**msgspec.structs.asdict(model)) for model in report.models]
    return region_pb2.Report(models=models, **fields)


def from_wire(message: region_pb2.Report) -> RegionReport:
    """The report in a protobuf message. Raises DocumentError as `decode` does."""
    if len(message.models) > MODELS_LIMIT:  # before copying, not after
        raise DocumentError("models", f"{len(message.models)} entries, at most {MODELS_LIMIT}")
    _check_length("accepted_bytes", len(message.accepted_bytes), ACCEPTED_LIMIT)
    fields = dict(zip(RegionReport.__struct_fields__, _REPORT_OF(message), strict=True))
    fields["models"] = tuple(map(_model_from_wire, message.models[:]))
    accepted = message.accepted_bytes
    fields["accepted_bytes"] = {name: accepted[name] for name in accepted}  # `dict` would go through a view in Python
    report = RegionReport(**fields)
    check(report)
    return report


def check(report: RegionReport) -> None:
    """Raise DocumentError at the first field outside its domain."""
    if not _sound_head(report):
        _check_head(report)
    for index, model in enumerate(report.models):
        if not _sound(model):
            _check_model(f"models[{index}]", model)
    seen = {(model.model, model.version) for model in report.models}
    if len(seen) < len(report.models):
        _check_once(report.models)


# Each number of a model and the most it may be. Every one of them is finite and not negative.
_MOST = {
    **dict.fromkeys(
        (
            "replicas_ready", "replicas_total", "slots_total", "slots_free", "kv_tokens_total", "kv_tokens_free",
            "in_flight", "queued_requests", "queued_tokens", "headroom_foreign_tokens",
            "replicas_needed", "replicas_min", "replicas_max",
        ), COUNT_LIMIT,
    ),
    **dict.fromkeys(("wait_ms", "foreign_wait_ms"), WAIT_LIMIT_MS),
    "prefill_ms_per_token": RATE_LIMIT_MS,
    "tpot_ms": RATE_LIMIT_MS,
    "bytes_per_token": BYTES_PER_TOKEN_LIMIT,
    "usable_share": 1.0,
    "used_share": USED_LIMIT,
    "load_replicas": COUNT_LIMIT,
    "batch_interference_ms": RATE_LIMIT_MS,
    "max_model_len": COUNT_LIMIT,
    "context_tokens": COUNT_LIMIT,
}  # fmt: skip
_PARTS = (
    ("replicas_ready", "replicas_total"), ("replicas_min", "replicas_max"), ("slots_free", "slots_total"),
    ("kv_tokens_free", "kv_tokens_total"),
)  # fmt: skip


def _sound_head(report: RegionReport) -> bool:
    """As `_sound`, of all but its models."""
    accepted = report.accepted_bytes
    return (
        _is_name(report.region)
        and _is_name(report.instance)
        and 0 <= report.incarnation <= INCARNATION_LIMIT
        and 0 <= report.seq <= COUNT_LIMIT
        and 0.0 <= report.clock_ms <= CLOCK_LIMIT_MS
        and _is_address(report.tier_address)
        and _is_address(report.control_address)
        and (not report.admin_address or _is_address(report.admin_address))
        and 0 <= report.law_epoch <= COUNT_LIMIT
        and 0 <= report.hop_version <= VERSION_LIMIT
        and (not report.client_url or CLIENT_URL.fullmatch(report.client_url) is not None)
        and len(report.models) <= MODELS_LIMIT
        and len(accepted) <= ACCEPTED_LIMIT
        and not [n for n in accepted if not (0 < len(n) <= TEXT_LIMIT and n.isprintable())]
        and not [b for b in accepted.values() if not 0.0 <= b <= COUNT_LIMIT]
    )


def _sound(model: ModelReport) -> bool:
    """Whether every field is within its domain: one expression, since nearly every report is valid and there are 20 a
    second.

    An invalid report is checked again, field by field, to find the field's name.
    """
    most = COUNT_LIMIT
    return (
        _are_texts((model.model,))
        and not model.version
        and not model.bases
        and not model.parent
        and (not model.root or _are_texts((model.root,)))
        and 0 <= model.max_model_len <= most
        and 0 <= model.context_tokens <= most
        and len(model.gpu_types) <= GPU_TYPES_LIMIT
        and _are_texts(model.gpu_types)
        and 0 <= model.replicas_ready <= model.replicas_total <= most
        and 0 <= model.slots_free <= model.slots_total <= most
        and 0 <= model.kv_tokens_free <= model.kv_tokens_total <= most
        and 0 <= model.in_flight <= most
        and 0 <= model.queued_requests <= most
        and 0 <= model.queued_tokens <= most
        and 0 <= model.headroom_foreign_tokens <= most
        and 0.0 <= model.load_replicas <= most
        and 0 <= model.replicas_needed <= most
        and 0 <= model.replicas_min <= model.replicas_max <= most
        and 0.0 <= model.wait_ms <= WAIT_LIMIT_MS
        and 0.0 <= model.foreign_wait_ms <= WAIT_LIMIT_MS
        and 0.0 <= model.prefill_ms_per_token <= RATE_LIMIT_MS
        and 0.0 <= model.tpot_ms <= RATE_LIMIT_MS
        and 0.0 < model.bytes_per_token <= BYTES_PER_TOKEN_LIMIT
        and 0.0 <= model.usable_share <= 1.0
        and 0.0 <= model.used_share <= USED_LIMIT
        and 0.0 <= model.batch_interference_ms <= RATE_LIMIT_MS
    )


def _check_head(report: RegionReport) -> None:
    _check_name("region", report.region)
    _check_name("instance", report.instance)
    _check_number("incarnation", report.incarnation, INCARNATION_LIMIT)
    _check_number("seq", report.seq)
    _check_number("clock_ms", report.clock_ms, CLOCK_LIMIT_MS)
    check_address("tier_address", report.tier_address)
    check_address("control_address", report.control_address)
    if report.admin_address:
        check_address("admin_address", report.admin_address)
    _check_number("law_epoch", report.law_epoch)
    _check_number("hop_version", report.hop_version, VERSION_LIMIT)
    if report.client_url and not CLIENT_URL.fullmatch(report.client_url):
        raise DocumentError("client_url", f"{report.client_url[:64]!r} is not http(s)://host[:port]")
    _check_length("models", len(report.models), MODELS_LIMIT)
    _check_length("accepted_bytes", len(report.accepted_bytes), ACCEPTED_LIMIT)
    for balancer, tokens in report.accepted_bytes.items():
        _check_text("accepted_bytes", balancer)
        _check_number(f"accepted_bytes[{balancer}]", tokens)


def _check_once(models: tuple[ModelReport, ...]) -> None:
    seen: set[tuple[str, str]] = set()
    for index, model in enumerate(models):
        if (model.model, model.version) in seen:
            raise DocumentError(f"models[{index}].model", f"{model.model!r} is reported twice for one version")
        seen.add((model.model, model.version))


def _check_model(path: str, model: ModelReport) -> None:
    _check_text(f"{path}.model", model.model)
    if model.version:
        _check_text(f"{path}.version", model.version)
    for name in ("root", "parent"):
        if getattr(model, name):
            _check_text(f"{path}.{name}", getattr(model, name))
    for name, limit in _MOST.items():
        _check_number(f"{path}.{name}", getattr(model, name), limit)
    if model.bytes_per_token <= 0:
        raise DocumentError(f"{path}.bytes_per_token", "must be above 0")
    for part, whole in _PARTS:
        some, most = getattr(model, part), getattr(model, whole)
        if some > most:
            raise DocumentError(f"{path}.{part}", f"{some} is more than {whole} {most}")
    for name, listed, most in (("gpu_types", model.gpu_types, GPU_TYPES_LIMIT), ("bases", model.bases, BASES_LIMIT)):
        _check_length(f"{path}.{name}", len(listed), most)
        for text in listed:
            _check_text(f"{path}.{name}", text)


_GPU_TYPES, _BASES = map(ModelReport.__struct_fields__.index, ("gpu_types", "bases"))


def _model_from_wire(message: region_pb2.ModelCapacity) -> ModelReport:
    fields: list[Any] = [*_MODEL_OF(message)]
    # A message's list is iterated in Python, a slice of it is not.
    fields[_GPU_TYPES], fields[_BASES] = tuple(fields[_GPU_TYPES][:]), tuple(fields[_BASES][:])
    return ModelReport(*fields)  # by position: by name takes half as long again


@lru_cache(KNOWN_MAX)
def _is_name(value: str) -> bool:
    return _NAME.fullmatch(value) is not None


@lru_cache(KNOWN_MAX)
def _is_address(value: str) -> bool:
    match = _ADDRESS.fullmatch(value)
    return match is not None and 0 < int(match[1]) < 65536


@lru_cache(KNOWN_MAX)
def _are_texts(values: tuple[str, ...]) -> bool:
    return all(0 < len(value) <= TEXT_LIMIT and value.isprintable() for value in values)


def _check_name(field: str, value: str) -> None:
    if not _is_name(value):
        raise DocumentError(field, f"{value[:64]!r} is not a name of letters, digits, '.', '_', '-', at most 128 long")


def _check_text(field: str, value: str) -> None:
    check_text(field, value, TEXT_LIMIT, blank=True)


def check_address(field: str, value: str) -> None:
    """Raise DocumentError unless `value` is host:port, an IPv6 host in brackets."""
    if not _is_address(value):
        raise DocumentError(field, f"{value[:64]!r} is not host:port (IPv6 as [host]:port), port 1 to 65535")


def _check_length(field: str, length: int, limit: int) -> None:
    if length > limit:
        raise DocumentError(field, f"{length} entries, at most {limit}")


def _check_number(field: str, value: float, limit: float = COUNT_LIMIT) -> None:
    if not 0 <= value <= limit:  # NaN is refused, too
        raise DocumentError(field, f"{value} is outside 0..{limit}")
