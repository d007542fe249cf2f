"""The names a span may carry, and the gate that every attribute passes.

OpenTelemetry's semantic conventions where they have a name, `farhop.*` else. Invariant: no prompt, answer or credential
gets through: the standard names are an allow-list, content-like names are refused, texts are cut short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = str | bool | int | float | Sequence[str]

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
STATUS = "http.response.status_code"
PATH = "url.path"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

TENANT = "farhop.tenant"
REGION = "farhop.region"
ENTRY_REGION = "farhop.entry_region"
REPLICA = "farhop.replica"
PREFILL_REPLICA = "farhop.prefill_replica"
DECISION = "farhop.decision"
POLICY = "farhop.policy"
EPOCH = "farhop.law_epoch"
LAWFUL = "farhop.lawful"
HIT_TOKENS = "farhop.hit_tokens"
PROMPT_BYTES = "farhop.prompt_bytes"
WAIT_MS = "farhop.wait_ms"
RTT_MS = "farhop.rtt_ms"
PROMISED_TTFT_MS = "farhop.promised_ttft_ms"
TTFT_MS = "farhop.ttft_ms"
SPILL = "farhop.spilled"
ATTEMPT = "farhop.attempt"
ATTEMPTS = "farhop.attempts"
OUTCOME = "farhop.outcome"
REASONS = "farhop.reasons"
VERSION = "farhop.version"
SPLIT = "farhop.split"
ANSWER_CACHE = "farhop.cache"

STANDARD = frozenset({
    OPERATION, PROVIDER, REQUEST_MODEL, REQUEST_MAX_TOKENS, REQUEST_STREAM, RESPONSE_MODEL, RESPONSE_FIRST_CHUNK_S,
    FINISH_REASONS, INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, ERROR_TYPE, METHOD, STATUS, PATH, SERVER_ADDRESS,
    SERVER_PORT,
})  # fmt: skip

OWN_PREFIX = "farhop."
CONTENT_NAMES = frozenset({
    "answer", "authorization", "body", "completion", "content", "input", "key", "messages", "output", "prompt",
    "response", "secret", "text", "token", "tools",
})  # fmt: skip

TEXT_CHARS_MAX = 256
ITEMS_MAX = 64
NAME_CHARS_MAX = 64


def names_content(name: str) -> bool:
    """Whether the last word of a dotted name says that its value is what a client or an engine wrote, or a secret."""
    return name.rpartition(".")[2].lower() in CONTENT_NAMES


def admit(attributes: Mapping[str, Value]) -> tuple[dict[str, Value], int]:
    """The attributes that may be recorded, texts cut to 256 characters and lists to 64 items, and how many may not."""
    admitted: dict[str, Value] = {}
    for name, value in attributes.items():
        if name in STANDARD or (
            name.startswith(OWN_PREFIX) and len(name) <= NAME_CHARS_MAX and not names_content(name)
        ):
            kept = _bounded(value)
            if kept is not None:
                admitted[name] = kept
    return admitted, len(attributes) - len(admitted)


def _bounded(value: object) -> Value | None:
    if isinstance(value, str):
        return value[:TEXT_CHARS_MAX]
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(str(item)[:TEXT_CHARS_MAX] for item in value[:ITEMS_MAX])
    return None
