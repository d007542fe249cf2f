"""What real engines said, as tests/engines/capture.py wrote it down: a folder for each engine and its version."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ENGINES = sorted(folder.name for folder in FOLDER.iterdir() if folder.name.startswith(("vllm-", "llamacpp-")))
(VLLM,) = (name for name in ENGINES if name.startswith("vllm-"))
(LLAMA,) = (name for name in ENGINES if name.startswith("llamacpp-"))


class Page:
    """One answer. `asked`: the request's body, None of a GET; `body` as it came, byte by byte."""

    def __init__(self, engine: str, name: str) -> None:
        told: dict[str, Any] = json.loads((FOLDER / engine / f"{name}.json").read_text())
        self.engine, self.name, self.path, self.asked = engine, name, told["path"], told["asked"]
        self.status: int = told["status"]
        self.headers: dict[str, str] = told["headers"]
        self.body: bytes = told["body"].encode()

    @property
    def streams(self) -> bool:
        """Whether it came as events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


def pages(*engines: str) -> list[Page]:
    """All of these engines', or of all."""
    return [
        Page(engine, file.stem)
        for engine in engines or ENGINES
        for file in sorted((FOLDER / engine).glob("*.json"))
        if file.stem != "kv-events"
    ]


def kv_events() -> dict[str, list[list[bytes]]]:
    """The frames of vLLM's KV events, by what made it say them."""
    told: dict[str, list[list[str]]] = json.loads((FOLDER / VLLM / "kv-events.json").read_text())
    return {
        step: [[base64.b64decode(frame) for frame in message] for message in messages]
        for step, messages in told.items()
    }
