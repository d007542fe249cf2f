"""The judge of interrupted streams sees what is lost, doubled or altered; and a share of the run itself."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from farhop_lab.bench.resume import KillReport, ResumeReport, compare, measure, read, regions_killed, shapes


def chunk(text: str, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, **more}
    document = {"id": "a", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


DONE, ERROR = b"data: [DONE]\n\n", b'data: {"error": {"code": "died"}}\n\n'
WHOLE = chunk(" the") + chunk(" sea", finish_reason="length") + DONE


@pytest.mark.parametrize(
    ("wire", "is_wrong"),
    [
        (WHOLE, False),
        (chunk(" the sea", finish_reason="length") + DONE, False),
        (chunk(" the") + ERROR, False),
        (chunk(" th") + DONE, True),
        (chunk(" the") + WHOLE, True),
        (WHOLE + chunk(" and"), True),
        (chunk(" the") + chunk(" sea", finish_reason="length") * 2 + DONE, True),
        (chunk(" the"), True),
        (chunk(" a") + ERROR, True),
        (chunk(" the")[:-6] + b"\n\n" + WHOLE, True),
        (WHOLE.replace(b'"id":"a"', b'"id":"b"', 1), True),
    ],
)
def test_wrong_streams_are_detected(wire: bytes, is_wrong: bool) -> None:
    report = ResumeReport()
    compare(read(wire), read(WHOLE), report, "chat")
    assert bool(report.wrong) == is_wrong, report


@pytest.mark.long
def test_streams_cut_at_random_bytes_say_what_whole_ones_say() -> None:
    """A share of `farhop bench resume --interruptions 10000`: so many that one kill is among them, and that a tenth of
    the streams is more than those that one kill may end."""
    report = asyncio.run(measure(72))
    assert report.wrong == []
    assert (report.lost_bytes, report.doubled_or_altered) == (0, 0)
    assert report.interruptions >= 72
    assert report.kills >= 1
    assert report.counted["region: resumed"] >= 15
    resumable = {name for name, (_, _, goes_on) in shapes("m", 1).items() if goes_on}
    ended = Counter({what: n for what, n in report.ended.items() if what.partition(": ")[0] in resumable})
    assert ended.total() <= 0.1 * report.streams, report
    # Who had nowhere to go is counted.
    cut = sum(n for what, n in ended.items() if what.endswith("_mid_stream"))
    assert cut <= sum(n for what, n in report.counted.items() if what.startswith("global: broken")), report


@pytest.mark.long
def test_streams_resumed_from_text_equal_uncut_ones() -> None:
    """A share of `farhop bench resume --interruptions 10000 --text`."""
    report = asyncio.run(measure(8, by_text=True))
    assert report.wrong == []
    assert (report.lost_bytes, report.doubled_or_altered) == (0, 0)
    assert report.counted["region: resumed"] >= 2


def test_a_region_killed_under_streams_is_judged_stream_by_stream() -> None:
    """A share of `farhop bench resume --kill-region 20`."""
    report = asyncio.run(regions_killed(1, 10))
    assert report.kills == 1
    assert report.altered == 0
    assert report.broken >= 1
    assert report.whole == report.broken - report.ended.total()
    assert len(report.gaps_ms) == report.whole
    assert KillReport(broken=3, whole=2, gaps_ms=[1.0, 5.0]).gap_ms(0.99) == 5.0
