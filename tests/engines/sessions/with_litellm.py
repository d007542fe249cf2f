"""A session with LiteLLM's SDK, then by way of its proxy, run by its own Python; ends badly if anything is amiss."""

# ruff: noqa: PT018 - there is no pytest in that environment

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import litellm

URL, KEY = os.environ["FARHOP_URL"], os.environ["FARHOP_KEY"]
PORT = sys.argv[1]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OPENAI = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 8, "temperature": 0.0}
ANTHROPIC = {"model": "anthropic/tiny", "api_base": URL, "api_key": KEY, "max_tokens": 8, "temperature": 0.0}
STARTS_S = 300.0


def session(asked: dict[str, object]) -> None:
    """Whole, streamed, with tools, asynchronously."""
    whole = litellm.completion(messages=TALK, **asked)
    found = whole.choices[0].message.content
    assert found and 0 < whole.usage.completion_tokens <= 8, whole
    chunks = list(litellm.completion(messages=TALK, stream=True, stream_options={"include_usage": True}, **asked))
    built = litellm.stream_chunk_builder(chunks, messages=TALK)
    assert built.choices[0].message.content == found, (built, whole)
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert litellm.completion(messages=TALK, tools=[LOOK], **asked).choices

    async def many() -> list[object]:
        return await asyncio.gather(*(litellm.acompletion(messages=TALK, **asked) for _ in range(4)))

    assert [answer.choices[0].message.content for answer in asyncio.run(many())] == [found] * 4


def refused(asked: dict[str, object], error: type[Exception]) -> None:
    """An error comes as LiteLLM's own."""
    try:
        litellm.completion(messages=TALK, **asked)
    except error:
        return
    raise AssertionError("it was not refused")


def ask(path: str, body: object = None) -> bytes:
    """The proxy."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer sk-proxy"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)) as answer:
        return answer.read()


def up() -> bool:
    try:
        return bool(ask("/health/liveliness"))
    except (urllib.error.URLError, ConnectionError):
        return False


def by_proxy() -> None:
    """What its own clients ask it goes on to us."""
    by = {
        "by-openai": (OPENAI["model"], OPENAI["api_base"]),
        "by-anthropic": (ANTHROPIC["model"], ANTHROPIC["api_base"]),
    }
    models = [
        {"model_name": name, "litellm_params": {"model": model, "api_base": base, "api_key": KEY}}
        for name, (model, base) in by.items()
    ]
    fields = {"model_list": models, "general_settings": {"master_key": "sk-proxy"}}
    Path("proxy.yaml").write_text(json.dumps(fields))
    program = Path(sys.executable).with_name("litellm")
    proxy = subprocess.Popen([program, "--config", "proxy.yaml", "--host", "127.0.0.1", "--port", PORT])
    try:
        end = time.monotonic() + STARTS_S
        while not up():
            assert proxy.poll() is None and time.monotonic() < end, "the proxy did not start"
            time.sleep(0.5)
        for model in ("by-openai", "by-anthropic"):
            body = {"model": model, "messages": TALK, "max_tokens": 8, "temperature": 0.0}
            document = json.loads(ask("/v1/chat/completions", body))["choices"][0]["message"]["content"]
            assert document
            assert b"[DONE]" in ask("/v1/chat/completions", {**body, "stream": True})
            body["messages"] = TALK[1:]
            assert json.loads(ask("/v1/messages", body))["content"][0]["text"]
            assert b"message_stop" in ask("/v1/messages", {**body, "stream": True})
    finally:
        proxy.terminate()
        proxy.wait()


session(OPENAI)
session(ANTHROPIC)
text = litellm.text_completion(prompt="Hello", **{**OPENAI, "model": "text-completion-openai/tiny"})
assert text.choices[0].text
refused({**OPENAI, "api_key": "sk-wrong", "num_retries": 0}, litellm.AuthenticationError)
refused({**ANTHROPIC, "api_key": "sk-wrong", "num_retries": 0}, litellm.AuthenticationError)
refused({**OPENAI, "model": "openai/nobody", "num_retries": 0}, litellm.NotFoundError)
by_proxy()
print("fine")
