"""What each engine's page contains, and which values are refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from regional_lb.engines.config import ENGINE_NAMES
from regional_lb.engines.signals.engines import ANY, COUNT_MAX, ENGINES, read_page
from regional_lb.engines.signals.exposition import PageError, Places
from regional_lb.fleet.view import Lora, Sample

PAGES = Path(__file__).parent / "pages"
PAGE = (PAGES / "vllm.txt").read_text()


def read(text: str, dropped: list[str] | None = None, engine: str | None = None) -> Sample:
    seen: list[str] = [] if dropped is None else dropped
    return read_page(text.encode(), 5.0, seen.append, ENGINES[engine] if engine else ANY)


@pytest.mark.parametrize(
    ("name", "engine", "sample"),
    [
        ("vllm", "vllm", Sample(5.0, 3, 7, 0.25, 27_000 * 16, 1_234_567.8, 617_283.0)),
        (
            "vllm-0.32",
            "vllm",
            Sample(5.0, 0, 0, 0.0, 16_384 * 128, 46_659.0, 23_296.0, Lora(1), None, 1_795_369_091.19),
        ),
        ("llamacpp", "llamacpp", Sample(5.0, 0, 0, prefix_queries=29.0)),
        ("vllm-0.6", "vllm", Sample(5.0, 2, 5, 0.4609, 7339 * 16, 800.0, 200.0)),
        ("sglang", "sglang", Sample(5.0, 7, 15, 0.3, 2 * 471_258, 8_128_902.0, 2_500_000.0)),
        ("tgi", "tgi", Sample(5.0, 4, 9)),
        ("lmdeploy", "lmdeploy", Sample(5.0, 2 + 1 + 5, 12 + 9, 0.5, prefix_queries=0.0, started_at=1_795_000_000.25)),
        ("aphrodite", "aphrodite", Sample(5.0, 2, 6, 0.125, 4096 * 16, 900.0, 300.0)),
        ("trtllm", "trtllm", Sample(5.0, 1, 12, 0.625, 4096 * 32, slots=64)),
        ("triton", "triton", Sample(5.0, 5, 0)),
        ("triton-trtllm", "triton", Sample(5.0, 7, 16, 0.4875, 6240 * 64, slots=512)),
    ],
)
def test_a_page_as_each_engine_writes_it(name: str, engine: str, sample: Sample) -> None:
    """Said or found out, an engine's words are the same; to no other engine's ears are they a page."""
    text, dropped = (PAGES / f"{name}.txt").read_text(), list[str]()
    assert read(text, dropped) == read(text, dropped, engine) == sample
    assert dropped == []
    for other in ENGINES.keys() - {engine}:
        with pytest.raises(PageError, match="is this the engine's metrics page"):
            read(text, engine=other)


@pytest.mark.parametrize("stem", ["vllm", "aphrodite"])
@pytest.mark.parametrize(("states", "asleep"), [("1", False), ("0", True), ("10", True), ("", False)])
def test_an_engine_sleeps_as_soon_as_one_of_several_behind_its_address_does(
    stem: str, states: str, asleep: bool
) -> None:
    text = f"{stem}:num_requests_waiting 0\n{stem}:num_requests_running 0\n"
    for rank, awake in enumerate(states):
        for state, value in (("awake", awake), ("weights_offloaded", 1 - int(awake)), ("discard_all", 0)):
            text += f'{stem}:engine_sleep_state{{engine="{rank}",sleep_state="{state}"}} {value}.0\n'
    assert read(text).asleep is asleep


@pytest.mark.parametrize(("message", "slots"), [("64.0", 64), ("0", None), ("-1", None), ("NaN", None), ("1e9", None)])
def test_the_number_of_slots_is_reported_or_unknown(message: str, slots: int | None) -> None:
    text = f"trtllm_num_requests_waiting 0\ntrtllm_num_requests_running 0\ntrtllm_max_num_active_requests {message}\n"
    assert read(text).slots == slots


def test_the_configuration_knows_the_engines_that_can_be_read() -> None:
    assert set(ENGINE_NAMES) == set(ENGINES)


def page(waiting: str = "0", running: str = "0", more: str = "") -> str:
    return f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n{more}"


def test_line_ends_of_windows() -> None:
    assert read(PAGE.replace("\n", "\r\n")).waiting == 3


def test_several_engines_are_summed_and_their_usage_is_the_mean() -> None:
    text = "".join(
        f'vllm:num_requests_waiting{{engine="{n}"}} {n}\nvllm:num_requests_running{{engine="{n}"}} 10\n'
        f'vllm:kv_cache_usage_perc{{engine="{n}"}} {0.2 * (n + 1):.1f}\n'
        f'vllm:cache_config_info{{engine="{n}",num_gpu_blocks="100",block_size="16"}} 1\n'
        for n in range(3)
    )
    sample = read(text)
    assert (sample.waiting, sample.running, sample.kv_tokens) == (3, 30, 4800)
    assert sample.kv_usage == pytest.approx(0.4)


def test_the_older_name_of_the_usage_counts_where_the_newer_is_missing() -> None:
    old = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert read(page(more=old)).kv_usage == 0.5
    assert read(page(more=old + 'vllm:kv_cache_usage_perc{model_name="m"} 0.1\n')).kv_usage == 0.1


@pytest.mark.parametrize(
    "name",
    [
        "a,b", "a{b}c", "a}b", 'say \\"hi\\"', 'x\\",num_gpu_blocks=\\"7', "back\\\\", "line\\nbreak", "} 99",
        "{", ",=,", "\u2028", "\x85", "\x0b", "\U0001f600", "num_gpu_blocks=1,block_size=1",
    ],
)  # fmt: skip
def test_labels_may_hold_anything(name: str) -> None:
    """Commas, braces, escaped quotes and odd line ends inside a value are part of the value."""
    text = (
        f'vllm:num_requests_waiting{{model_name="{name}",engine="0"}} 4\n'
        f'vllm:num_requests_running{{engine="0",model_name="{name}"}} 2 1700000000\n'
        f'vllm:cache_config_info{{a="{name}",num_gpu_blocks="10",block_size="16",z="{name}"}} 1\n'
    )
    sample = read(text)
    assert (sample.waiting, sample.running, sample.kv_tokens) == (4, 2, 160)


@pytest.mark.parametrize(
    ("blocks", "size"),
    [("None", "16"), ("0", "16"), ("-5", "16"), ("1e4", "16"), ("9" * 40, "16"), ("999999999", "999999999"), ("", "")],
)
def test_a_cache_that_is_not_reported_is_unknown(blocks: str, size: str) -> None:
    line = f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="{size}"}} 1\n'
    assert read(page(more=line)).kv_tokens is None
    assert read(page(more="vllm:cache_config_info 1\n")).kv_tokens is None


@pytest.mark.parametrize(
    ("number", "taken"), [("1e1", 10), ("1.2E+02", 120), ("0", 0), ("12.0", 12), ("1e9", COUNT_MAX), ("+3", 3)]
)
def test_numbers_are_read_as_prometheus_writes_them(number: str, taken: int) -> None:
    assert read(page(waiting=number)).waiting == taken


@pytest.mark.parametrize("number", ["NaN", "nan", "-1", "-0.5", "+Inf", "-Inf", "1e10", "x", "0x10", "1,5"])
def test_numbers_outside_their_domain_are_never_used(number: str) -> None:
    """Without its queue a page says nothing; without another number it says less, and that is counted."""
    with pytest.raises(PageError, match=r"num_requests_waiting: '.*' is not in 0\.\.") as caught:
        read(page(waiting=number))
    assert caught.value.reason == "value"
    dropped: list[str] = []
    more = f"vllm:prefix_cache_hits_total {number.replace('1e10', '1e19')}\nvllm:kv_cache_usage_perc {number}\n"
    sample = read(page(waiting="4", more=more), dropped)
    assert (sample.waiting, sample.kv_usage, sample.prefix_hits) == (4, None, 0.0)
    assert dropped == ["value", "value"]


def test_one_engine_that_cannot_count_does_not_hide_the_others() -> None:
    found = enumerate(("0.5", "NaN", "25", "0.7"))
    usage = "".join(f'vllm:kv_cache_usage_perc{{engine="{n}"}} {value}\n' for n, value in found)
    dropped: list[str] = []
    assert read(page(more=usage), dropped).kv_usage == pytest.approx(0.6)
    assert dropped == ["value", "value"]


def test_a_page_cut_short_is_refused() -> None:
    """`waiting 4` may have been `waiting 42`."""
    with pytest.raises(PageError, match="cut short") as caught:
        read(page(waiting="42")[:-1])
    assert caught.value.reason == "cut"


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "<html><body>Sign in</body></html>\n", "tgi_queue_size 0\n", "vllm:num_requests_waiting 0\n",
        "vllm:num_requests_running 0\n", 'vllm:num_requests_waiting{engine="0"',
        'vllm:num_requests_waiting{engine="0} 1\n',
        "vllm:num_requests_waiting\n", 'vllm:num_requests_waiting{engine="0"}1x\n',
    ],
)  # fmt: skip
def test_a_page_of_no_known_engine_is_refused(text: str) -> None:
    with pytest.raises(PageError):
        read(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=60), st.integers(0, len(PAGE)), st.integers(0, len(PAGE)))
@example('vllm:cache_config_info{num_gpu_blocks="', 0, 0)
def test_no_page_can_do_more_than_be_refused(noise: str, cut: int, at: int) -> None:
    for text in (noise, "vllm:num_requests_waiting" + noise, PAGE[:cut], PAGE[:at] + noise + PAGE[at:]):
        try:
            sample = read(text)
        except PageError:
            continue
        assert 0 <= sample.waiting <= COUNT_MAX
        assert sample.kv_usage is None or 0.0 <= sample.kv_usage <= 1.0


def test_a_line_that_tempts_the_parser_to_backtrack_is_quick() -> None:
    began = time.thread_time()
    with pytest.raises(PageError):
        read('vllm:num_requests_waiting{a="' + '\\"' * 200_000 + "\n")
    with pytest.raises(PageError):
        read("vllm:num_requests_waiting{" + 'a="b",' * 100_000 + "\n")
    assert time.thread_time() - began < 2.0


LORA = 'vllm:lora_requests_info{max_lora="%s",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s\n'
WAITING = "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"


def test_of_the_adapters_the_latest_line_counts() -> None:
    page = (
        WAITING
        + LORA % ("2", "", "", "1.5e9")
        + LORA % ("2", "sql,chat", "x", "1.7e9")
        + LORA % ("2", "x", "", "1.6e9")
    )
    dropped: list[str] = []
    found = read_page(page.encode(), 0.0, dropped.append).lora
    assert found == Lora(2, frozenset({"sql", "chat"}), frozenset({"x"}))
    assert read_page(WAITING.encode(), 0.0, dropped.append).lora is None
    assert dropped == []


def test_adapters_that_make_no_sense_are_dropped_and_counted() -> None:
    for line in (LORA % ("-1", "a", "", "1"), LORA % ("None", "a", "", "1"), LORA % ("2", "a", "", "NaN")):
        dropped: list[str] = []
        assert read_page((WAITING + line).encode(), 0.0, dropped.append).lora is None
        assert dropped == ["value"]
    many = LORA % ("99999", ",".join(f"a{n}" for n in range(5000)), "", "1")
    found = read_page((WAITING + many).encode(), 0.0, pytest.fail).lora
    assert found is not None
    assert (found.max, len(found.running)) == (1024, 1024)


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_waiting 1\n", 'vllm:kv_cache_usage_perc{a="b"} -1\n', "vllm:num_requests_waiting_of_x 1\n",
        'vllm:cache_config_info{num_gpu_blocks="1",block_size="2"} 1\n',
    ],
)  # fmt: skip
def test_a_page_of_one_line_again_and_again_is_refused(line: str) -> None:
    """4 MiB of them, asked for twice a second, held the loop for up to 400 ms."""
    text = WAITING + line * 9000
    places = Places()
    for _ in range(2):
        with pytest.raises(PageError, match="more than 512 lines") as caught:
            read_page(text.encode(), 0.0, pytest.fail, places=places)
        assert caught.value.reason == "lines"


def test_of_adapters_that_have_very_many_lines_nothing_is_known_and_the_page_stands() -> None:
    for lines, expected in ((8000, []), (8200, ["lines"])):
        dropped: list[str] = []
        page = WAITING + "".join(LORA % ("2", f"a{n}", "", n + 1) for n in range(lines))
        found = read_page(page.encode(), 0.0, dropped.append)
        assert (found.waiting, found.lora is None, dropped) == (0, bool(expected), expected)


def test_metrics_whose_names_only_begin_alike_are_not_counted() -> None:
    """vLLM tells why requests wait, by rank: with the ranks' own lines these were too many."""
    ranks = "".join(f'vllm:num_requests_waiting{{engine="{rank}"}} 1\n' for rank in range(400))
    reasons = "".join(
        f'vllm:num_requests_waiting_by_reason{{engine="{rank}",reason="{why}"}} 1\n'
        for rank in range(400)
        for why in ("capacity", "deferred")
    )
    assert read_page((ranks + reasons + "vllm:num_requests_running 0\n").encode(), 0.0, pytest.fail).waiting == 400


def test_a_line_without_an_end_is_not_read() -> None:
    text = WAITING + "vllm:cache_config_info{" + 'a="1",' * 30_000 + "} 1\n"
    with pytest.raises(PageError, match="not a line"):
        read(text)
