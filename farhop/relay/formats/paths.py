"""Which requests may pass: an allow-list of inference paths. Everything else is refused with a reason.

Never lets an engine's control surface through (`/flush_cache`, weight updates, LoRA loading, model repositories, ...):
a path that is not named here does not exist. Never normalises: a path passes letter by letter or not at all, so that no
server behind can read another path out of it (percent-encoding, `..`, `//`, `;parameters`, case, a trailing slash).
"""

from __future__ import annotations

import re
from enum import StrEnum
from urllib.parse import unquote

import msgspec

from farhop.balance import outcome
from farhop.balance.outcome import Outcome


class Kind(StrEnum):
    """What a path asks for, and so how its body is read (farhop.relay.formats.bodies).

    The value is the operation's name on spans: OpenTelemetry's GenAI word where there is one, else our own.
    """

    CHAT = "chat"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    RESPONSES = "responses"
    CHAT_BATCH = "chat_batch"
    COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    SCORE = "score"
    GENERATIVE_SCORE = "generative_score"
    TRANSCRIPTION = "transcription"
    TRANSLATION = "translation"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"
    MODELS = "models"
    VERSION = "version"

    __hash__ = str.__hash__  # Enum's own is Python, and every request looks its reader up

    @property
    def operation(self) -> str:
        """The operation's name in spans."""
        return "chat" if self in _CHATS else self.value


class PathRefusal(msgspec.Struct, frozen=True):
    """Why a method and path do not pass; `allow` is the `Allow` header's value where the method was wrong."""

    outcome: Outcome
    detail: str
    allow: str = ""


_PATHS: dict[bytes, tuple[bytes, Kind]] = {
    b"/v1/chat/completions": (b"POST", Kind.CHAT),
    b"/v1/completions": (b"POST", Kind.COMPLETION),
    b"/v1/messages": (b"POST", Kind.MESSAGES),
    b"/v1/messages/count_tokens": (b"POST", Kind.COUNT_TOKENS),
    b"/v1/responses": (b"POST", Kind.RESPONSES),
    b"/v1/models": (b"GET", Kind.MODELS),
    b"/version": (b"GET", Kind.VERSION),
    b"/v1/embeddings": (b"POST", Kind.EMBEDDINGS),
    b"/v1/audio/transcriptions": (b"POST", Kind.TRANSCRIPTION),
    b"/v1/audio/translations": (b"POST", Kind.TRANSLATION),
    # vLLM's own: several chats at once, and how likely each item is of a few labels.
    b"/v1/chat/completions/batch": (b"POST", Kind.CHAT_BATCH),
    b"/generative_scoring": (b"POST", Kind.GENERATIVE_SCORE),
    # The same under the names of Jina's and Cohere's APIs.
    b"/v1/rerank": (b"POST", Kind.RERANK),
    b"/v2/rerank": (b"POST", Kind.RERANK),
    b"/rerank": (b"POST", Kind.RERANK),
    b"/v1/score": (b"POST", Kind.SCORE),
    b"/score": (b"POST", Kind.SCORE),
    b"/tokenize": (b"POST", Kind.TOKENIZE),
    b"/detokenize": (b"POST", Kind.DETOKENIZE),
}

# The Open Inference Protocol (KServe V2) with Triton's generate extension. The model is part of the path. A name begins
# with a letter or digit, so it is never `.` or `..`, and holds nothing that a server would decode or split.
_SEGMENT = rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_ASKED = rb"infer|generate|generate_stream|ready"
_MODEL_PATH = re.compile(rb"/v2/models/(%b)(?:/versions/%b)?/(%b)" % (_SEGMENT, _SEGMENT, _ASKED))

# One of the list of models, as OpenAI's and Anthropic's SDKs ask for it; a name's `/` they write as %2F.
_MODELS, _ONE_MODEL = b"/v1/models/", re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:@/%-]{0,383}")

# APIs that keep state on one server: a balancer that may send the next request elsewhere cannot honour them.
_STATEFUL = (
    b"/v1/files", b"/v1/uploads", b"/v1/batches", b"/v1/batch/", b"/v1/responses/", b"/v1/messages/batches",
    b"/v1/conversations", b"/v1/assistants", b"/v1/threads", b"/v1/vector_stores",
)  # fmt: skip
# Beside what is stored: they keep nothing.
_STATELESS = (b"/v1/responses/input_tokens", b"/v1/responses/compact")

_CHATS = frozenset((Kind.CHAT, Kind.MESSAGES, Kind.RESPONSES, Kind.CHAT_BATCH))

_ALLOWED = ", ".join(
    [path.decode() for path in _PATHS] + ["/v2/models/MODEL[/versions/N]/infer|generate|generate_stream"]
)


KINDS = {(method, path): kind for path, (method, kind) in _PATHS.items()}
"""What `classify` says of those that come most."""


def classify(method: bytes, path: bytes) -> Kind | PathRefusal:
    """Name what a request asks for, or say why it does not pass. `path` is without its query."""
    known = _PATHS.get(path) or _of_a_model(path)
    if known is None:
        return _unknown(path)
    wanted, kind = known
    if method == wanted or (method == b"HEAD" and wanted == b"GET"):  # RFC 9110, 9.1: whoever serves one serves both
        return kind
    allow = "GET, HEAD" if wanted == b"GET" else wanted.decode()
    return PathRefusal(outcome.METHOD_NOT_ALLOWED, f"this path answers {allow} only", allow)


HEALTH, READY = (b"/health", b"/v2/health/live"), (b"/ready", b"/v2/health/ready")
"""For cloud load balancers, where clients come, and by the Open Inference Protocol's names for its clients: they tell
yes or no and nothing else, and nobody need say who asks."""

ROUTE = b"/v1/route"


def advised(path: bytes) -> bytes | None:
    """The path that a decision alone is asked for: what follows ROUTE, or chats; None where it is not asked."""
    if not path.startswith(ROUTE):
        return None
    asked = path[len(ROUTE) :]
    if not asked:
        return b"/v1/chat/completions"
    return asked if asked.startswith(b"/") else None


def model_in(path: bytes) -> str:
    """The model that a path names, "" where it names none."""
    match = _MODEL_PATH.fullmatch(path)
    return "" if match is None else match[1].decode("ascii")


def model_asked_about(path: bytes) -> str:
    """The model that a request to the list of models asks about; "" for all."""
    if asks_readiness(path):
        return model_in(path)
    return unquote(path[len(_MODELS) :].decode("ascii"))


def asks_readiness(path: bytes) -> bool:
    """Whether this request to the list of models asks, in the Open Inference Protocol's way, if one is served."""
    return not path.startswith(b"/v1/")


def _of_a_model(path: bytes) -> tuple[bytes, Kind] | None:
    if path.startswith(_MODELS):
        return (b"GET", Kind.MODELS) if _ONE_MODEL.fullmatch(path, len(_MODELS)) else None
    match = _MODEL_PATH.fullmatch(path)
    if match is None:
        return None
    return (b"GET", Kind.MODELS) if match[2] == b"ready" else (b"POST", Kind(match[2].decode("ascii")))


def _meant(path: bytes) -> bytes:
    """The path that a client with another base URL would have asked for, b"" if none: clients differ in whether `/v1`
    belongs to it."""
    bare = path.rstrip(b"/")
    for meant in (bare, b"/v1" + bare, bare.removeprefix(b"/v1")):
        if meant in _PATHS:
            return meant
    return b""


def _unknown(path: bytes) -> PathRefusal:
    if meant := _meant(path):
        detail = (
            f"this path is not served, but `{meant.decode()}` is: check the client's base URL (OpenAI's clients want "
            f"it with `/v1`, Anthropic's without). Only inference paths pass here, written exactly so: {_ALLOWED}"
        )
    elif path.startswith(_STATEFUL) and path not in _STATELESS:
        detail = "stateful APIs (files, batches, stored responses) are not routed: their state would live in one region"
    else:
        detail = f"only inference paths pass here, written exactly so: {_ALLOWED}"
    return PathRefusal(outcome.PATH_NOT_ALLOWED, detail)
