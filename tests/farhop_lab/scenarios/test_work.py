"""Work as a scenario says it: its figures, its longest request, its loops, and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.scenarios.schema import DayDoc, WorkDoc
from farhop_lab.scenarios.work import (
    Requests,
    check_trace,
    days_of,
    figures_of,
    longest_tokens,
    programs,
    schedule,
    send,
)
from farhop_lab.workloads.load import TraceError
from farhop_lab.workloads.program import WorkloadError, run
from farhop_lab.workloads.trees import BRANCH_4
from tests.farhop_lab.workloads.test_load import archive

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.0000000,{100 + second},20\n" for second in range(40)
)


def work(**fields: Any) -> WorkDoc:
    return WorkDoc.model_validate(fields)


class ClientPool:
    """Takes down who was sent."""

    until = 60.0

    def __init__(self) -> None:
        self.closed_: list[tuple[str, Any, Any]] = []
        self.opened: list[Any] = []

    def closed(self, region: str, programs: Any, *, awake: Any = None) -> None:
        self.closed_.append((region, programs, awake))

    def open(self, schedule: Any) -> None:
        self.opened.append(schedule)


def sent(doc: WorkDoc, seed: int = 1, scale: float = 1.0, days: Any = None, folder: Path = Path()) -> ClientPool:
    clients = ClientPool()
    send(clients, doc, "w", seed, scale, days or {}, folder)  # type: ignore[arg-type]
    return clients


def test_a_kinds_default_figures_are_overridden_by_the_file() -> None:
    chat = figures_of(work(kind="chat", figures={"like": "wildchat", "think_s": 2}))
    assert (chat.name, chat.think_s) == ("wildchat", 2.0)  # type: ignore[union-attr]
    assert figures_of(work(kind="trees", figures={"branch": 4})) == BRANCH_4


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "chat", "figures": {"like": "slack"}},
        {"kind": "chat", "figures": {"like": ["arena"]}},
        {"kind": "trees", "figures": {"branch": "two"}},
        {"kind": "requests", "figures": {"shared_tokens": 9, "prompt_tokens": 3}},
        {"kind": "requests", "figures": {"answer_tokens": 0}},
        {"kind": "azure", "figures": {"tenant": "x"}},
    ],
)
def test_wrong_figures_are_one_line(fields: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError) as caught:
        figures_of(work(**fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["chat", "trees", "requests"])
def test_no_request_is_longer_than_is_configured(kind: str) -> None:
    figures = figures_of(work(kind=kind))
    most = longest_tokens(figures)
    clients = programs(figures, "t", "c", 1)
    for _ in range(20):
        for batch in run(next(clients), lambda ask: b"x" * 4 * (ask.answer_tokens or ask.max_tokens)):
            assert all(len(ask.prompt) // 4 + ask.max_tokens <= most for ask in batch)


def test_the_number_of_clients_scales_with_the_load_and_each_sends_its_own_prompts() -> None:
    doc = work(kind="requests", clients={"tokyo": 4, "virginia": 2})
    clients = sent(doc, scale=1.5)
    assert [region for region, _, _ in clients.closed_] == ["tokyo"] * 6 + ["virginia"] * 3
    first = {run(next(these), lambda _: b"")[0][0].prompt for _, these, _ in clients.closed_}
    assert len(first) == 9


def test_same_seed_gives_the_same_requests_and_another_seed_does_not() -> None:
    doc = work(kind="chat", per_s={"tokyo": 2.0})

    def starts(seed: int) -> list[tuple[float, bytes]]:
        (these,) = sent(doc, seed).opened
        return [(start.at, next(start.make())[0].prompt) for start, _ in zip(these, range(5), strict=False)]

    assert starts(1) == starts(1)
    assert starts(1) != starts(2)


def test_requests_share_what_they_are_asked_to_share() -> None:
    figures = Requests(prompt_tokens=100, shared_tokens=50, groups=1)
    these = programs(figures, "t", "c", 1)
    a, b = (run(next(these), lambda _: b"")[0][0].prompt for _ in range(2))
    assert len(a) == len(b) == 400
    assert a[:200] == b[:200]
    assert a[200:232] != b[200:232]


def prompts(schedule: Any, count: int) -> list[tuple[float, bytes]]:
    return [(start.at, next(start.make())[0].prompt) for start, _ in zip(schedule, range(count), strict=False)]


def test_texts_are_of_a_region_or_of_all() -> None:
    def beginnings(**figures: Any) -> list[set[bytes]]:
        doc = work(
            kind="requests",
            figures={"prompt_tokens": 100, "shared_tokens": 50, "groups": 1, **figures},
            per_s={"tokyo": 2.0, "virginia": 2.0},
        )
        return [{prompt[:200] for _, prompt in prompts(schedule, 5)} for schedule in sent(doc).opened]

    tokyo, virginia = beginnings()
    assert len(tokyo) == len(virginia) == 1
    assert tokyo != virginia
    tokyo, virginia = beginnings(everywhere=True)
    assert tokyo == virginia
    closed = work(
        kind="requests",
        figures={"prompt_tokens": 100, "shared_tokens": 50, "groups": 1, "everywhere": True},
        clients={"tokyo": 1, "virginia": 1},
    )
    assert {next(these).send(None)[0].prompt[:200] for _, these, _ in sent(closed).closed_} == tokyo


def test_renewed_texts_are_other_ones_after_their_time() -> None:
    doc = work(
        kind="requests",
        figures={"prompt_tokens": 100, "shared_tokens": 50, "groups": 1, "renewed_s": 2.0},
        per_s={"tokyo": 9.0},
    )
    (schedule,) = sent(doc).opened
    by_time: dict[float, set[bytes]] = {}
    for at, prompt in prompts(schedule, 60):
        by_time.setdefault(at // 2.0, set()).add(prompt[:200])
    assert all(len(texts) == 1 for texts in by_time.values())
    assert len(set().union(*by_time.values())) == len(by_time) > 2
    with pytest.raises(WorkloadError, match="renewed_s"):
        Requests(renewed_s=-1.0)


def test_bursts_have_the_same_requests_at_other_times() -> None:
    even = work(kind="requests", per_s={"tokyo": 5.0})
    bursts = work(kind="requests", per_s={"tokyo": 5.0}, bursts={"every_s": 10.0, "for_s": 1.0})
    (plain,), (bunched,) = (sent(doc).opened for doc in (even, bursts))
    one, other = prompts(plain, 100), prompts(bunched, 100)
    assert [prompt for _, prompt in one] == [prompt for _, prompt in other]
    assert all(at % 10.0 <= 1.0 for at, _ in other)


def test_last_client_of_a_daily_cycle_is_active_only_at_the_peak() -> None:
    days = days_of({"tokyo": DayDoc(utc_hours=14, swing=10)}, 240.0)
    clients = sent(work(kind="requests", clients={"tokyo": 10}), days=days)
    wakes = [awake(120.0) for _, _, awake in clients.closed_]
    assert wakes[0] == 120.0  # the region with the lowest threshold never sleeps
    assert wakes == sorted(wakes)
    assert wakes[-1] > 120.0


def test_a_trace_passes_at_its_speed_and_in_its_regions(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(AZURE)
    doc = work(kind="azure", path="t.csv", regions=["tokyo", "virginia"], speed=2.0, figures={"context_tokens": 4000})
    doc = doc.model_copy(update={"figures": {"context_tokens": 4000, "max_tokens": 100}})
    starts = list(schedule(figures_of(doc), doc, 1, 1.0, {}, tmp_path, 60.0))
    assert len(starts) == 40
    assert starts[-1].at == pytest.approx(19.5)
    assert {start.region for start in starts} == {"tokyo", "virginia"}
    half = doc.model_copy(update={"share": 0.5})
    assert 5 < len(list(schedule(figures_of(half), half, 1, 1.0, {}, tmp_path, 60.0))) < 35


def _line(kind: str, at_ms: int, tokens: int) -> str:
    """A request of so many tokens, as that kind of trace writes it."""
    at_s = at_ms / 1e3
    if kind == "mooncake":
        return f'{{"timestamp": {at_ms}, "input_length": {tokens}, "output_length": 5, "hash_ids": [0]}}\n'
    if kind == "azure":
        return f"2023-11-16 18:{at_ms // 60_000:02d}:{at_ms % 60_000 / 1e3:010.7f},{tokens},5\n"
    if kind == "burstgpt":
        return f"{at_s},{tokens},5\n"
    if kind == "log":
        return f'{{"at_s": {at_s}, "input_tokens": {tokens}, "output_tokens": 5}}\n'
    turns = f'[{{"input_tokens": {tokens}, "output_tokens": 5}}]'
    return f'{{"session": "s{tokens}", "at_s": {at_s}, "turns": {turns}}}\n'


HEADS = {"azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n", "burstgpt": "Timestamp,Request tokens,Response tokens\n"}


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        ("mooncake", "open"),
        ("azure", "open"),
        ("burstgpt", "open"),
        ("log", "open"),
        ("log", "closed"),
        ("sessions", "open"),
    ],
)
@settings(max_examples=25, deadline=None)
@given(moments_ms=st.lists(st.integers(0, 100_000), min_size=1, max_size=12))
def test_schedule_is_ordered_and_complete_for_any_times(
    tmp_path_factory: pytest.TempPathFactory, kind: str, loop: str, moments_ms: list[int]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = (_line(kind, at_ms, 16 + n) for n, at_ms in enumerate(moments_ms))
    (folder / "moments").write_text(HEADS.get(kind, "") + "".join(lines))
    doc = work(kind=kind, path="moments", regions=["tokyo"], loop=loop)
    starts = list(schedule(figures_of(doc), doc, 1, 1.0, {}, folder, 60.0))
    assert [start.at for start in starts] == sorted(start.at for start in starts)
    asked = [len(next(start.make())[0].prompt) // 4 - 16 for start in starts]
    assert sorted(asked) == list(range(len(moments_ms)))


def test_a_broken_trace_is_found(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 1, "input_length"')
    for kind in ("mooncake", "azure", "servegen"):
        with pytest.raises(TraceError):
            check_trace(work(kind=kind, path="t.jsonl"), tmp_path)


def test_recorded_places_need_a_region_of_every_request(tmp_path: Path) -> None:
    line = '{"at_s": 1, "input_tokens": 9, "output_tokens": 9'
    (tmp_path / "t.jsonl").write_text(f'{line}, "region": "tokyo"}}\n{line}}}\n')
    with pytest.raises(TraceError, match="does not record where each request came in; give another `place`"):
        check_trace(work(kind="log", path="t.jsonl", place="recorded", regions=["tokyo"]), tmp_path)
    (tmp_path / "t.jsonl").write_text(f'{line}, "region": "tokyo"}}\n{line}, "region": "oslo"}}\n')
    with pytest.raises(TraceError, match="came in oslo; list these"):
        check_trace(work(kind="log", path="t.jsonl", place="recorded", regions=["tokyo"]), tmp_path)


def test_servegen_clients_without_lengths_are_reported_before_a_run(tmp_path: Path) -> None:
    archive(tmp_path / "all.tar.gz", chunk_0_trace_csv="0,1,1,,\n")
    with pytest.raises(TraceError, match="kind-1 chunk-0 was recorded without lengths; give other `clients`"):
        check_trace(
            work(kind="servegen", path="all.tar.gz", regions=["tokyo"], figures={"clients": "kind-1"}), tmp_path
        )
