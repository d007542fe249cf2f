"""JSON lines, without content or credentials; a repeating fault takes one line a period."""

import io
import json
import logging

import pytest
import structlog

from farhop.telemetry import logs
from farhop.telemetry.logs import LogError, Throttled, configure


@pytest.fixture
def out():
    """A stream everything is logged to; the process's logging is put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    quiet = {name: logging.getLogger(name).level for name in logs.QUIET}
    stream = io.StringIO()
    configure("global", "virginia", "g1", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in quiet.items():
        logging.getLogger(name).setLevel(before)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_log_line_is_json_with_source_and_trace_id(out):
    logs.get("farhop.relay").warning("attempt failed", trace_id="ab" * 16, reason="stalled", wait_ms=1.5)
    (line,) = lines(out)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "tier": "global", "region": "virginia", "instance": "g1", "level": "warning", "logger": "farhop.relay",
        "event": "attempt failed", "trace_id": "ab" * 16, "reason": "stalled", "wait_ms": 1.5,
    }  # fmt: skip


def test_content_and_credentials_are_withheld(out):
    logs.get("x").error("bad", prompt="Dear diary", body=b"Dear diary", authorization="Bearer sk-1", tokens=5)
    assert "diary" not in out.getvalue()
    assert "sk-1" not in out.getvalue()
    assert (lines(out)[0]["prompt"], lines(out)[0]["tokens"]) == (logs.WITHHELD, 5)


def test_long_texts_are_cut_bytes_are_not_shown_and_odd_values_do_not_raise(out):
    logs.get("x").info("odd", long="y" * 9_999, raw=b"secret", thing=object(), nested={"a": {1, 2}})
    (line,) = lines(out)
    assert line["long"] == "y" * logs.TEXT_CHARS_MAX + "… (9999 characters)"
    assert line["raw"] == "(6 bytes)"
    assert line["thing"].startswith("<object")


def test_a_newline_cannot_forge_a_line(out):
    logs.get("x").info("a\nb", field='c\n{"event":"forged"}')
    assert len(lines(out)) == 1


def test_lines_below_the_level_are_not_logged_and_an_unknown_level_is_refused(out):
    configure("global", "virginia", "g1", "error", stream=out)
    logs.get("x").warning("quiet")
    logs.get("x").error("loud")
    assert [line["event"] for line in lines(out)] == ["loud"]
    with pytest.raises(LogError, match="use one of debug, info"):
        configure("global", "virginia", "g1", "chatty")


def test_libraries_log_in_the_same_form(out):
    logging.getLogger("opentelemetry.exporter").warning("cannot reach %s", "collector")
    logging.getLogger("urllib3.connectionpool").info("not of interest")
    (line,) = lines(out)
    assert (line["event"], line["logger"], line["tier"]) == (
        "cannot reach collector",
        "opentelemetry.exporter",
        "global",
    )


def test_an_exception_is_one_line(out):
    try:
        [][0]
    except IndexError:
        logs.get("x").exception("internal")
    (line,) = lines(out)
    assert "IndexError: " in line["exception"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttled(out, clock) -> Throttled:
    return Throttled(logs.get("x"), 10.0, clock)


def test_a_repeating_fault_logs_at_once_and_then_once_a_period_with_a_count(out, clock, throttled):
    for second in range(25):
        clock.now = 100.0 + second
        throttled.warning("etcd unreachable", attempt=second)
    assert [(line["attempt"], line.get("times")) for line in lines(out)] == [(0, None), (10, 10), (20, 10)]


def test_faults_are_distinguished_by_event_and_key(out, throttled):
    for _ in range(3):
        throttled.warning("replica down", key="a", replica="a")
        throttled.warning("replica down", key="b", replica="b")
        throttled.error("etcd unreachable")
    assert [(line["event"], line.get("replica"), line["level"]) for line in lines(out)] == [
        ("replica down", "a", "warning"),
        ("replica down", "b", "warning"),
        ("etcd unreachable", None, "error"),
    ]


def test_flush_logs_suppressed_counts_and_resets_them(out, clock, throttled):
    throttled.warning("hub lost")
    throttled.warning("hub lost")
    throttled.flush()
    assert len(lines(out)) == 1  # its period has not ended
    clock.now += 10.0
    throttled.flush()
    throttled.flush()
    assert [line.get("times") for line in lines(out)] == [None, None]
    throttled.warning("hub lost")
    assert len(lines(out)) == 3


def test_faults_remembered_are_bounded_and_none_is_lost_unlogged(out, throttled, monkeypatch):
    monkeypatch.setattr(logs, "FAULTS_MAX", 2)
    for key in ("a", "a", "a", "b", "c", "d"):
        throttled.warning("fault", key=key, which=key)
    assert len(throttled.faults) == 2
    assert [(line["which"], line.get("times")) for line in lines(out)] == [
        ("a", None), ("b", None), ("a", 2), ("c", None), ("d", None),
    ]  # fmt: skip


@pytest.mark.parametrize("every_s", [0.0, -1.0, float("nan")])
def test_a_throttle_period_must_be_above_zero(out, clock, every_s):
    with pytest.raises(LogError, match="above zero"):
        Throttled(logs.get("x"), every_s, clock)
