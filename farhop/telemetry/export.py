"""What the standard OTEL_* variables ask for: which requests are sampled, and where spans go; and a span on its way.

Invariants: nothing but those variables configures tracing; a wrong value is reported in one line naming it, never
raised, because telemetry must not keep a balancer down; the SDK is imported only if there is somewhere to export to;
spans go to the named collector and follow no redirect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from farhop.telemetry.attributes import Value

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Kind: TypeAlias = Literal["internal", "server", "client"]

DEFAULT_SAMPLER = "parentbased_traceidratio"
DEFAULT_RATIO = 0.01
LOW_64 = (1 << 64) - 1

_FILES = tuple(
    f"OTEL_EXPORTER_OTLP_{scope}{kind}"
    for scope in ("TRACES_", "")
    for kind in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
)
_SAMPLERS = ("always_on", "always_off", "traceidratio")


class Sampler(msgspec.Struct, frozen=True):
    """Which traces are recorded. `bound` is compared with a trace id's low 64 bits, as the SDK's ratio sampler does.

    So every tier with the same ratio picks the same traces, whether or not it heard of the others' choice.
    """

    follows_parent: bool
    bound: int


class Settings(msgspec.Struct, frozen=True):
    """Tracing as configured. `protocol` is None where spans go nowhere; `problems` are values not understood."""

    protocol: str | None
    sampler: Sampler
    disabled: bool = False
    problems: tuple[str, ...] = ()


class SpanRecord(msgspec.Struct):
    """One span to be exported. Ids are hexadecimal; `end_ns` is None while it is open."""

    name: str
    kind: Kind
    span_id: bytes
    start_ns: int
    end_ns: int | None = None
    attributes: Mapping[str, Value] | None = None
    error: str | None = None


def settings(environ: Mapping[str, str]) -> Settings:
    """Read OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER, OTEL_TRACES_SAMPLER(_ARG) and OTEL_EXPORTER_OTLP_(TRACES_)*.

    Set but empty counts as unset, as the specification says. Headers, TLS, time-outs and batching are the SDK's own.
    """
    problems: list[str] = []
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Settings(None, Sampler(follows_parent=True, bound=0), disabled=True)
    protocol = _protocol(environ, problems)
    sampler = _sampler(environ, problems)
    return Settings(protocol, sampler, problems=tuple(problems))


def exporter(protocol: str) -> SpanExporter:
    """The OTLP exporter of a protocol, configured by its standard environment variables; their errors are raised as
    they are.
    """
    for name in _FILES:
        path = os.environ.get(name, "")
        if path and not os.path.isfile(path):
            # The SDK would fall back to the system's CAs, or fail at every export.
            raise FileNotFoundError(f"{name}={path}: no such file")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    session = requests.Session()
    session.max_redirects = 0  # a redirect leads where nobody asked the law about the spans
    return OverHttp(session=session)


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    """The first variable that is set, with its value; the last name and "" if none is."""
    for name in names:
        if value := environ.get(name, "").strip():
            return name, value
    return names[-1], ""


def _protocol(environ: Mapping[str, str], problems: list[str]) -> str | None:
    wanted = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if wanted == "none":
        return None
    name, endpoint = _first(environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if wanted not in ("", "otlp"):
        problems.append(f"OTEL_TRACES_EXPORTER={wanted}: spans are not exported; use otlp or none")
        return None
    if not endpoint:
        if wanted:
            problems.append(f"OTEL_TRACES_EXPORTER=otlp has nowhere to send to; set {name}")
        return None
    asked, protocol = _first(environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = protocol.lower() or "http/protobuf"
    if protocol not in ("grpc", "http/protobuf"):
        problems.append(f"{asked}={protocol}: spans are not exported; use grpc or http/protobuf")
        return None
    if protocol == "http/protobuf" and not endpoint.startswith(("http://", "https://")):
        problems.append(f"{name}={endpoint}: spans are not exported; begin it with http:// or https://")
        return None
    return protocol


def _sampler(environ: Mapping[str, str], problems: list[str]) -> Sampler:
    asked = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or DEFAULT_SAMPLER
    kind = asked.removeprefix("parentbased_")
    if kind not in _SAMPLERS:
        problems.append(
            f"OTEL_TRACES_SAMPLER={asked} is unknown, {DEFAULT_SAMPLER} is used; use one of "
            f"{', '.join(_SAMPLERS)}, each also as parentbased_*"
        )
        asked, kind = DEFAULT_SAMPLER, "traceidratio"
    ratio = {"always_on": 1.0, "always_off": 0.0}.get(kind)
    if ratio is None:
        ratio = _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip(), problems)
    return Sampler(asked.startswith("parentbased_"), round(ratio * (LOW_64 + 1)))


def _ratio(text: str, problems: list[str]) -> float:
    try:
        ratio = float(text) if text else DEFAULT_RATIO
    except ValueError:
        ratio = math.nan
    if not 0.0 <= ratio <= 1.0:
        problems.append(f"OTEL_TRACES_SAMPLER_ARG={text}: {DEFAULT_RATIO} is used; give a ratio from 0 to 1")
        return DEFAULT_RATIO
    return ratio
