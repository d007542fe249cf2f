"""How each kind of request is read: one table, from the kind to its reader. `Kind.MODELS` has no body.

The one place that turns what can be wrong with a body into an error for the client. Never looks into a body itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from farhop.relay.formats import audio, kserve, openai, ranking, shape
from farhop.relay.formats.field_guard import DEFAULT
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError

if TYPE_CHECKING:
    from farhop.relay.formats.field_guard import Guard, Reader
    from farhop.relay.formats.prompt import Prompt

__all__ = ["BodyError", "read"]

_READERS: dict[Kind, Reader] = {
    Kind.CHAT: openai.chat,
    Kind.COMPLETION: openai.completion,
    Kind.EMBEDDINGS: openai.embeddings,
    Kind.RERANK: ranking.rerank,
    Kind.SCORE: ranking.score,
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
    Kind.COMPLETION: "prompt",
    Kind.EMBEDDINGS: "input",
    Kind.RERANK: "",
    Kind.SCORE: "",
    Kind.TOKENIZE: "",
    Kind.DETOKENIZE: "tokens",
    Kind.GENERATE: "",
    Kind.GENERATE_STREAM: "",
}


def read(kind: Kind, body: bytes, path: bytes = b"", headers: bytes = b"", guard: Guard = DEFAULT) -> Prompt:
    """Read a request's body: `path` is without its query, `headers` are its header lines ready to be sent on,
    `guard` says what engines may be told.

    Raises BodyError naming the field.
    """
    try:
        if (numeric := _JSON.get(kind)) is not None:
            guard.fields(shape.check(body, numeric))
        return _READERS[kind](body, path, headers, guard)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BodyError(outcome.INVALID_JSON, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BodyError(outcome.INVALID_JSON, "the body is nested too deeply") from None


def _invalid_field(text: str) -> BodyError:
    problem, _, path = text.partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if "missing required field `" in problem:
        missing = problem.split("`")[1]
        param = f"{param}.{missing}" if param else missing
    at = f" (at {param})" if param and path else ""
    return BodyError(outcome.INVALID_FIELD, f"{problem}{at}", param)
