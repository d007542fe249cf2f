"""Sound becomes windows of positions, and words in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.text import token_count
from farhop_lab.engine.formats import sound

WAV = b"RIFF\0\0\0\0WAVEfmt " + bytes(12) + (32_000).to_bytes(4, "little") + bytes(12)


def test_a_wav_has_its_rate_and_other_formats_count_as_compressed() -> None:
    assert sound.seconds_of(WAV + bytes(32_000 * 4 - len(WAV))) == pytest.approx(4.0)
    assert sound.seconds_of(bytes(16_000)) == pytest.approx(2.0)
    assert sound.seconds_of(WAV.replace((32_000).to_bytes(4, "little"), bytes(4)) + bytes(10_000)) < 11


def test_a_window_costs_what_whisper_pads_it_to() -> None:
    first, second, third = sound.windows(bytes(8_000 * 70))
    assert {token_count(window.prompt) for window in (first, second, third)} == {1500}
    assert [window.max_tokens for window in (first, second, third)] == [75, 75, 25]
    assert sound.windows(b"x")[0].max_tokens == 1


@given(st.integers(1, 3_000_000))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_windows_are_all_of_the_sound(size: int) -> None:
    made = sound.windows(bytes(size))
    assert len(made) == -(-size // 240_000)


def test_the_answer_has_its_seconds() -> None:
    answer = sound.transcription(bytes(8_001), [" the sea", " and far"])
    assert answer == {"text": "the sea and far", "usage": {"type": "duration", "seconds": 2}}
