"""Audio, as a Whisper behind vLLM takes it: windows of 30 s, 50 positions a second, and about as many words as spoken.

Pure. The text is the model's own, a function of the bytes of the audio. Never decodes audio beyond a WAV's header.
"""

from __future__ import annotations

import math
from typing import Any

import xxhash

from farhop_lab.engine.core.sequence import EngineRequest
from farhop_lab.engine.core.text import TOKEN_BYTES

WINDOW_S = 30.0
POSITIONS_PER_S = 50
WORDS_PER_S = 2.5  # 150 a minute; a word of this model is one token
COMPRESSED_BYTES_PER_S = 8_000.0  # 64 kbit/s
_SLOWEST_BYTES_PER_S = 1_000
_RATE_AT = 28  # offset of the bytes per second in a WAV's header


def seconds_of(sound: bytes) -> float:
    """Its length in seconds: by a WAV's header; any other format counts as 64 kbit/s."""
    bytes_per_s = COMPRESSED_BYTES_PER_S
    if sound[:4] == b"RIFF" and sound[8:12] == b"WAVE":
        bytes_per_s = max(_SLOWEST_BYTES_PER_S, int.from_bytes(sound[_RATE_AT : _RATE_AT + 4], "little"))
    return len(sound) / bytes_per_s


def windows(sound: bytes) -> list[EngineRequest]:
    """What the engine computes: each window's positions, then its words. `sound` is not empty."""
    seconds = seconds_of(sound)
    size = math.ceil(len(sound) * min(1.0, WINDOW_S / seconds))
    pieces = [sound[at : at + size] for at in range(0, len(sound), size)]
    return [_window(piece, seconds * len(piece) / len(sound)) for piece in pieces]


def _window(sound: bytes, seconds: float) -> EngineRequest:
    digest = xxhash.xxh3_64_hexdigest(sound).encode()
    # Whisper pads each window to 30 s.
    prompt = digest * (int(WINDOW_S * POSITIONS_PER_S) * TOKEN_BYTES // len(digest))
    words = max(1, round(seconds * WORDS_PER_S))
    return EngineRequest(prompt, max_tokens=words, ignore_eos=True)


def transcription(sound: bytes, texts: list[str]) -> dict[str, Any]:
    """The answer."""
    usage = {"type": "duration", "seconds": math.ceil(seconds_of(sound))}
    return {"text": "".join(texts).strip(), "usage": usage}
