from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inprocess import HOP, HOP_KEY, until

from farhop.balance.machine import Event
from regional_lb import watch
from regional_lb.config import RegionalConfig
from regional_lb.view import ReplicaProbed, View, ViewSwapped
from regional_lb.watch import COUNT_MAX, PageError, Watcher, read_page

# As vLLM 0.11 writes it.
PAGE = r"""# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 11193.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.2345678e+06
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 617283.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="27000",num_cpu_blocks="None"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0"} NaN
vllm:num_requests_running_total{engine="0"} nonsense
"""


def page(waiting: str = "0", running: str = "0", more: str = "") -> str:
    return f"vllm:num_requests_waiting {waiting}\nvllm:num_requests_running {running}\n{more}"


def test_a_page_as_vllm_writes_it() -> None:
    sample = read_page(PAGE, at=5.0)
    assert (sample.at, sample.waiting, sample.running, sample.kv_usage) == (5.0, 3, 7, 0.25)
    assert sample.kv_tokens == 27_000 * 16
    assert (sample.prefix_queries, sample.prefix_hits) == (1_234_567.8, 617_283.0)


def test_line_ends_of_windows_and_none_at_the_end() -> None:
    assert read_page(PAGE.replace("\n", "\r\n"), 0.0).waiting == 3
    assert read_page("vllm:num_requests_waiting 1\nvllm:num_requests_running 2", 0.0).running == 2


def test_several_engines_are_summed_and_their_usage_is_the_mean() -> None:
    text = "".join(
        f'vllm:num_requests_waiting{{engine="{n}"}} {n}\nvllm:num_requests_running{{engine="{n}"}} 10\n'
        f'vllm:kv_cache_usage_perc{{engine="{n}"}} {0.2 * (n + 1):.1f}\n'
        f'vllm:cache_config_info{{engine="{n}",num_gpu_blocks="100",block_size="16"}} 1\n'
        for n in range(3)
    )
    sample = read_page(text, 0.0)
    assert (sample.waiting, sample.running, sample.kv_tokens) == (3, 30, 4800)
    assert sample.kv_usage == pytest.approx(0.4)


def test_the_older_name_of_the_usage_counts_where_the_newer_is_missing() -> None:
    old = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
    assert read_page(page(more=old), 0.0).kv_usage == 0.5
    assert read_page(page(more=old + 'vllm:kv_cache_usage_perc{model_name="m"} 0.1\n'), 0.0).kv_usage == 0.1


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
    sample = read_page(text, 0.0)
    assert (sample.waiting, sample.running, sample.kv_tokens) == (4, 2, 160)


@pytest.mark.parametrize(
    ("blocks", "size"),
    [("None", "16"), ("0", "16"), ("-5", "16"), ("1e4", "16"), ("9" * 40, "16"), ("999999999", "999999999"), ("", "")],
)
def test_a_cache_that_is_not_told_is_unknown(blocks: str, size: str) -> None:
    line = f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="{size}"}} 1\n'
    assert read_page(page(more=line), 0.0).kv_tokens is None
    assert read_page(page(more="vllm:cache_config_info 1\n"), 0.0).kv_tokens is None


@pytest.mark.parametrize(
    ("number", "taken"), [("1e1", 10), ("1.2E+02", 120), ("0", 0), ("12.0", 12), ("1e9", COUNT_MAX), ("+3", 3)]
)
def test_numbers_are_read_as_prometheus_writes_them(number: str, taken: int) -> None:
    assert read_page(page(waiting=number), 0.0).waiting == taken


@pytest.mark.parametrize("number", ["NaN", "nan", "-1", "-0.5", "+Inf", "-Inf", "1e10", "x", "", "0x10", "1,5"])
def test_numbers_outside_their_domain_refuse_the_page(number: str) -> None:
    for text in (page(waiting=number), page(more=f"vllm:prefix_cache_hits_total {number.replace('1e10', '1e19')}\n")):
        with pytest.raises(PageError):
            read_page(text, 0.0)


def test_a_usage_above_one_refuses_the_page() -> None:
    with pytest.raises(PageError, match=r"kv_cache_usage_perc: 25\.0 is outside 0\.\.1"):
        read_page(page(more="vllm:kv_cache_usage_perc 25\n"), 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "<html><body>Sign in</body></html>", "tgi_queue_size 0\n", "vllm:num_requests_waiting 0\n",
        "vllm:num_requests_running 0\n", 'vllm:num_requests_waiting{engine="0"',
        'vllm:num_requests_waiting{engine="0} 1\n',
        "vllm:num_requests_waiting\n", 'vllm:num_requests_waiting{engine="0"}1x\n',
    ],
)  # fmt: skip
def test_what_is_no_page_of_vllm_is_refused(text: str) -> None:
    with pytest.raises(PageError):
        read_page(text, 0.0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=60), st.integers(0, len(PAGE)), st.integers(0, len(PAGE)))
@example('vllm:cache_config_info{num_gpu_blocks="', 0, 0)
def test_no_page_can_do_more_than_be_refused(noise: str, cut: int, at: int) -> None:
    for text in (noise, "vllm:num_requests_waiting" + noise, PAGE[:cut], PAGE[:at] + noise + PAGE[at:]):
        try:
            sample = read_page(text, 0.0)
        except PageError:
            continue
        assert 0 <= sample.waiting <= 10 * COUNT_MAX
        assert 0.0 <= sample.kv_usage <= 1.0


def test_a_line_that_tempts_the_parser_to_backtrack_is_quick() -> None:
    began = time.perf_counter()
    with pytest.raises(PageError):
        read_page('vllm:num_requests_waiting{a="' + '\\"' * 200_000 + "\n", 0.0)
    with pytest.raises(PageError):
        read_page("vllm:num_requests_waiting{" + 'a="b",' * 100_000 + "\n", 0.0)
    assert time.perf_counter() - began < 2.0


# -- the watcher, on real sockets

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(metrics: Answering, health: Answering | None = None) -> AsyncIterator[str]:
    async def alive(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health or alive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Heard:
    """What the flow would be told."""

    def __init__(self) -> None:
        self.view = View({}, {})
        self.probes: list[tuple[str, bool]] = []
        self.refused: list[str] = []

    def react(self, event: Event) -> None:
        if isinstance(event, ViewSwapped):
            self.view = event.view
        elif isinstance(event, ReplicaProbed):
            self.probes.append((event.target, event.ok))

    def waiting(self, name: str) -> int | None:
        sample = self.view.replicas[name].sample if name in self.view.replicas else None
        return sample.waiting if sample is not None else None


@asynccontextmanager
async def watching(monkeypatch: pytest.MonkeyPatch, urls: dict[str, str], **more: float) -> AsyncIterator[Heard]:
    monkeypatch.setenv("FARHOP_TEST_HOP", HOP_KEY)
    config = RegionalConfig.model_validate({
        "region": "virginia", "instance": "r1", "admin": {"port": 0}, "tier": {"port": 0}, "control": {"port": 0},
        "hop": HOP, "watch": {"probe_s": 0.02, "scrape_s": 0.02, "timeout_s": 1.0, **more},
        "replicas": [{"url": url, "models": ["m"], "name": name, "kv_tokens": 77} for name, url in urls.items()],
    })  # fmt: skip
    heard = Heard()
    watcher = Watcher(config, heard.react, heard.refused.append, asyncio.get_running_loop().time, Random(1))
    await watcher.open()
    try:
        yield heard
    finally:
        await watcher.close()
        assert len(watcher._tasks) == 0


def _text(body: str | bytes, **more: int) -> Answering:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body.encode() if isinstance(body, str) else body, **more)  # type: ignore[arg-type]

    return answer


async def test_a_replica_becomes_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(_text(PAGE)) as url, watching(monkeypatch, {"one": url}) as heard:
        assert heard.view.replicas["one"].sample is None  # the view is there at once
        assert [r.name for r in heard.view.by_model["m"]] == ["one"]
        await until(lambda: heard.waiting("one") == 3 and heard.probes)
        assert heard.view.replicas["one"].kv_tokens == 432_000
        assert heard.probes[0] == ("one", True)
        assert heard.refused == []


async def test_a_page_that_comes_in_many_pieces_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pages are hundreds of kilobytes: the first piece alone would be a page without its last metrics."""
    noise = "".join(f'vllm:some_bucket{{le="{n}"}} {n}\n' for n in range(20_000))

    async def slowly(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in ("vllm:num_requests_running 2\n", noise, "vllm:num_requests_wai", "ting 4", "2\n"):
            await answer.write(piece.encode())
            await asyncio.sleep(0.01)
        return answer

    async with served(slowly) as url, watching(monkeypatch, {"one": url}) as heard:
        await until(lambda: heard.waiting("one") is not None)
        assert heard.waiting("one") == 42
        assert heard.refused == []


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"<html>Sign in</html>", 200), (b"\xff\xfe" * 10, 200), (PAGE.encode(), 500), (b"", 404)],
)
async def test_a_page_that_is_none_is_refused_and_counted(
    monkeypatch: pytest.MonkeyPatch, body: bytes, status: int
) -> None:
    async with served(_text(body, status=status)) as url, watching(monkeypatch, {"one": url}) as heard:
        await until(lambda: len(heard.refused) >= 2 and len(heard.probes) >= 2)
        assert set(heard.refused) == {"metrics"}
        assert heard.waiting("one") is None
        assert heard.view.replicas["one"].kv_tokens == 77
        assert heard.probes[-1] == ("one", True)  # whether it is alive is another question


async def test_a_huge_page_is_refused_rather_than_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in the midst of `waiting 42`, it would read 4."""
    monkeypatch.setattr(watch, "PAGE_BYTES_MAX", 1000)
    text = page(waiting="42", more="#" * 1000)
    async with served(_text(text)) as url, watching(monkeypatch, {"one": url}) as heard:
        await until(lambda: len(heard.refused) >= 2)
        assert heard.waiting("one") is None
    monkeypatch.setattr(watch, "PAGE_BYTES_MAX", len(text))
    async with served(_text(text)) as url, watching(monkeypatch, {"one": url}) as heard:
        await until(lambda: heard.waiting("one") == 42)


async def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to what would look alive, nor to a page."""

    def away(to: str) -> Answering:
        async def answer(_request: web.Request) -> web.Response:
            raise web.HTTPFound(to)

        return answer

    async with served(_text(PAGE), away("/metrics")) as url, watching(monkeypatch, {"one": url}) as heard:
        await until(lambda: heard.probes)
        assert heard.probes[0] == ("one", False)
    async with (
        served(_text(PAGE)) as other,
        served(away(f"{other}/metrics")) as url,
        watching(monkeypatch, {"one": url}) as heard,
    ):
        await until(lambda: heard.refused)
        assert heard.waiting("one") is None


async def test_a_slow_replica_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        served(never, never) as slow,
        served(_text(PAGE)) as quick,
        watching(monkeypatch, {"slow": slow, "quick": quick}, timeout_s=5.0) as heard,
    ):
        await until(lambda: heard.probes.count(("quick", True)) >= 5 and heard.waiting("quick") == 3, within_s=3.0)
        assert heard.waiting("slow") is None
        assert not [name for name, _ in heard.probes if name == "slow"]


async def test_who_does_not_answer_in_time_or_at_all_failed_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with served(_text(PAGE)) as gone:
        pass
    async with (
        served(never, never) as slow,
        watching(monkeypatch, {"gone": gone, "slow": slow}, timeout_s=0.1) as heard,
    ):
        await until(lambda: ("gone", False) in heard.probes and ("slow", False) in heard.probes)
        assert heard.refused == []  # nothing came, so there was nothing to refuse


async def test_a_replica_keeps_what_was_known_while_its_page_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [PAGE]

    async def changing(_request: web.Request) -> web.Response:
        return web.Response(text=pages[0])

    async with served(changing) as url, watching(monkeypatch, {"one": url}) as heard:
        await until(lambda: heard.waiting("one") == 3)
        known = heard.view.replicas["one"]
        pages[0] = page(waiting="-1")
        await until(lambda: len(heard.refused) >= 2)
        after = heard.view.replicas["one"]
        assert after.kv_tokens == known.kv_tokens
        assert after.sample is not None
        pages[0] = page(waiting="9")
        await until(lambda: heard.waiting("one") == 9)
        assert heard.view.replicas["one"].kv_tokens == known.kv_tokens  # a page without it changes nothing
