"""How each kind of request is read: one table, from the kind to its reader. `Kind.MODELS` has no body.

The one place that turns what can be wrong with a body into an error for the client. Never looks into a body itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.relay.formats import audio, kserve, lenient, messages, openai, preferences, ranking, responses, shape
from farhop.relay.formats.field_guard import DEFAULT, PLAIN
from farhop.relay.formats.form import names_other_charset
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import NO_PREFERENCES, BodyError, header, invalid
from farhop.relay.formats.shape import HeavyError
from farhop.relay.http.head import without

if TYPE_CHECKING:
    from collections.abc import Callable

    from farhop.relay.formats.field_guard import Guard, Reader
    from farhop.relay.formats.prompt import Prompt

__all__ = ["BodyError", "HeavyError", "read"]

READERS: dict[Kind, Reader] = {
    Kind.CHAT: openai.chat,
    Kind.MESSAGES: messages.messages,
    Kind.COUNT_TOKENS: messages.count_tokens,
    Kind.RESPONSES: responses.responses,
    Kind.CHAT_BATCH: openai.chat_batch,
    Kind.COMPLETION: openai.completion,
    Kind.EMBEDDINGS: openai.embeddings,
    Kind.RERANK: ranking.rerank,
    Kind.SCORE: ranking.score,
    Kind.GENERATIVE_SCORE: ranking.generative_score,
    Kind.TOKENIZE: ranking.tokenize,
    Kind.DETOKENIZE: ranking.detokenize,
    Kind.TRANSCRIPTION: audio.read,
    Kind.TRANSLATION: audio.read,
    Kind.INFER: kserve.infer,
    Kind.GENERATE: kserve.generate,
    Kind.GENERATE_STREAM: kserve.generate_stream,
}
# Those that are JSON from end to end, and the member that may hold many numbers.
_JSON: dict[Kind, str] = {
    Kind.CHAT: "",
    Kind.MESSAGES: "",
    Kind.COUNT_TOKENS: "",
    Kind.RESPONSES: "",
    Kind.CHAT_BATCH: "",
    Kind.COMPLETION: "prompt",
    Kind.EMBEDDINGS: "input",
    Kind.RERANK: "",
    Kind.SCORE: "",
    Kind.GENERATIVE_SCORE: "items",
    Kind.TOKENIZE: "",
    Kind.DETOKENIZE: "tokens",
    Kind.GENERATE: "",
    Kind.GENERATE_STREAM: "",
}


# Whose engines read bodies so (farhop.relay.formats.lenient). Triton's server does not.
_BY_PYDANTIC = frozenset(_JSON) - {Kind.GENERATE, Kind.GENERATE_STREAM}
_INFER = Kind.INFER  # to look up an enum's member is a call
BOM = b"\xef\xbb\xbf"


def without_bom(kind: Kind, body: bytes) -> bytes:
    """The body without the mark that some editors put before UTF-8: JSON has none, and its readers may pass over it
    (RFC 8259 §8.1), as Python's and llama.cpp's do."""
    return body[len(BOM) :] if kind in _JSON and body.startswith(BOM) else body


def renames(kind: Kind) -> bool:
    """Whether such a body names the model, as JSON, so that it can be replaced. In Triton's API the path does."""
    return kind in _BY_PYDANTIC


AS_JSON = b"\r\ncontent-type: application/json\r\n"
"""How header lines, with a line's end before them, say so."""


def told_as_json(kind: Kind, lines: bytes) -> bytes:
    """Header lines ready to be sent on, with a body that was read as JSON: whatever its `Content-Type` was, if any.
    curl's `-d` and Python's urllib say a form, and LiteLLM's proxy reads another model where it is told of one."""
    if kind not in _JSON and (kind is not Kind.INFER or kserve.has_raw(lines)):
        return lines
    return without(lines, b"content-type") + AS_JSON[2:]


def _none() -> str:
    return ""


def read(
    kind: Kind, body: bytes, path: bytes = b"", headers: bytes = b"", guard: Guard = DEFAULT,
    default_model: Callable[[], str] = _none, *, light: bool = False,
) -> Prompt:  # fmt: skip
    """Read a request's body: `path` is without its query, `headers` are its header lines ready to be sent on,
    `guard` says what engines may be sent, `default_model` which model is meant if none is named, "" if that is unknown.
    `light`: a body that takes longer to read than other requests should wait is not read.

    Raises BodyError naming the field; HeavyError for what is not light.
    """
    try:
        found, outline = NO_PREFERENCES, None
        if (numeric := _JSON.get(kind)) is not None:
            if b"charset" in headers.lower():
                _check_charset(headers)
            if len(body) <= shape.SMALL_BYTES and body[:1] == b"{":
                fields = shape.once(body)
            else:
                fields, outline = shape.outlined(body, numeric, light=light)
            if not (isinstance(fields, dict) and PLAIN.issuperset(fields)):  # else there is nothing to check
                guard.fields(fields)
            if fields is not None and not preferences.READ.isdisjoint(fields):
                found = preferences.read(fields)
        prompt = openai.chat_of(outline, guard) if outline is not None and kind is Kind.CHAT else None
        if prompt is None:
            if light and kind is _INFER:  # its reader looks at the shape itself: of the JSON before raw tensors
                prompt = kserve.infer(body, path, headers, guard, light=True)
            else:
                prompt = READERS[kind](body, path, headers, guard)
        if prompt.model and found is NO_PREFERENCES:
            return prompt
        if found is not NO_PREFERENCES:
            prompt = replace(prompt, preferences=found)
        return prompt if prompt.model else _of(prompt, default_model())
    except msgspec.ValidationError as error:
        if kind in _BY_PYDANTIC and (as_read := lenient.as_read(body)) is not None:
            return read(kind, as_read, path, headers, guard, default_model)
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BodyError(outcome.INVALID_JSON, f"the body is not valid JSON: {error}{_remedy(body, error)}") from None
    except RecursionError:
        raise BodyError(outcome.INVALID_JSON, "the body is nested too deeply") from None


def _check_charset(headers: bytes) -> None:
    """JSON is UTF-8 (RFC 8259 §8.1). An engine that uses another charset (aiohttp's `json()` decodes UTF-7, if told to)
    would read another body out of the same bytes. Raises BodyError."""
    if names_other_charset(header(headers, b"content-type") or b""):
        raise invalid("content-type", "`Content-Type` names a charset that is not read: send JSON in UTF-8")


def _remedy(body: bytes, error: Exception) -> str:
    """Usual mistakes of clients: gzip without its header, UTF-16 (a NUL beside the first brace), and half of an
    emoji."""
    if not body.strip():
        return "; there is none"
    if body.startswith(b"\x1f\x8b"):
        return "; it is compressed: send it as it is"
    if b"\0" in body[:4]:
        return "; it is UTF-16 or UTF-32: send it in UTF-8"
    # Of half a pair within the last bytes msgspec says that the body was cut short; its end shows that it was not.
    halved = "surrogate" in str(error) or (b"\\ud" in body.lower() and body.rstrip().endswith(b"}"))
    return "; a character was cut in two (half a surrogate pair): cut texts between characters" if halved else ""


def _of(prompt: Prompt, model: str) -> Prompt:
    """A prompt whose body names no model."""
    if not model:
        raise invalid("model", "`model` is missing: name one of those that `GET /v1/models` lists")
    return replace(prompt, model=model, lacks_model=True)


def _invalid_field(text: str) -> BodyError:
    problem, _, path = text.partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if param is not None and param.startswith("[...]"):  # of a member that is not known here, whose name is not told
        param, path = None, ""
    if "missing required field `" in problem:
        missing = problem.split("`")[1]
        param = f"{param}.{missing}" if param else missing
    at = f" (at {param})" if param and path else ""
    return BodyError(outcome.INVALID_FIELD, f"{problem}{at}", param)
