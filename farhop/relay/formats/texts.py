"""Prompts that are not chats: a text, a list of token ids, or lists of either.

A module of its own, since ids are checked with NumPy, which takes as long to import as all the rest: commands that read
no body do without it. Never holds on to a body.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from farhop.relay.formats.prompt import ITEM, TOKENS, BodyError, invalid

TOKEN_MAX = (1 << 31) - 1


class Texts(NamedTuple):
    """Prompts as they go into a chain: `items` of them. `is_text`: it is text, not token ids.

    `surplus_bytes`: by how much ids in digits are longer than their text.
    """

    canonical: bytes
    items: int
    is_text: bool
    surplus_bytes: int = 0


_TOKEN_DIGITS = len(str(TOKEN_MAX))
_LONG_IDS_MAX = 1 << 16  # with this many digits: no vocabulary has any
_LARGEST = str(TOKEN_MAX).encode()
_TOKEN_BYTES = 4  # of text per token, until its model is known better
_BLANKS = b" \t\r\n"
_text = msgspec.json.Decoder(str).decode
_texts = msgspec.json.Decoder(list[str]).decode


def texts(value: bytes | msgspec.Raw, param: str) -> Texts:
    """One text, one list of token ids, or a list of either, as JSON. Raises BodyError.

    Token ids are never built: their digits are the text of the chain, so that equal ids give equal prefixes.
    """
    raw = bytes(value)
    if raw[:1] == b'"':
        canonical = _text(raw).encode()
        if not canonical:
            raise _empty(param)
        return Texts(canonical, 1, is_text=True)
    if raw[:1] != b"[":
        raise _no_texts(param)
    first = raw[1:64].lstrip(_BLANKS)[:1] or raw[1:].lstrip(_BLANKS)[:1]
    if first == b"]":
        raise _empty(param)
    if first == b'"':
        try:
            given = _texts(raw)
        except msgspec.ValidationError:
            raise _no_texts(param) from None
        return Texts(ITEM.join([text.encode() for text in given]), len(given), is_text=True)
    packed = raw.translate(None, _BLANKS)[1:-1]
    return _ids([packed] if first.isdigit() else _lists(packed, param), param)


def _lists(packed: bytes, param: str) -> list[bytes]:
    """The content of each of several flat lists."""
    lists = packed[1:-1].split(b"],[")
    between = len(lists) - 1
    if packed[:1] != b"[" or packed[-1:] != b"]" or {packed.count(b"["), packed.count(b"]")} != {between + 1}:
        raise _no_texts(param)
    return lists


def _ids(lists: list[bytes], param: str) -> Texts:
    """Lists of token ids: the bytes between the brackets of each."""
    digits = lists[0] if len(lists) == 1 else b",".join(filter(None, lists))
    if digits.translate(None, b"0123456789,"):
        raise _no_texts(param)
    commas = np.frombuffer(digits, np.uint8) == 0x2C
    if not _in_range(digits, commas):
        raise _no_texts(param)
    count = int(np.count_nonzero(commas)) + 1 if digits else 0
    canonical = ITEM.join([TOKENS + one for one in lists])
    surplus_bytes = sum(map(len, lists)) - _TOKEN_BYTES * count
    return Texts(canonical, len(lists), is_text=False, surplus_bytes=surplus_bytes)


def _in_range(digits: bytes, commas: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Whether no number between the commas is above TOKEN_MAX; none begins with a 0 but 0. `commas` by byte."""
    near = commas
    for step in (1, 2, 4, 2):  # whether there is one among two bytes, four, eight, ten
        near = near[:-step] | near[step:]
    long = len(near) - int(np.count_nonzero(near))
    if not 0 < long <= _LONG_IDS_MAX:
        return not long
    starts = np.concatenate(([0], np.flatnonzero(commas) + 1))
    lengths = np.diff(starts, append=len(digits) + 1) - 1
    if int(lengths.max()) != _TOKEN_DIGITS:
        return int(lengths.max()) < _TOKEN_DIGITS
    # As many digits as the largest: they compare as text does, eight of them and two.
    longest = starts[lengths == _TOKEN_DIGITS]
    eight = np.ndarray((len(digits) - 7,), ">u8", digits, 0, (1,))[longest]
    two = np.ndarray((len(digits) - 1,), ">u2", digits, 0, (1,))[longest + 8]
    most, rest = int.from_bytes(_LARGEST[:8], "big"), int.from_bytes(_LARGEST[8:], "big")
    return not bool(np.any((eight > most) | ((eight == most) & (two > rest))))


def _empty(param: str) -> BodyError:
    return invalid(param, f"`{param}` must not be empty")


def _no_texts(param: str) -> BodyError:
    return invalid(param, f"`{param}` must be a string, a list of strings, or lists of token ids within 0..{TOKEN_MAX}")
