"""What a recording contains, and what it never does."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from farhop.balance.machine import Request, Usage
from farhop.balance.prefix.chain import chain, seed_of
from farhop.service.observability import workload_recorder
from farhop.service.observability.workload_recorder import WorkloadRecorder, WorkloadRecording

SALT = "0123456789abcdef"
TEXT = b"the quick brown fox jumps over the lazy dog. " * 100


def request(text: bytes = TEXT, session: int = 0, **more: Any) -> Request:
    nodes = chain(text, seed_of("llama", "", "", "acme"))
    return Request("r1", "acme", "llama", len(text), len(text), nodes, 9.0, session=session, key="k1", **more)


def rows_of(recording: WorkloadRecording) -> list[dict[str, Any]]:
    return [json.loads(row) for row in recording.rows]


def test_a_recording_has_lengths_start_times_and_pauses_by_session() -> None:
    recording = WorkloadRecording(SALT.encode())
    recording.add(request(session=7), "tokyo", 100.0, 103.0, Usage(1125, 40))
    recording.add(request(soft_session=9, tools=True), "tokyo", 101.0, 102.0, Usage(1125, 1))
    recording.add(request(session=7), "tokyo", 105.5, 106.0, Usage(1300, 50))
    first, other, again = rows_of(recording)
    assert (first["at_s"], first["input_tokens"], first["output_tokens"], first["region"]) == (100.0, 1125, 40, "tokyo")
    assert "pause_s" not in first
    assert ("tools" in first, other["tools"]) == (False, True)
    assert again["pause_s"] == 2.5
    assert first["session"] == again["session"] != other["session"]


def test_a_request_of_unknown_usage_is_counted_and_not_recorded() -> None:
    recording = WorkloadRecording(SALT.encode())
    recording.add(request(), "tokyo", 1.0, 2.0, None)
    assert not recording.rows
    assert json.loads(recording.end())["end"] == {"recorded": 0, "lost": 0, "unmeasured": 1}


@given(st.integers(0, 6000), st.integers(0, 6000), st.integers(1, 3000))
def test_a_recording_shows_shared_prompt_prefixes_and_nothing_else(one: int, other: int, tokens: int) -> None:
    recording = WorkloadRecording(SALT.encode())
    for size in (one, other):
        recording.add(request(TEXT[:3000][:size] + b"x" * 300), "tokyo", 1.0, 2.0, Usage(tokens, 3))
    a, b = ([name for name, _ in row["blocks"]] for row in rows_of(recording))
    shared = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    nodes = [request(TEXT[:3000][:size] + b"x" * 300).chain for size in (one, other)]
    alike = next((n for n, (x, y) in enumerate(zip(*nodes, strict=False)) if x != y), min(map(len, nodes)))
    assert shared == alike
    for row in rows_of(recording):
        assert sum(size for _, size in row["blocks"]) <= tokens
        assert all(size >= 0 for _, size in row["blocks"])


def test_a_recording_has_no_names_and_no_hashes_in_common_with_another() -> None:
    rows = []
    for salt in (SALT, SALT[::-1]):
        recording = WorkloadRecording(salt.encode())
        recording.add(request(session=7), "tokyo", 1.0, 2.0, Usage(1000, 3))
        rows.append(rows_of(recording)[0])
    text = json.dumps(rows)
    assert not [word for word in ("acme", "llama", "k1", "fox", SALT) if word in text]
    assert not {name for name, _ in rows[0]["blocks"]} & {name for name, _ in rows[1]["blocks"]}
    assert rows[0]["session"] != rows[1]["session"]
    assert not {f"{node:016x}" for node in request().chain} & {name for name, _ in rows[0]["blocks"]}


def before_its_avalanche(digest: str) -> int:
    """What xxh3 of 17 to 128 bytes has added up before its last, invertible step."""
    mixed = int(digest, 16)
    mixed = (mixed ^ mixed >> 32) * pow(0x165667919E3779F9, -1, 1 << 64) % (1 << 64)
    return mixed ^ mixed >> 37


def test_a_fingerprint_is_no_sum_of_a_salts_share_and_a_prompts() -> None:
    """With xxh3 it was: who knew two prompts of a recording could compute what the salt adds, and test guesses of the
    others.
    """
    names = []
    for salt in ("a" * 24 + "01234567", "b" * 24 + "01234567"):
        recording = WorkloadRecording(salt.encode())
        recording.add(request(), "tokyo", 1.0, 2.0, Usage(1000, 3))
        names.append([before_its_avalanche(name) for name, _ in rows_of(recording)[0]["blocks"]])
    assert len({(one - other) % (1 << 64) for one, other in zip(*names, strict=True)}) > 1


def test_rows_and_sessions_of_a_recording_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_recorder, "ROWS_MAX", 3)
    monkeypatch.setattr(workload_recorder, "SESSIONS_MAX", 2)
    recording = WorkloadRecording(SALT.encode())
    for number in range(1, 6):
        recording.add(request(session=number), "tokyo", float(number), number + 0.5, Usage(10, 1))
    assert len(recording.rows) == 3
    assert json.loads(recording.end())["end"]["lost"] == 2
    recording.rows.clear()
    recording.add(request(session=1), "tokyo", 9.0, 9.5, Usage(10, 1))  # long forgotten
    assert "pause_s" not in rows_of(recording)[0]


async def served(recorder: WorkloadRecorder) -> TestClient[Any, Any]:
    app = web.Application()
    app.router.add_get("/record", recorder.stream)
    return TestClient(TestServer(app))


async def test_rows_come_while_it_lasts_then_their_number() -> None:
    recorder = WorkloadRecorder("tokyo")
    async with await served(recorder) as client:
        assert not recorder.recordings
        response = await client.get(f"/record?for_s=0.7&salt={SALT}")
        assert recorder.recordings
        recorder.concluded(request(), 100.0, 103.0, Usage(1125, 40))
        lines = [json.loads(line) for line in (await response.read()).splitlines()]
        assert [line.get("input_tokens") for line in lines] == [1125, None]
        assert lines[-1]["end"]["recorded"] == 1
        assert not recorder.recordings


async def test_a_request_whose_client_left_is_not_recorded() -> None:
    recorder = WorkloadRecorder("tokyo")
    async with await served(recorder) as client:
        response = await client.get(f"/record?for_s=60&salt={SALT}")
        response.close()
        for _ in range(200):
            recorder.concluded(request(), 100.0, 103.0, Usage(1125, 40))  # a write without a reader ends it
            if not recorder.recordings:
                break
            await asyncio.sleep(0.05)
        assert not recorder.recordings


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        (f"for_s=0&salt={SALT}", 400, "for_s: give seconds"),
        (f"for_s=soon&salt={SALT}", 400, "for_s: give seconds"),
        (f"for_s=nan&salt={SALT}", 400, "for_s: give seconds"),
        ("for_s=1", 400, "salt: give 16 to 64 letters"),
        ("for_s=1&salt=short", 400, "salt: give 16 to 64 letters"),
        (f"for_s=1&salt={'ä' * 40}", 400, "salt: give 16 to 64 letters"),  # 80 bytes: no key of a hash
    ],
)
async def test_an_invalid_query_for_a_recording_is_refused_with_the_reason(query: str, status: int, says: str) -> None:
    async with await served(WorkloadRecorder("tokyo")) as client:
        response = await client.get(f"/record?{query}")
        assert response.status == status
        assert says in (await response.json())["error"]


async def test_listeners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_recorder, "LISTENERS_MAX", 1)
    recorder = WorkloadRecorder("tokyo")
    async with await served(recorder) as client:
        with recorder.listening(SALT.encode()):
            assert (await client.get(f"/record?for_s=1&salt={SALT}")).status == 503


def test_a_row_is_one_of_a_log() -> None:
    from farhop_lab.workloads.traces import LogRow

    recording = WorkloadRecording(SALT.encode())
    recording.add(request(session=Random(1).getrandbits(64)), "tokyo", 1.0, 2.0, Usage(1000, 3))
    row = msgspec.json.decode(recording.rows[0], type=LogRow)
    assert row.region == "tokyo"
    assert row.blocks
