"""What the emulated model says: a deterministic function of its seed and of all the text before, and nothing else.

Pure. Invariant: cut an answer at any byte, append what there is to the prompt, and the rest comes out the same, to the
same natural end. That is what makes a resumed stream checkable byte by byte. Never fails on any input text.
"""

from __future__ import annotations

import xxhash

TOKEN_BYTES = 4

# Every piece is a space and three letters. The space marks where a piece begins, so a text cut inside one can be
# completed. No piece needs escaping in JSON, so streams are framed without an encoder.
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


def token_count(text: bytes) -> int:
    """Tokens in `text`: one per started 4 bytes."""
    return -(-len(text) // TOKEN_BYTES)


END_ID = 2
"""The id of the token that ends an answer: no text has it."""


def ids_of(text: bytes | bytearray) -> list[int]:
    """A text's tokens: each the number that its bytes are, the last one's fewer than 4 where the text ends so."""
    return [int.from_bytes(text[at : at + TOKEN_BYTES], "big") for at in range(0, len(text), TOKEN_BYTES)]


def text_of(packed: bytes) -> bytes:
    """The text of ids as 4 bytes each. A token of fewer bytes, such as one that ends a text, is those alone."""
    pieces = (packed[at : at + TOKEN_BYTES] for at in range(0, len(packed), TOKEN_BYTES))
    return b"".join(piece.lstrip(b"\0") for piece in pieces)


class TextWriter:
    """Writes on from a given text. One per sequence; it never sees the text again, only what it wrote itself."""

    __slots__ = ("_end_below", "_rest", "_state")

    def __init__(self, text: bytes | bytearray, seed: int, answer_tokens_mean: float) -> None:
        if answer_tokens_mean < 1:
            raise ValueError(
                f"answer_tokens_mean: {answer_tokens_mean} is below 1; an answer has at least its end token"
            )
        # The end comes with the same chance at every piece (a geometric length): any other shape would need to know
        # where the answer began, which a continued text does not tell.
        self._end_below = int(2**32 / answer_tokens_mean)
        self._state = xxhash.xxh3_64(seed=seed)
        self._rest = self._complete(text)

    def _complete(self, text: bytes | bytearray) -> bytes:
        """Take in `text`; return what is missing from a last piece that this writer would itself have begun."""
        start = text.rfind(b" ", max(0, len(text) - TOKEN_BYTES + 1))
        if start < 0:
            self._state.update(text)
            return b""
        self._state.update(memoryview(text)[:start])
        begun = bytes(text[start:])
        piece = VOCABULARY[self._state.intdigest() & _PIECE_BITS]
        self._state.update(begun)
        return piece[len(begun) :] if piece.startswith(begun) else b""

    def write(self, *, may_end: bool) -> bytes:
        """The next piece (4 bytes; fewer where it completes one), or b"" where the text ends here and may."""
        if self._rest:
            piece, self._rest = self._rest, b""
        else:
            digest = self._state.intdigest()
            if may_end and digest >> 32 < self._end_below:
                return b""
            piece = VOCABULARY[digest & _PIECE_BITS]
        self._state.update(piece)
        return piece

    def write_on(self, count: int, ends_from: int) -> list[bytes]:
        """The next `count` pieces at once, the same as `write` gives; fewer, and then b"" last, where the text ends at
        number `ends_from` (from 0) or later."""
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


def write_all(text: bytes, seed: int, answer_tokens_mean: float, pieces_max: int) -> bytes:
    """The whole answer to `text`, at most `pieces_max` pieces: what a client should have received in the end."""
    writer = TextWriter(text, seed, answer_tokens_mean)
    out = bytearray()
    for _ in range(pieces_max):
        piece = writer.write(may_end=True)
        if not piece:
            break
        out += piece
    return bytes(out)
