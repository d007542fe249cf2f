"""Captures what real engines say, for the tests that run without them: `python tests/engines/capture.py`.

Starts what `make engines` installed, asks each of PAGES, and writes an answer a file into tests/pages/ENGINE-VERSION:
what was asked, and status, headers and body as they came; of vLLM's KV events the frames. tests/pages/engine_pages.py
reads them. Paths of this machine are the only thing changed: they begin with /models there.
"""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(ROOT / "tests/flows")]

import real  # noqa: E402

PAGES = ROOT / "tests/pages"
HEADERS = ("content-type", "transfer-encoding", "allow")
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
LONG = [{"role": "user", "content": "of the river and the law " * 30}]
HELLO = [{"role": "user", "content": "hello there"}]
LOOK = {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
    "additionalProperties": False}}  # fmt: skip
TOOLS = [{"type": "function", "function": LOOK}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
BEGUN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "It is "}]
GO_ON = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
IDS = {"return_token_ids": True}

# By file name: path, and the body without `model`, `max_tokens` and what makes it deterministic; None: a GET.
BOTH: dict[str, tuple[str, Any]] = {
    "models": ("/v1/models", None),
    "health": ("/health", None),
    "chat": (CHAT, {"messages": HELLO}),
    "chat-stream": (CHAT, {"messages": HELLO, "stream": True}),
    "chat-stream-usage": (CHAT, {"messages": HELLO, **USAGE}),
    "chat-stream-continuous-usage": (
        CHAT,
        {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat-logprobs": (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    "chat-tools": (CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 64}),
    "chat-tools-stream": (
        CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 64, **USAGE}
    ),
    "completion": (TEXT, {"prompt": "hello"}),
    "completion-stream-usage": (TEXT, {"prompt": "hello", **USAGE}),
    "completion-of-ids": (TEXT, {"prompt": [11, 12, 13]}),
    "messages": (MESSAGES, {"messages": HELLO, "system": "Be brief."}),
    "messages-stream": (MESSAGES, {"messages": HELLO, "stream": True}),
    # Sent before as a chat: some of it is cached.
    "chat-long": (CHAT, {"messages": LONG}),
    "chat-cached": (CHAT, {"messages": LONG}),
    "chat-cached-stream": (CHAT, {"messages": LONG, **USAGE}),
    "messages-cached": (MESSAGES, {"messages": LONG}),
    "messages-cached-stream": (MESSAGES, {"messages": LONG, "stream": True}),
    "responses-cached": (RESPONSES, {"input": LONG, "store": False}),
    "count-tokens": ("/v1/messages/count_tokens", {"messages": HELLO}),
    "responses": (RESPONSES, {"input": "hello", "store": False}),
    "responses-stream": (RESPONSES, {"input": "hello", "store": False, "stream": True}),
    "tokenize": ("/tokenize", {"prompt": "hello", "content": "hello"}),
    "error-no-such-path": ("/v1/nowhere", {}),
    "error-no-such-path-get": ("/v1/nowhere", None),
    "error-wrong-method": (CHAT, None),
    "error-no-such-model": (CHAT, {"messages": HELLO, "model": "nobody"}),
    "error-no-json": (CHAT, b"{"),
    "error-no-messages": (CHAT, {}),
    "error-wrong-type": (CHAT, {"messages": HELLO, "temperature": "hot"}),
    "error-out-of-range": (CHAT, {"messages": HELLO, "temperature": -1.0}),
    "error-too-long": (TEXT, {"prompt": [11] * 5000}),
    "error-too-long-stream": (TEXT, {"prompt": [11] * 5000, "stream": True}),
    "error-messages": (MESSAGES, {"messages": HELLO, "temperature": "hot"}),
    "error-responses": (RESPONSES, {"input": 7, "store": False}),
    "error-not-an-embedder": ("/v1/embeddings", {"input": "hello"}),
}  # fmt: skip
VLLM: dict[str, tuple[str, Any]] = {
    **BOTH,
    "version": ("/version", None),
    "chat-ids": (CHAT, {"messages": HELLO, **IDS}),
    "chat-ids-stream": (CHAT, {"messages": HELLO, **IDS, **USAGE}),
    "completion-ids": (TEXT, {"prompt": [11, 12, 13], **IDS}),
    "completion-ids-stream": (TEXT, {"prompt": [11, 12, 13], **IDS, **USAGE}),
    "chat-goes-on-ids": (CHAT, {**GO_ON, **IDS}),
    "chat-goes-on-ids-stream": (CHAT, {**GO_ON, **IDS, **USAGE}),
    "error-no-such-adapter": (CHAT, {"messages": HELLO, "model": "adapted-not"}),
}
LLAMA: dict[str, tuple[str, Any]] = {
    **BOTH,
    "props": ("/props", None),
    "slots": ("/slots", None),
    "metrics": ("/metrics", None),
    "chat-goes-on": (CHAT, GO_ON),
    "completion-ids": ("/completion", {"prompt": [11, 12, 13], "return_tokens": True}),
    "completion-ids-stream": ("/completion", {"prompt": [11, 12, 13], "return_tokens": True, "stream": True}),
}


def ask(engine: real.RealEngine, path: str, body: Any) -> dict[str, Any]:
    """One answer, whatever it is."""
    address = urlsplit(engine.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120.0)
    if isinstance(body, dict):
        short = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body = {"model": "tiny", short: 6, "seed": 1, "temperature": 0.0, **body}
        if path in (MESSAGES, "/v1/messages/count_tokens"):
            del body["seed"]
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
    answer = connection.getresponse()
    headers = {name.lower(): value for name, value in answer.getheaders() if name.lower() in HEADERS}
    document = answer.read().decode()
    connection.close()
    asked = body.decode() if isinstance(body, bytes) else body
    if len(json.dumps(asked)) > 4096:
        asked = "too long to be kept"
    return {"path": path, "asked": asked, "status": answer.status, "headers": headers, "body": document}


def write(folder: Path, name: str, page: Any) -> None:
    """One file, in which no path of this machine stands."""
    text = json.dumps(page, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{name}.json").write_text(text.replace(str(real.HOME / "tiny"), "/models"))


def emptied(name: str) -> Path:
    """Where the pages of this engine go. What was captured of another version is gone."""
    for old in PAGES.glob(f"{name.partition('-')[0]}-*"):
        shutil.rmtree(old)
    folder = PAGES / name
    folder.mkdir(parents=True)
    return folder


def frames(socket: zmq.Socket[bytes], within_s: float = 3.0) -> list[list[str]]:
    """All messages that come until none does for a while, each frame as base64."""
    seen = []
    while socket.poll(int(within_s * 1000)):
        seen.append([base64.b64encode(frame).decode() for frame in socket.recv_multipart()])
    return seen


def kv_events(engine: real.RealEngine) -> dict[str, Any]:
    """What an engine with a cache for 40 blocks says while it fills, overflows, serves an adapter and is emptied; and
    what it says again."""
    context = zmq.Context()
    live = context.socket(zmq.SocketType.SUB)
    live.subscribe(b"")
    live.connect(f"tcp://127.0.0.1:{engine.events}")
    time.sleep(1.0)
    steps = {}
    apart: dict[str, dict[str, Any]] = {
        "stored": {}, "stored behind what is held": {}, "stored by an adapter": {"model": "adapted"},
        "stored with a salt": {"cache_salt": "pepper"},
    }  # fmt: skip
    for n, (step, more) in enumerate(apart.items()):
        engine.ask(TEXT, {"model": "tiny", "prompt": [11] * 200 + [20 + n] * 100, "max_tokens": 2, **more})
        steps[step] = frames(live)
    for n in range(2):  # 62 blocks of 39
        engine.ask(TEXT, {"model": "tiny", "prompt": [n + 30] * 3990, "max_tokens": 2})
    steps["removed"] = frames(live)
    ask(engine, "/reset_prefix_cache", {})
    engine.ask(TEXT, {"model": "tiny", "prompt": [11] * 130, "max_tokens": 2})  # it is said with the next step
    steps["cleared"] = frames(live)
    again = context.socket(zmq.SocketType.DEALER)
    again.connect(f"tcp://127.0.0.1:{engine.events + 1}")
    again.send_multipart([b"", (2).to_bytes(8, "big")])
    steps["said again from 2"] = frames(again)
    context.destroy(linger=0)
    return steps


def vllm(logs: Path) -> None:
    """Of vLLM."""
    small = ("--num-gpu-blocks-override", "40")
    engine = real.vllm(logs, more=small, development=True)
    try:
        engine.ready()
        folder = emptied(f"vllm-{engine.ask('/version')['version'].partition('+')[0]}")
        write(folder, "kv-events", kv_events(engine))
        for name, (path, body) in VLLM.items():
            write(folder, name, ask(engine, path, body))
    finally:
        engine.stop()


def llama(logs: Path) -> None:
    """Of llama.cpp."""
    text = subprocess.run([real.LLAMA, "--version"], capture_output=True, text=True, check=True)
    version = (text.stdout + text.stderr).partition("version: ")[2].split()[0]
    engine = real.llama(logs)
    try:
        engine.ready()
        folder = emptied(f"llamacpp-{version}")
        for name, (path, body) in LLAMA.items():
            write(folder, name, ask(engine, path, body))
    finally:
        engine.stop()


def main() -> None:
    """Both, or those named."""
    with tempfile.TemporaryDirectory() as logs:
        for step in (llama, vllm):
            if step.__name__ in (sys.argv[1:] or ("llama", "vllm")):
                step(Path(logs))


if __name__ == "__main__":
    main()
