"""What engines say of their caches, from their ZMQ socket to the choice: live, where the mirror alone is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from inprocess import MODEL, Answer, chat, send, until
from kv_world import BLOCK, World, words, world

from farhop.service.admin.server import Question

READ_S = 0.05


def _cached(answer: Answer) -> int:
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("schema", ["map", "array"])
async def test_the_engines_own_events_are_exact_to_the_token(tmp_path: Path, schema: str) -> None:
    async with world(tmp_path, schema=schema, replicas=1) as here:
        text = words(1, 400)
        await here.ask(text)
        again = await here.ask(text + words(2, 50))
        assert _cached(again) >= 400
        predicted, actual, off = here.hits()["exact"]
        assert (predicted, off) == (actual, 0.0)
        assert here.hits()["trie"] == [0.0, 0.0, 0.0]
        assert here.balancer.listeners.tokenizers is not None
        assert (here.balancer.listeners.tokenizers.prompts, here.flow.replicas.mirror.guard.miscounts) == (2, 0)


async def test_after_a_reset_the_mirror_would_be_wrong_and_the_engines_events_are_right(tmp_path: Path) -> None:
    text = words(3, 400)
    async with world(tmp_path, tokenizer=False, events=False, replicas=1) as guessing:
        await guessing.ask(text)
        await guessing.reset(0)
        assert _cached(await guessing.ask(text)) == 0
        predicted, actual, _ = guessing.hits()["trie"]
        assert predicted > 100 > actual  # it expected blocks that were gone
    async with world(tmp_path, replicas=1) as found:
        await found.ask(text)
        await found.reset(0)
        await until(lambda: len(found.flow.replicas.blocks) == 0)
        assert _cached(await found.ask(text)) == 0
        assert found.hits()["exact"] == [0.0, 0.0, 0.0]
        assert _cached(await found.ask(text)) == found.hits()["exact"][0] > 100  # and it knows the returned blocks


async def test_under_pressure_the_engines_events_stay_right(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1, kv_blocks=64) as here:
        for round_ in range(3):
            for seed in range(4):
                await here.ask(words(seed, 300) + words(90 + round_, 5))
        predicted, actual, off = here.hits()["exact"]
        assert (predicted, off) == (actual, 0.0)
        assert here.flow.replicas.blocks.held_tokens("e0") <= 64 * BLOCK


async def test_a_wiped_replica_is_not_preferred(tmp_path: Path) -> None:
    async with world(tmp_path, speedup=20) as here:
        shared = words(4, 600)
        name = (await here.ask(shared)).headers["x-farhop-replica"]
        assert (await here.ask(shared)).headers["x-farhop-replica"] == name
        body = {"model": MODEL, "messages": [{"role": "user", "content": shared}]}
        asked = Question(msgspec.Raw(msgspec.json.encode(body)), "anywhere")
        fields = {
            c["replica"]: c
            for c in here.balancer.tier_admin.explain(here.balancer.tier_admin.compose(asked))["reasons"]["candidates"]
        }
        assert fields[name]["hit_tokens"] > 500
        await here.reset(int(name[1]))
        await until(lambda: here.flow.replicas.blocks.held_tokens(name) == 0.0)
        fields = {
            c["replica"]: c
            for c in here.balancer.tier_admin.explain(here.balancer.tier_admin.compose(asked))["reasons"]["candidates"]
        }
        assert {(c["hit_tokens"], c["hit_exact"]) for c in fields.values()} == {(0.0, True)}
        assert len(fields) == 2
        assert here.flow.replicas.trie.bytes_held(name) == 0


async def test_events_without_a_tokenizer_still_clear_the_mirror(tmp_path: Path) -> None:
    async with world(tmp_path, tokenizer=False, replicas=1) as here:
        await here.ask(words(5, 400))
        assert here.flow.replicas.trie.bytes_held("e0") > 0
        await here.reset(0)
        await until(lambda: here.flow.replicas.trie.bytes_held("e0") == 0)
        assert _cached(await here.ask(words(5, 400))) == 0
        assert here.hits()["trie"] == [0.0, 0.0, 0.0]
        assert here.balancer.listeners.tokenizers is None


async def test_salts_and_token_ids_and_streams(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1) as here:
        text = words(6, 200)
        await here.ask(text, cache_salt="one")
        assert _cached(await here.ask(text, cache_salt="two")) == 0
        assert _cached(await here.ask(text, cache_salt="one")) > 100
        ids = list(range(100, 300))
        for _ in range(2):
            body = {"model": MODEL, "prompt": ids, "max_tokens": 1}
            assert (await send(here.client, chat(body=body, path="/v1/completions"))).status == 200
            await here.settled()
        predicted, actual, off = here.hits()["exact"]
        assert (predicted, off) == (actual, 0.0)
        assert actual > 300


async def test_prompt_is_not_tokenized_if_there_is_no_choice(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1, first=False) as here:
        for text in (words(12, 20), words(11, 10_000)):
            await here.ask(text)
        assert here.balancer.listeners.tokenizers.prompts == 0
        assert here.hits()["exact"][0] == 0.0


async def test_prompt_of_a_queued_request_is_tokenized_in_the_background(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1, first=False, speedup=1, listing={"slots": 1}) as here:
        running = asyncio.create_task(here.ask(words(14, 20), max_tokens=4000))  # for most of a minute
        await until(lambda: here.flow.under_way == 1)
        waiting = [
            asyncio.create_task(here.ask(words(seed, tokens), max_tokens=2)) for seed, tokens in ((15, 20), (16, 2000))
        ]  # one is parsed by the loop itself, one in a thread
        await until(lambda: here.balancer.listeners.tokenizers.prompts == 2)
        assert len(here.flow.queue) == 2
        running.cancel()
        await asyncio.gather(*waiting)
        assert here.flow.replicas.mirror.guard.miscounts == 0


def _waited_ms(answer: Answer) -> float:
    return float(answer.headers["server-timing"].partition("dur=")[2].partition(",")[0])


async def test_prompt_is_tokenized_first_only_if_its_beginning_does_not_decide(tmp_path: Path) -> None:
    async with world(tmp_path, first=False) as here:
        tokenizers = here.balancer.listeners.tokenizers
        assert tokenizers is not None
        new = await here.ask(words(13, 6_000))  # no replica holds its beginning: a decision needs no more
        await until(lambda: tokenizers.prompts == 1)  # it is tokenized nonetheless, as the engine counts it
        again = await here.ask(words(13, 6_000))  # it was tokenized before
        assert (_waited_ms(new), _waited_ms(again)) == (0.0, 0.0)
        assert here.hits()["exact"][1] > 5900
        other_end = await here.ask(words(13, 6_000) + words(14, 6_000))
        assert _waited_ms(other_end) > 0.0
        predicted, actual, off = here.hits()["exact"]
        assert (predicted, off) == (actual, 0.0)
        assert actual > 11_800
        assert (here.flow.replicas.mirror.guard.miscounts, here.flow.replicas.mirror.guard.mispredictions) == (0, 0)


async def test_tokenization_time_of_a_long_prompt_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, replicas=1) as here:
        tokenizers = here.balancer.listeners.tokenizers
        assert tokenizers is not None
        later = tokenizers.later

        def slowly(*asked: Any, **how: Any) -> asyncio.Future[Any]:
            async def read() -> Any:
                await asyncio.sleep(READ_S)  # at least as long, however fast the machine
                return await later(*asked, **how)  # type: ignore[misc]

            return asyncio.ensure_future(read())

        monkeypatch.setattr(tokenizers, "later", slowly)
        answer = await here.ask(words(11, 10_000))
        shown_ms = float(answer.headers["server-timing"].partition("dur=")[2].partition(",")[0])
        assert shown_ms > READ_S * 1e3 - 2, "timers count whole ms"
        predicted, actual, _ = here.hits()["exact"]
        assert predicted == actual == 0.0


async def test_prompt_that_cannot_be_tokenized_is_routed_by_its_bytes(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1) as here:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
        for _ in range(2):
            content: Any = [{"type": "text", "text": words(7, 300)}, picture]
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            assert (await send(here.client, chat(body=body))).status == 200
            await here.settled()
        assert here.balancer.listeners.tokenizers is not None
        assert here.balancer.listeners.tokenizers.unread == {"media": 2}
        assert here.hits()["trie"][0] > 0
        page = here.balancer.metrics.render().decode()
        assert 'farhop_untokenized_prompts_total{reason="media",region="virginia",tier="regional"} 2.0' in page


async def test_a_client_that_leaves_while_its_prompt_is_read_is_noticed(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1) as here:
        tokenizers = here.balancer.listeners.tokenizers
        assert tokenizers is not None
        for n in range(3):  # each is new: tokenized text is remembered, and read again before it is needed
            text = words(100 + n, 200_000)
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
            _, writer = await asyncio.open_connection("127.0.0.1", here.client)
            writer.write(chat(body=body))
            await until(lambda: tokenizers.waiting > 0)
            writer.transport.abort()
            # The next prompt's tokenization must not be taken for the rest of this one's.
            await until(lambda: tokenizers.waiting == 0)
        await _at_rest(here, lambda: here.balancer.metrics.in_flight + here.balancer.plane.budget.used_bytes)
        page = here.balancer.metrics.render().decode()
        (line,) = [line for line in page.splitlines() if line.startswith("farhop_requests_total{")]
        assert "client_left" in line
        assert line.endswith("} 3.0")
        assert (await here.ask(words(9, 20))).status == 200


async def _at_rest(here: World, held: Callable[[], int]) -> None:
    await until(lambda: held() == 0)


async def test_tokenizer_that_differs_from_the_engines_is_detected(tmp_path: Path) -> None:
    async with world(tmp_path, replicas=1) as here:
        (template,) = [here.balancer.listeners.tokenizers]
        assert template is not None
        model = template.by_model[MODEL]
        model.special, model.template = {}, None  # as if the template were different
        plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        from farhop.service.process.clock import wall
        from farhop.service.tokenization.tokenizer import _compiled

        model.template = _compiled("test", plain, wall)
        text = words(10, 300)
        for n in range(5):
            await here.ask(text + words(20 + n, 3))
        assert here.flow.replicas.mirror.guard.miscounts == 5
        assert here.hits()["trie"][0] > 200  # from the fourth on our own estimate counts again
