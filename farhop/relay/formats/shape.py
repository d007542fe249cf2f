"""How much work a JSON body causes, determined in passes over its bytes before anything is built from it.

A megabyte of `{},{},...` is 350,000 objects: a hundred times the work of a megabyte of prompt. Counted are the commas
and opening brackets outside strings, how deep they nest, and the escapes that must be undone, so that reading a body
costs no more than its size suggests. Code in a prompt passes: the contents of a string are text. Sequences of numbers
(token ids, tensors) are counted separately: they may be many in the one member whose reader does not build them. And no
key occurs twice in one object, since one reader may take the first and another the last. Never builds an object per
item, never decodes a long string; whether it is JSON at all is decided by the decoder.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from farhop.balance import outcome
from farhop.relay.formats.prompt import BodyError, fraction

# A body below this is bounded by its size: at most 4,096 items.
SMALL_BYTES = 8 * 1024
# The dearest items (a message, a document) take 0.3 us each to read and hash: 16,384 take less than 6 ms. 128 tools of
# 40 members each, or 2,000 messages with a call of a tool each, are some 10,000.
ITEMS_MAX = 16_384
FRACTIONS_MAX = 8192  # read twice in each tier, 0.9 us each: 8 ms
# Of one object. To put 16,384 in order takes msgspec 400 ms, where the first belongs behind all others; 512 take 0.5.
MEMBERS_MAX = 512
_WIDE = frozenset(("logit_bias",))  # by token, and many of them: they are never put in order
DEPTH_MAX = 128  # engines' own readers give up between 128 (serde) and 1,000 (Python)
# Of a body above SMALL_BYTES, where others wait for its reader: objects and lists count for four, since looking at one
# (a message, a part, a tool) takes 1 to 3 us; other values count as one. 1,600 parts, or 64 tools of 32 members.
LIGHT_ITEMS_MAX = 8192
_OPENER_ITEMS = 4
LIGHT_FRACTIONS_MAX = 1024
# Reading an integer takes the square of its digits: for 4,000 it is 120 us, and it is read four times.
DIGITS_MAX = 128
NUMBERS_MAX = 1 << 21  # 2.4 ns each to skip: 5 ms
ESCAPES_MAX = 1 << 21  # 3.3 ns each to undo: 7 ms; one in eight bytes of the longest body
# A longer string that is a value is left out of what is looked at: a body of long prompts has few of them.
_LONG_BYTES = 256
_BEGINNING_BYTES = 1 << 20
_DOUBTFUL_MAX = 4096  # quotes behind two backslashes: more are looked at in another way
_CUTS_MAX = 1024  # up to here slices are cheaper than a mask over every byte
_HOPS_MAX = 96  # up to here hops from quote to quote are cheaper than looking at every byte: 0.17 us each
_HOPS_FIRST, _FAR = 16, 8  # after that many hops an eighth must be done, else all would take too many
_RUN_MAX = 16  # backslashes before a quote that are counted one by one
_TEXT_BYTES = 2048  # of a body for each of its long texts: below, finding them costs more than it saves
MARK = "\x01"  # JSON has it as an escape only
_NAMED_BYTES_MAX = 64 * 1024  # naming the repeated key takes a slower reader

_BEHIND_A_VALUE = (b",", b"]", b"}")

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_Places: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

_BLOCK = DIGITS_MAX // 2
_EIGHT_DIGITS = np.uint64(0x0101_0101_0101_0101)  # as many truths

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_FLOAT_CHARS = 300  # of a fraction without an exponent that is none too many for a double


class HeavyError(Exception):
    """To read this body takes longer than others should wait for it."""


class _Fractions:
    """Leaves each number as it is, if there are many: rounding one such as `9e307` takes msgspec 14 us, a look here
    0.6."""

    left = 0
    light = False  # more of them are heavy, not refused

    def as_written(self, text: str) -> msgspec.Raw:
        self.left -= 1
        if self.left < 0:
            if self.light:
                raise HeavyError
            raise _too_much(f"the body has too many numbers with a fraction or an exponent: at most {FRACTIONS_MAX}")
        if len(text) > _FLOAT_CHARS or "e" in text or "E" in text:
            fraction(text)
        return msgspec.Raw(text)


_fractions = _Fractions()
_decode = msgspec.json.Decoder(float_hook=_fractions.as_written).decode
_encode = msgspec.json.Encoder().encode


class Spans(NamedTuple):
    """The positions of texts in a body: the beginning of each, after its quote, and its end, at the other quote."""

    begins: list[int]
    ends: list[int]


class Outline(msgspec.Struct, gc=False):
    """A body without escapes whose long texts are few: where they are, and `marked`, which says else the same and in
    which each of them is MARK and its number. Nothing else in that begins with MARK."""

    body: bytes
    spans: Spans
    marked: bytes

    def texts(self) -> list[memoryview] | None:
        """The texts, in UTF-8, as they are there. None if one is not JSON."""
        view, data = memoryview(self.body), np.frombuffer(self.body, np.uint8)
        found = [view[begin:end] for begin, end in zip(*self.spans, strict=True)]
        if _least(data) < 0x20 and any(_least(np.frombuffer(text, np.uint8)) < 0x20 for text in found):
            return None  # a control character
        if _most(data) >= 0x80:
            try:
                for text in found:
                    str(text, "utf-8")
            except UnicodeError:
                return None
        return found


_least, _most = np.minimum.reduce, np.maximum.reduce


def check(body: bytes | memoryview, numeric: str = "", *, light: bool = False) -> Any:
    """As `outlined`, without returning the outline."""
    return outlined(body, numeric, light=light)[0]


def outlined(body: bytes | memoryview, numeric: str = "", *, light: bool = False) -> tuple[Any, Outline | None]:
    """Refuse a body that causes more work than its size suggests, or in which a key occurs twice in one object.

    Returns what was read of it: every key, in its place, and every short value; long texts may be emptied, and a member
    of many numbers is left out. `numeric` is the member that may have them. And its outline, if it is worth one. Raises
    BodyError, or msgspec's errors; if only a `light` body may be read here, HeavyError for any other, before anything
    is built.
    """
    if body[0:1] != b"{" and bytes(body).lstrip(b" \t\r\n")[:1] != b"{":
        return None, None  # no object: the reader says so at its first byte
    body = bytes(body)
    if len(body) <= SMALL_BYTES:
        return once(body), None
    if len(body) > 2 * _BEGINNING_BYTES:
        _count(skeleton_of(body[:_BEGINNING_BYTES]))  # what is too much already here need not be looked at whole
    spans = _long_texts(body)
    skeleton = b"".join(_around(body, spans)) if spans.begins else body
    few = len(skeleton) <= SMALL_BYTES and skeleton.count(b"[") + skeleton.count(b"{") <= DEPTH_MAX
    numbers = 0 if few else _count(skeleton, numeric, light=light)
    if numbers:
        skeleton = _without(skeleton, numeric, numbers)
    fields = once(skeleton, light=light)
    count = len(spans.begins)
    if not few or not count or len(body) < _TEXT_BYTES * count or b"\\" in body:
        return fields, None
    pieces = _around(body, spans)
    for number in range(count):
        pieces[number] += b"\\u0001%d" % number
    return fields, Outline(body, spans, b"".join(pieces))


def skeleton_of(body: bytes) -> bytes:
    """The same JSON with its long texts emptied. Raises BodyError where strings or escapes are too many."""
    return b"".join(_around(body, _long_texts(body)))


def _around(body: bytes, spans: Spans) -> list[bytes]:
    """The bytes before each of these spans, and after the last."""
    return [*map(body.__getitem__, map(slice, [0, *spans.ends], [*spans.begins, None]))]


def _long_texts(body: bytes) -> Spans:
    """The strings that are long, and values. Raises BodyError where strings or escapes are too many."""
    few = few_quotes(body) if len(body) <= ESCAPES_MAX else None  # which so short a body cannot have
    if few is not None:
        long = [(begin, end) for begin, end in zip(few[::2], few[1::2], strict=False) if end - begin > _LONG_BYTES]
    else:
        data = np.frombuffer(body, np.uint8)
        if len(body) > ESCAPES_MAX and b"\\" in body and _number_of(data, b"\\") > ESCAPES_MAX:
            raise _too_much(f"the body's strings have too many escapes: at most {ESCAPES_MAX}; write text as UTF-8")
        quotes = quotes_of(body, data)
        if len(quotes) > 4 * ITEMS_MAX:  # an item is a value, at most with a key: two strings
            raise _too_many_items()
        begins, ends = quotes[: len(quotes) & ~1 : 2], quotes[1::2]
        chosen = ends - begins > _LONG_BYTES
        long = list(zip(begins[chosen].tolist(), ends[chosen].tolist(), strict=True))
    spans = Spans([], [])
    for begin, end in long:
        if body[end + 1 : end + 2] in _BEHIND_A_VALUE:  # a key has a colon behind it, perhaps after blanks: it stays
            spans.begins.append(begin + 1)
            spans.ends.append(end)
    return spans


def few_quotes(body: bytes) -> list[int] | None:
    """As `quotes_of`, at a tenth of the cost; None if there are many quotes, or if they are ambiguous."""
    quotes: list[int] = []
    at = -1
    for hop in range(_HOPS_MAX):
        at = body.find(b'"', at + 1)
        if at < 0:
            return quotes
        if hop == _HOPS_FIRST and at < len(body) // _FAR:
            return None
        if at and body[at - 1] == 0x5C:
            run = 2
            while run <= _RUN_MAX and run <= at and body[at - run] == 0x5C:
                run += 1
            if run > _RUN_MAX:
                return None
            if not run % 2:
                continue  # an odd number of backslashes, run - 1, escapes it
        quotes.append(at)
    return None


def quotes_of(body: bytes, data: _Bytes) -> _Places:
    """The positions of the quotes at which strings begin and end, alternately."""
    quotes: _Places = np.flatnonzero(data == 0x22)
    if b"\\" not in body:
        return quotes
    escaped = data[quotes - 1] == 0x5C
    if not escaped.any():
        return quotes
    doubtful = escaped & (data[quotes - 2] == 0x5C)  # a backslash that is text itself escapes nothing
    many = int(np.count_nonzero(doubtful))
    if many > _DOUBTFUL_MAX:
        # They pair from the left, as `replace` finds them: 8 ns for each pair, wherever it is.
        escaped = np.frombuffer(body.replace(b"\\\\", b"__"), np.uint8)[quotes - 1] == 0x5C
    elif many:
        others, unsure = np.flatnonzero(data != 0x5C), quotes[doubtful]
        escaped[doubtful] = (unsure - others[np.searchsorted(others, unsure) - 1]) % 2 == 0  # an odd run of backslashes
    unescaped: _Places = quotes[~escaped]
    return unescaped


def _count(skeleton: bytes, numeric: str = "", *, light: bool = False) -> int:
    """How many numbers follow one another in it, 0 where nothing is many. Raises BodyError where items are too many,
    nested too deeply, or numbers too long; HeavyError where it is not `light` and should be."""
    data = np.frombuffer(skeleton, np.uint8)
    openers, commas = _openers(data), _number_of(data, b",")
    heavy = light and _OPENER_ITEMS * openers + commas > LIGHT_ITEMS_MAX
    long = _may_be_long(data)
    if openers <= DEPTH_MAX and openers + commas <= ITEMS_MAX and not heavy and not long:
        return 0
    data = _outside(skeleton, data)
    if long:
        _check_digits(data)
    openers, commas, numbers = _openers(data), _number_of(data, b","), 0
    many = openers + commas > ITEMS_MAX
    if many or (heavy and numeric):
        numbers = _between_numbers(data)
    if DEPTH_MAX < openers <= 4 * ITEMS_MAX:  # of more there are too many, however deep
        marks = data[((data | 0x20) & 0xF9) == 0x79]  # brackets and braces, and `y`, which counts as nothing
        steps = np.where((marks | 0x20) == 0x7B, 1, np.where((marks | 0x20) == 0x7D, -1, 0))
        if int(np.cumsum(steps).max()) > DEPTH_MAX:
            raise BodyError(outcome.INVALID_JSON, f"the body is nested too deeply: at most {DEPTH_MAX} levels")
    if openers + commas - numbers > ITEMS_MAX:
        raise _too_many_items()
    others = commas - numbers if numeric else commas  # those of the member for numbers are not built
    if heavy and _OPENER_ITEMS * openers + others > LIGHT_ITEMS_MAX:
        raise HeavyError
    return numbers if many else 0


def _may_be_long(data: _Bytes) -> bool:
    """Whether a number of more than DIGITS_MAX digits may be there: of such a one a block of half as many is full."""
    digits = (data - np.uint8(0x30)) < 10
    eights = digits[: len(digits) & -_BLOCK].view(np.uint64) == _EIGHT_DIGITS
    return bool(eights.any() and eights.reshape(-1, _BLOCK // 8).all(axis=1).any())


def _check_digits(outside: _Bytes) -> None:
    others = np.flatnonzero((outside - np.uint8(0x30)) >= 10)
    if int(np.diff(others, prepend=-1, append=len(outside)).max()) > DIGITS_MAX + 1:
        raise _too_much(f"a number of the body has too many digits: at most {DIGITS_MAX}")


def _outside(skeleton: bytes, data: _Bytes) -> _Bytes:
    """The bytes outside of all strings."""
    ends = np.concatenate((quotes_of(skeleton, data), [len(data)]))
    if len(ends) > _CUTS_MAX:
        outside: _Bytes = data[np.repeat(np.arange(len(ends)) % 2 == 0, np.diff(ends, prepend=0))]
        return outside
    cuts = [0, *ends.tolist()]
    return np.frombuffer(b"".join(map(skeleton.__getitem__, map(slice, cuts[::2], cuts[1::2]))), np.uint8)


def _openers(data: _Bytes) -> int:
    return int(np.count_nonzero((data | 0x20) == 0x7B))  # `[` and `{` are one bit apart


def _number_of(data: _Bytes, mark: bytes) -> int:
    return int(np.count_nonzero(data == mark[0]))


def _between_numbers(data: _Bytes) -> int:
    """How many commas are after a digit and before a digit, a minus or a blank."""
    left, right = data[:-2], data[2:]
    before = (left - np.uint8(0x30)) < 10
    behind = ((right - np.uint8(0x30)) < 10) | (right == 0x20) | (right == 0x2D) | (right == 0x0A)
    return int(np.count_nonzero((data[1:-1] == 0x2C) & before & behind))


def _without(body: bytes, numeric: str, numbers: int) -> bytes:
    """The rest of a body with many numbers: all of them must be in the member `numeric`."""
    most = NUMBERS_MAX if numeric else 0
    if numbers > most:
        raise _too_much(f"the body has too many numbers: at most {most or ITEMS_MAX} here")
    rest = _cut(body)
    fields = _fields(rest)
    if _colons(_encode(fields)) != _colons(rest):  # an escaped colon would only be refused
        raise twice(rest)
    fields.pop(numeric, None)
    rest = _encode(fields)
    if _CUT in rest or (len(rest) > SMALL_BYTES and _count(rest)):
        raise _too_much(f"the body has too many numbers outside of `{numeric}`: at most {ITEMS_MAX}")
    return rest


def _cut(body: bytes) -> bytes:
    """The same JSON with long lists of nothing but numbers cut down to one that is in no other body."""
    others = np.flatnonzero(np.frombuffer(body.translate(_NUMERIC), np.bool_))
    long = np.flatnonzero(np.diff(others) > _LONG_BYTES)
    kept: list[bytes] = []
    at = 0
    for begin, end in zip(others[long].tolist(), others[long + 1].tolist(), strict=True):
        if body[begin] == 0x5B and body[end] == 0x5D:
            kept += (body[at : begin + 1], _CUT)
            at = end
    kept.append(body[at:])
    return b"".join(kept)


_NUMERIC = bytes(0 if chr(byte) in "0123456789,.+-eE \t\r\n" else 1 for byte in range(256))
_CUT = b"-87e-53"


def once(body: bytes, *, light: bool = False) -> Any:
    """Refuse a body in which a key occurs twice in one object, or which has an object of more than MEMBERS_MAX members,
    else return its contents. Raises BodyError, or msgspec's errors; `light` as in `outlined`.

    What is decoded has each key once: written again it has as many colons as the body, or some are gone.
    """
    fractions_max = LIGHT_FRACTIONS_MAX if light else FRACTIONS_MAX
    _fractions.left, _fractions.light = fractions_max, light
    document = _decode(body)
    if _colons(body) > MEMBERS_MAX:
        _check_members(document)
    again = _encode(document)
    if again == body:  # as compact writers write it: nothing was lost
        return document
    if b"\\u003" in body:  # a colon by its number would come out as one more
        body = body.replace(b"\\u003a", b"\\u003b").replace(b"\\u003A", b"\\u003b")
        _fractions.left = fractions_max
        again = _encode(_decode(body))
    if _colons(again) != _colons(body):
        raise twice(body)
    return document


def _check_members(fields: Any) -> None:
    if not isinstance(fields, dict):
        return  # its reader says so
    level: list[Any] = [fields]
    while level:
        inner: list[Any] = []
        for one in level:
            if type(one) is list:
                inner += one
            elif len(one) > MEMBERS_MAX:
                raise _too_wide()
            elif one is fields:
                inner += [value for name, value in one.items() if name not in _WIDE]
            else:
                inner += one.values()
        level = [value for value in inner if type(value) is dict or type(value) is list]


def _colons(data: bytes) -> int:
    return data.count(b":") if len(data) <= SMALL_BYTES else _number_of(np.frombuffer(data, np.uint8), b":")


class _FoundError(Exception):
    """A key occurs twice; the argument is the key."""


def _unique(members: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in members:
        if name in seen:
            raise _FoundError(name)
        seen.add(name)


def twice(body: bytes) -> BodyError:
    """The error for a key that occurs twice. It names the key if that can be found at little cost."""
    name = ""
    if len(body) <= _NAMED_BYTES_MAX:
        import json  # msgspec does not report it

        try:
            json.loads(body, object_pairs_hook=_unique)
        except _FoundError as found:
            name = str(found)[:64]
        except (ValueError, RecursionError):
            pass  # what one reader takes another may not: it is refused all the same, without the name
    which = f"`{name}`" if name else "a key"
    return BodyError(outcome.INVALID_JSON, f"{which} occurs twice in one object of the body: keep one", name or None)


def _too_many_items() -> BodyError:
    return _too_much(
        f"the body has too many values, lists and objects: at most {ITEMS_MAX}; send it in several requests"
    )


def _too_wide() -> BodyError:
    return _too_much(f"an object of the body has too many members: at most {MEMBERS_MAX}")


def _too_much(detail: str) -> BodyError:
    return BodyError(outcome.INVALID_FIELD, detail)
