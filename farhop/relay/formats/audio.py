"""Reading bodies of transcriptions and translations: forms with an audio file.

No prefix cache holds audio, so there is no canonical text. Never decodes the file: it is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance.estimate.estimates import BYTES_PER_TOKEN
from farhop.relay.formats import form, preferences
from farhop.relay.formats.prompt import Prompt, invalid

if TYPE_CHECKING:
    from farhop.relay.formats.field_guard import Guard

# Whisper's encoder gives 1,500 positions for 30 s, which is 50 a second. Speech is mostly sent compressed, at about
# 64 kbit/s = 8,000 B/s: 160 B for each position. Uncompressed audio counts for up to four times what it costs.
FILE_BYTES_PER_TOKEN = 160.0
MODEL_BYTES_MAX = 256

_YES = frozenset(("true", "1", "yes", "on", "t", "y"))


def read(body: bytes, _path: bytes, headers: bytes, guard: Guard) -> Prompt:
    """A transcription's or translation's form. Raises BodyError."""
    asked = form.read(body, headers)
    guard.form(asked.names)
    model = asked.text("model")
    if not model or len(model) > MODEL_BYTES_MAX:
        raise invalid("model", "`model` is missing: give it as a field of the form")
    given = {name: asked.text(name) for name in preferences.RESIDENCY}
    size = asked.file_bytes("file")
    if not size:
        raise invalid("file", "`file` is missing or empty: give the sound as a file of the form")
    return Prompt(
        model,
        b"",
        stream=(asked.text("stream") or "").strip().lower() in _YES,
        opaque_bytes=round(size / FILE_BYTES_PER_TOKEN * BYTES_PER_TOKEN),
        preferences=preferences.read({name: value for name, value in given.items() if value is not None}),
    )
