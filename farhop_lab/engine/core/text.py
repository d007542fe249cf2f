"""What the emulated model generates: a deterministic function of its seed and of all the text before, and nothing else.

Pure. Invariant: cut an answer at any byte, append it to the prompt, and the rest comes out the same, with the same
natural end. So a resumed stream can be checked byte by byte. Never fails on any input text.
"""

from __future__ import annotations

import xxhash

TOKEN_BYTES = 4

# Every piece is a space and three letters. The space marks where a piece begins, so a text cut inside one can be
# completed. No piece needs escaping in JSON, so streams are framed without an encoder (except wide ones).
_WORDS = (
    "the sea and far hop our sun you was day one two all can her his had but not are she how now new old see way who "
    "did its let put say too use man boy air arm art ask bad bag bay bed bee big bit bow box bus buy car cat cow "
    "cup cut dog dry due ear eat egg end eye fat few fig fir fit fly fog for fox fun gem get hat hay hen hid hot "
    "ice ink ivy jam jar job joy key kid lap law led leg lid lip log lot low map may men mix mud net nor nut oak oar "
    "odd off oil out own pan pay pen pet pie pin pit pot ran raw red rib rod row run sad sat saw set shy sit six sky "
    "son tea ten tin tip toe top toy try van via war wet why win won yes yet zoo"
)
VOCABULARY = tuple(f" {word}".encode() for word in _WORDS.split() if len(word) == TOKEN_BYTES - 1)[:128]
_PIECE_BITS = len(VOCABULARY) - 1  # a power of two, see the test


def _wide() -> tuple[bytes, ...]:
    """Words of one to three tokens, each a space and what follows it: characters of two to four bytes, many of which
    tokens cut in two, combining marks, joined sequences, and characters that JSON escapes.
    """
    seas, faces = "海山川空雨雪花月風火水木金土天星鳥魚森道", "🌊🚀🌍🎉🐙🦊🍵🎻🌙🧭🪁🫐🐍🪐🎈🐢"
    words = [f" {one}" for one in seas]
    words += [f" {one}\u0301" for one in "aeiouncsrz"]  # a combining accent
    words += [f" a{one}é" for one in faces]  # the emoji is cut after two of its four bytes
    words += [f" xy{one}ü" for one in seas[:12]]  # cut after one of three
    words += [f" 👩\u200d{one}" for one in "🚀🎓🌾🍳"]  # joined: one sign of three characters over three tokens
    words += [" abc🇩🇪", " abc🇯🇵", ' "a"', " \\b\\", " \n\nc", " \t<>", " d½", " …", " —"]
    made = [word.encode() for word in words]
    return (*made, *VOCABULARY)[: len(VOCABULARY)]


WIDE_VOCABULARY = _wide()
_WIDE_BYTES = max(map(len, WIDE_VOCABULARY))


def token_count(text: bytes) -> int:
    """Tokens in `text`: one per started 4 bytes."""
    return -(-len(text) // TOKEN_BYTES)


END_ID = 2
"""The id of the token that ends an answer: no text has it."""


def _pairs() -> list[int]:
    """All pairs of consecutive bytes in UTF-8, or behind the zeros that fill up a short token."""
    plain, later, first = range(0x80), range(0x80, 0xC0), range(0xC2, 0xF5)
    follows = {**dict.fromkeys(plain, (*plain, *first)), **dict.fromkeys(first, later)}
    follows |= dict.fromkeys(later, (*plain, *later, *first)) | {0: (*plain, *later, *first)}
    return sorted(one << 8 | other for one, others in follows.items() for other in others)


PAIRS = _pairs()
_RANKS = {pair: rank for rank, pair in enumerate(PAIRS)}


def id_of(piece: bytes | bytearray) -> int:
    """The number of a token of a UTF-8 text, by the ranks of its pairs of bytes among all possible ones: the bytes
    themselves would need 32 bits, and no engine has ids of more than 31. Any other token is the number of its bytes.
    """
    number = int.from_bytes(piece, "big")
    high, low = _RANKS.get(number >> 16), _RANKS.get(number & 0xFFFF)
    return number if high is None or low is None else high * len(PAIRS) + low


def bytes_of(token: int) -> bytes:
    """The inverse: TOKEN_BYTES bytes, zeros before those of a shorter token. `token`: below 2^32."""
    high, low = divmod(token, len(PAIRS))
    number = PAIRS[high] << 16 | PAIRS[low] if high < len(PAIRS) else token
    return number.to_bytes(TOKEN_BYTES, "big")


def ids_of(text: bytes | bytearray) -> list[int]:
    """A text's tokens; the last may be of fewer than 4 bytes."""
    return [id_of(text[at : at + TOKEN_BYTES]) for at in range(0, len(text), TOKEN_BYTES)]


def text_of(packed: bytes) -> bytes:
    """The text of ids as 4 bytes each. A token of fewer bytes, such as one that ends a text, has only those."""
    pieces = (packed[at : at + TOKEN_BYTES] for at in range(0, len(packed), TOKEN_BYTES))
    return b"".join(piece.lstrip(b"\0") for piece in pieces)


class TextWriter:
    """Continues a given text. One per sequence; it never sees the text again, only its own output."""

    __slots__ = ("_end_below", "_rest", "_state", "_wide", "_words")

    def __init__(self, text: bytes | bytearray, seed: int, answer_tokens_mean: float, *, wide: bool = False) -> None:
        if answer_tokens_mean < 1:
            raise ValueError(
                f"answer_tokens_mean: {answer_tokens_mean} is below 1; an answer has at least its end token"
            )
        # The end has the same probability at every piece (a geometric length): any other shape would need to know where
        # the answer began, which a continued text does not show.
        self._end_below = int(2**32 / answer_tokens_mean)
        self._state = xxhash.xxh3_64(seed=seed)
        self._wide, self._words = wide, WIDE_VOCABULARY if wide else VOCABULARY
        self._rest = self._complete(text)

    def _complete(self, text: bytes | bytearray) -> bytes:
        """Take in `text`; returns the rest of a last piece that this writer itself would have begun."""
        longest = _WIDE_BYTES if self._wide else TOKEN_BYTES
        start = text.rfind(b" ", max(0, len(text) - longest + 1))
        if start < 0:
            self._state.update(text)
            return b""
        self._state.update(memoryview(text)[:start])
        begun = bytes(text[start:])
        piece = self._words[self._state.intdigest() & _PIECE_BITS]
        self._state.update(begun)
        return piece[len(begun) :] if piece.startswith(begun) else b""

    def write(self, *, may_end: bool) -> bytes:
        """The next piece (4 bytes; fewer if it completes one), or b"" if the text ends here and may."""
        word = self._rest
        if not word:
            digest = self._state.intdigest()
            if may_end and digest >> 32 < self._end_below:
                return b""
            word = self._words[digest & _PIECE_BITS]
        piece, self._rest = word[:TOKEN_BYTES], word[TOKEN_BYTES:]
        self._state.update(piece)
        return piece

    def write_on(self, count: int, ends_from: int) -> list[bytes]:
        """The next `count` pieces at once, the same as from `write`; fewer, and then b"" last, if the text ends at
        number `ends_from` (from 0) or later. For narrow words alone.
        """
        pieces = [self.write(may_end=ends_from <= 0)] if self._rest and count else []
        digest, update, append, end_below = self._state.intdigest, self._state.update, pieces.append, self._end_below
        for _ in range(len(pieces), min(count, ends_from)):
            piece = VOCABULARY[digest() & _PIECE_BITS]
            update(piece)
            append(piece)
        for _ in range(len(pieces), count):
            drawn = digest()
            if drawn >> 32 < end_below:
                append(b"")
                break
            piece = VOCABULARY[drawn & _PIECE_BITS]
            update(piece)
            append(piece)
        return pieces


class ScriptWriter:
    """Writes a given text, where something else than the model's own habits says what it writes (a grammar)."""

    __slots__ = ("_rest",)

    def __init__(self, text: bytes) -> None:
        self._rest = text

    def write(self, *, may_end: bool) -> bytes:  # noqa: ARG002 - a grammar ends where it ends
        """See TextWriter."""
        piece, self._rest = self._rest[:TOKEN_BYTES], self._rest[TOKEN_BYTES:]
        return piece

    def write_on(self, count: int, ends_from: int) -> list[bytes]:
        """See TextWriter."""
        raise NotImplementedError("a script is written token by token: Sequence.foresee sees to it")


def write_all(text: bytes, seed: int, answer_tokens_mean: float, pieces_max: int, *, wide: bool = False) -> bytes:
    """The whole answer to `text`, at most `pieces_max` pieces: what a client should have received in the end."""
    writer = TextWriter(text, seed, answer_tokens_mean, wide=wide)
    out = bytearray()
    for _ in range(pieces_max):
        piece = writer.write(may_end=True)
        if not piece:
            break
        out += piece
    return bytes(out)
