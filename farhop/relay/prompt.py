"""What routing needs of a body, whatever its kind: the words that all readers of bodies share.

A reader turns a body into a Prompt or raises a BodyError that names the field. Never holds on to a body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
import xxhash

from farhop.balance import outcome
from farhop.balance.outcome import Outcome

# Bytes that UTF-8 never uses (RFC 3629 §1), so that no text can imitate them and no two prompts collide.
ITEM, FIELD, PART, MEDIA, TOOLS, TOKENS, PAIR = (bytes((0xFF - i,)) for i in range(7))
TOKEN_MAX = (1 << 31) - 1  # so that a token's first byte is none of them

BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
OURS = ("kv_transfer_params", *BOOTSTRAP)

NO_OUTPUT = 0  # `max_tokens` of what generates nothing

_sorted_json = msgspec.json.Encoder(order="deterministic")


class BodyError(Exception):
    """A body that cannot be routed. `param` names the field; the text names the remedy."""

    def __init__(self, reason: Outcome, detail: str, param: str | None = None) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.param = reason, detail, param


class Said(msgspec.Struct, frozen=True):
    """How a text answer goes on from its prompt: the member that holds it, in a stream's events as in a document, and
    what comes before it in the canonical text of the next turn."""

    key: str
    opening: bytes


class Prompt(msgspec.Struct, frozen=True):
    """What routing needs of a body.

    `canonical` is the text that a prefix cache would hold, b"" where there is none. `unspelled_bytes` is the rest of
    what an engine computes before its first token, in bytes of text that cost as much: images and audio, a query
    repeated for each document. `max_tokens` 0: nothing is generated. `hide_usage`: the client did not ask for the usage
    of its stream, so that we ask (`openai.ask_for_usage`) and keep the answer to ourselves. `divisible`: one prompt and
    one answer that tells nothing of the prompt, so that one engine may prefill and another decode. `said` is None where
    it cannot be told how the next turn's text will go on from this one.
    """

    model: str
    canonical: bytes
    stream: bool = False
    hide_usage: bool = False
    max_tokens: int | None = None
    cache_salt: str = ""
    unspelled_bytes: int = 0
    divisible: bool = False
    said: Said | None = None


# Body, path (without its query), the request's header lines ready to be sent on (farhop.relay.head). A reader raises
# BodyError, or msgspec's errors.
Reader: TypeAlias = Callable[[bytes, bytes, bytes], Prompt]


class JsonBody(msgspec.Struct):
    """What every JSON body is looked at for. `kv_transfer_params` (vLLM) and `bootstrap_host`, `_port`, `_room`
    (SGLang) name hosts whose memory an engine shall read: that is ours to write, and never a client's. vLLM adds what
    is in `vllm_xargs` to the same arguments."""

    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None


T = TypeVar("T", bound=JsonBody)


def json_reader(shape: type[T], understand: Callable[[T], Prompt]) -> Reader:
    """The reader of a kind whose body is a JSON object that says everything. `shape` is what of it is looked at."""
    decode = msgspec.json.Decoder(shape).decode

    def read(body: bytes, _path: bytes, _headers: bytes) -> Prompt:
        asked = decode(body)
        keep_to_ours(asked)
        return understand(asked)

    return read


def keep_to_ours(asked: JsonBody) -> None:
    """Raises BodyError where a client says what is ours to say."""
    more = asked.vllm_xargs
    if asked.kv_transfer_params is not None or (isinstance(more, dict) and "kv_transfer_params" in more):
        raise not_yours("kv_transfer_params")
    if asked.bootstrap_host is None and asked.bootstrap_port is None and asked.bootstrap_room is None:
        return
    raise not_yours(next(name for name in BOOTSTRAP if getattr(asked, name) is not None))


def not_yours(param: str) -> BodyError:
    """A client says where an engine shall fetch KV from."""
    return invalid(param, f"`{param}` is not for clients to set: leave it out")


def invalid(param: str, detail: str) -> BodyError:
    """A field that is there and wrong, or missing."""
    return BodyError(outcome.INVALID_FIELD, detail, param)


def header(lines: bytes, name: bytes) -> bytes | None:
    """The value of a header that may stand once. `name` in lower case. Raises BodyError where it stands twice."""
    start = name + b": "
    values = [line[len(start) :] for line in lines.split(b"\r\n") if line.startswith(start)]
    if len(values) > 1:
        raise invalid(name.decode(), f"header `{name.decode()}` may stand once only")
    return values[0] if values else None


def in_order(value: Any) -> bytes:
    """JSON in which the order of keys does not matter."""
    return _sorted_json.encode(value)


def medium(value: Any) -> tuple[bytes, int]:
    """What is no text: its hash, and its size in bytes."""
    blob = in_order(value)
    return MEDIA + xxhash.xxh3_128_hexdigest(blob).encode(), len(blob)


def texts(value: str | list[Any], param: str) -> bytes:
    """One text, one list of token ids, or a list of either. Raises BodyError."""
    if not value:
        raise invalid(param, f"`{param}` must not be empty")
    if isinstance(value, str):
        return value.encode()
    # A list of token ids is one prompt; anything else is a list of prompts.
    return ITEM.join(_item(item, param) for item in ([value] if isinstance(value[0], int) else value))


def _item(item: object, param: str) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, list) and all(type(t) is int and 0 <= t <= TOKEN_MAX for t in item):
        # Four bytes each, so that equal ids give equal prefixes.
        return TOKENS + b"".join(t.to_bytes(4, "big") for t in item)
    detail = f"`{param}` must be a string, a list of strings, or lists of token ids within 0..{TOKEN_MAX}"
    raise invalid(param, detail)
