"""The OTEL_* variables: what each asks for, and what a wrong one costs (a line in the log, never the process)."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from farhop.telemetry.export import LOW_64, exporter, settings

HERE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "none", **HERE}, None),
        ({"OTEL_SDK_DISABLED": "true", **HERE}, None),
        (HERE, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/v1/traces"}, "http/protobuf"),
        ({"OTEL_TRACES_EXPORTER": "otlp", **HERE}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", **HERE}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", **HERE},
         "http/protobuf"),
    ],
)  # fmt: skip
def test_where_spans_go(environ, protocol):
    found = settings(environ)
    assert found.protocol == protocol
    assert found.problems == ()


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin", **HERE}, "OTEL_TRACES_EXPORTER=zipkin"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "set OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", **HERE}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, "begin it with http://"),
    ],
)
def test_a_wrong_value_is_named_and_exports_nothing(environ, names):
    found = settings(environ)
    assert found.protocol is None
    assert len(found.problems) == 1
    assert names in found.problems[0]


@pytest.mark.parametrize(
    ("sampler", "arg", "follows", "ratio"),
    [
        (None, None, True, 0.01),
        (None, "0.5", True, 0.5),
        ("", "", True, 0.01),
        ("always_on", None, False, 1.0),
        ("always_off", None, False, 0.0),
        ("traceidratio", "0.25", False, 0.25),
        ("parentbased_always_on", None, True, 1.0),
        ("parentbased_always_off", "0.7", True, 0.0),
        ("PARENTBASED_TRACEIDRATIO", "1", True, 1.0),
    ],
)
def test_samplers_are_read_from_the_otel_variables(sampler, arg, follows, ratio):
    environ = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": arg}
    found = settings({name: value for name, value in environ.items() if value is not None})
    assert found.problems == ()
    assert found.sampler.follows_parent is follows
    assert found.sampler.bound == round(ratio * (LOW_64 + 1))


@pytest.mark.parametrize("arg", ["1.5", "-0.1", "nan", "half"])
def test_a_wrong_ratio_is_named_and_the_default_used(arg):
    found = settings({"OTEL_TRACES_SAMPLER_ARG": arg})
    assert found.sampler == settings({}).sampler
    assert f"OTEL_TRACES_SAMPLER_ARG={arg}" in found.problems[0]


def test_an_unknown_sampler_is_named_and_the_default_used():
    found = settings({"OTEL_TRACES_SAMPLER": "jaeger_remote"})
    assert found.sampler == settings({}).sampler
    assert "OTEL_TRACES_SAMPLER=jaeger_remote" in found.problems[0]


@pytest.mark.parametrize(("protocol", "package"), [("grpc", "proto.grpc"), ("http/protobuf", "proto.http")])
def test_the_exporter_of_a_protocol(monkeypatch, protocol, package):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    made = exporter(protocol)
    made.shutdown()
    assert package in type(made).__module__


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    """It redirects what it is sent to another path of its own; `asked` are the paths that came."""

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.server.asked.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(307 if self.path == "/v1/traces" else 200)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        server.asked = []
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_follow_no_redirect(monkeypatch, collector):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    made = exporter("http/protobuf")
    with TracerProvider().get_tracer("t").start_as_current_span("s") as span:
        pass
    result = made.export([span])
    made.shutdown()
    assert (result, collector.asked) == (SpanExportResult.FAILURE, ["/v1/traces"])
