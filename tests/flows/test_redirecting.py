"""The official SDK is redirected to a region, live: it follows with the token alone, which is never logged."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from farhop.store.contract import route_key
from farhop.store.etcd import EtcdStore
from farhop.store.etcd_settings import EtcdSettings

if TYPE_CHECKING:
    import openai

    from tests.conftest import RunningWorld

SDKS = ("openai",)  # see conftest.py
MODEL = "llama-3.1-8b"
ASKED_FROM = "virginia"


def _route(running: RunningWorld, document: bytes | None) -> None:
    async def write() -> None:
        store = EtcdStore(EtcdSettings(endpoints=tuple(next(iter(running.world.hubs.values())).endpoints)), Random(1))
        await store.open()
        try:
            if document is None:
                await store.delete(route_key(ASKED_FROM))
            else:
                await store.put(route_key(ASKED_FROM), document)
        finally:
            await store.close()

    running.call(write())


def _post(url: str, content: bytes, **headers: str) -> Any:
    with openai.DefaultHttpxClient(follow_redirects=False) as http:
        return http.post(
            url, content=content, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )


def _asked(running: RunningWorld) -> Any:
    """What the entry answers, not followed."""
    body = msgspec.json.encode({"model": MODEL, "prompt": "x", "max_tokens": 1})
    return _post(f"{running.entry(ASKED_FROM)}/v1/completions", body, authorization="Bearer sk-farhop-anywhere")


def _until(running: RunningWorld, status: int) -> None:
    ends = time.monotonic() + 20.0
    while _asked(running).status_code != status:
        assert time.monotonic() < ends, f"the entry never answered {status}"
        time.sleep(0.05)


@pytest.fixture
def redirecting(running: RunningWorld) -> Iterator[RunningWorld]:
    """Virginia's entry redirects, by a word in etcd."""
    _route(running, b'[{"answer": "redirect"}]')
    _until(running, 307)
    try:
        yield running
    finally:
        _route(running, None)
        _until(running, 200)


class Watched:
    """The SDK, and all that went over its wire."""

    def __init__(self, running: RunningWorld, tenant: str) -> None:
        self.answers: list[Any] = []
        hooks: Any = {"response": [self.answers.append]}
        self.client = openai.OpenAI(
            base_url=f"{running.entry(ASKED_FROM)}/v1",
            api_key=f"sk-farhop-{tenant}",
            max_retries=0,
            timeout=20,
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
        )

    def token(self) -> str:
        found = re.search(r"farhop-pass=([^&]+)", self.answers[0].headers["location"])
        assert found is not None
        return found[1]


@pytest.fixture
def sdk(redirecting: RunningWorld) -> Iterator[Watched]:
    watched = Watched(redirecting, "anywhere")
    with watched.client:
        yield watched


def _messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


def _went_past_us(running: RunningWorld, watched: Watched, region: str) -> None:
    """The body went to the region itself, without the key, and the answer came from there."""
    first, second = watched.answers
    assert (first.status_code, second.status_code) == (307, 200)
    assert first.headers["x-farhop-region"] == region
    assert str(second.request.url).startswith(running.world.regions[region].client)
    assert "authorization" not in second.request.headers, "the SDK drops its key across hosts"
    assert second.headers["x-farhop-region"] == region
    assert second.headers["x-farhop-decision"] == first.headers["x-farhop-decision"]
    assert "global;dur=" not in second.headers["server-timing"]


def test_a_chat_is_answered_by_the_region_itself(redirecting: RunningWorld, sdk: Watched) -> None:
    answer = sdk.client.chat.completions.create(model=MODEL, messages=_messages("Where to?"), max_tokens=8)
    assert answer.choices[0].message.content
    _went_past_us(redirecting, sdk, sdk.answers[0].headers["x-farhop-region"])


def test_a_redirected_stream_arrives_piece_by_piece(redirecting: RunningWorld, sdk: Watched) -> None:
    chunks = list(
        sdk.client.chat.completions.create(
            model=MODEL, messages=_messages("Stream"), max_tokens=12, stream=True, extra_body={"min_tokens": 8}
        )
    )
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) >= 8
    _went_past_us(redirecting, sdk, sdk.answers[0].headers["x-farhop-region"])


def test_tenant_is_redirected_to_its_lawful_region(redirecting: RunningWorld) -> None:
    watched = Watched(redirecting, "eu-only")
    with watched.client:
        assert watched.client.completions.create(model=MODEL, prompt="Bonjour", max_tokens=4).choices
    _went_past_us(redirecting, watched, "frankfurt")


def test_farhop_client_follows_a_redirect_without_its_key(redirecting: RunningWorld) -> None:
    result = redirecting.ask(ASKED_FROM, "anywhere", "follow me")
    assert (result.ok, result.redirected) == (True, True)
    assert result.entry == redirecting.entry(ASKED_FROM)
    assert "global;dur=" not in result.headers["server-timing"], "it answered itself"


def test_used_tampered_or_misdirected_redirect_token_is_refused_with_a_code(
    redirecting: RunningWorld, sdk: Watched
) -> None:
    sdk.client.completions.create(model=MODEL, prompt="Once", max_tokens=2)
    spent = str(sdk.answers[1].request.url)
    asked = _asked(redirecting)
    fresh, sent_to = asked.headers["location"], asked.headers["x-farhop-region"]  # a busy home region is not certain
    regions = redirecting.world.regions
    addressed = regions[sent_to].client
    other = next(run.client for name, run in regions.items() if name != sent_to)
    for url, status, code in (
        (spent, 403, "redirect_token_over"),
        (fresh[:-2], 401, "redirect_token_forged"),
        (fresh.replace(addressed, other), 403, "redirect_token_misaddressed"),
    ):
        answer = _post(url, b"{}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert "farhop-pass" not in answer.text


def test_the_token_is_never_logged(redirecting: RunningWorld, sdk: Watched) -> None:
    """Logs, spans, metrics, decisions, statuses, the bodies of errors: a secret of 30 s is one, too."""
    trace_id = "5" * 32
    traced = {"traceparent": f"00-{trace_id}-{'6' * 16}-01"}
    sdk.client.completions.create(model=MODEL, prompt="Once", max_tokens=2, extra_headers=traced)
    token, spent = sdk.token(), str(sdk.answers[1].request.url)
    assert _post(spent, b"{}", **traced).status_code == 403
    assert _post(spent[:-1], b"{}", **traced).status_code == 401
    spans = redirecting.call(redirecting.world.collector.wait_for(trace_id, spans=6))
    names = {span.name for span in spans}
    assert {"farhop.global", "farhop.global.decide", "farhop.regional", "llm_request"} <= names
    written = [repr(span) for span in spans] + [sdk.answers[0].text]
    decision = sdk.answers[0].headers["x-farhop-decision"]
    for run in redirecting.world.regions.values():
        for admin in (run.global_admin, run.regional_admin):
            for page in ("metrics", "status"):
                written.append(urllib.request.urlopen(f"{admin}/{page}").read().decode())
    entry = redirecting.world.regions[ASKED_FROM]
    served = redirecting.world.regions[sdk.answers[1].headers["x-farhop-region"]]
    for admin in (entry.global_admin, served.regional_admin):
        record = urllib.request.urlopen(f"{admin}/decisions/{decision}").read()
        assert msgspec.json.decode(record)["decision"] == decision
        written.append(record.decode())
    logs = sorted(redirecting.world.folder.glob("*.log"))
    assert len(logs) >= 9
    written += [log.read_text(errors="replace") for log in logs]
    mac = token.rpartition(".")[2]
    for text in written:
        assert token not in text
        assert mac not in text
        assert "farhop-pass" not in text
