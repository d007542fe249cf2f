"""Writes a tokenizer.json and a chat template for emulated engines, so that a balancer tokenizes prompts as they do.

Byte-level BPE in the format of Hugging Face's library, by hand: each byte is a token, and so is each word that an
emulated model generates, with the space before it. The template does what api.render_chat does, without tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farhop_lab.engine.core.text import VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"

_CHAT = """\
{%- if tools %}{{ raise_exception('the emulated template has no tools') }}{% endif %}
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] or [] %}
{{- part['text'] }}
{%- endfor %}
{%- endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}"""


def write(folder: Path) -> int:
    """Write both into the folder, which is created if missing; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER).write_bytes(msgspec.json.encode(_tokenizer()))
    (folder / TEMPLATE).write_text(_CHAT)
    return 0


def _alphabet() -> list[str]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others from U+0100 on (as GPT-2)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    spelled = _alphabet()
    vocabulary = {char: byte for byte, char in enumerate(spelled)}
    merges: list[list[str]] = []
    for word in VOCABULARY:
        token = spelled[word[0]]
        for byte in word[1:]:
            merge = [token, spelled[byte]]
            token += spelled[byte]
            if token not in vocabulary:
                vocabulary[token] = len(vocabulary)
                merges.append(merge)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
