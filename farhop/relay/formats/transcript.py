"""An answer's text, read as it passes: its engine's cache holds it after the prompt, and the next turn will contain it.

Only the prefix chain of prompt and answer, and the answer's length, are passed on. Invariants: bounded; a partly read
answer yields nothing; its text never enters a log, a span or an error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from farhop.balance.prefix import chain
from farhop.relay.formats import openai

if TYPE_CHECKING:
    from farhop.balance.prefix.chain import Tail
    from farhop.relay.formats.prompt import Prompt

TEXT_BYTES_MAX = 64 * 1024  # as JSON writes them

# A string is found without decoding its event. In a string the key's quotes would be escaped; as a list or an object
# (`"content":[` in logprobs) and as null it is not what is looked for.
_STRING = rb'''": ?"([^"\\]*+(?:\\.[^"\\]*+)*+)"'''
_PIECES = {key: re.compile(b'"' + key.encode() + _STRING).findall for key in ("content", "text")}
# Of Responses more than one kind of event has a member of this name, and the text comes again whole at the end.
_PIECES["delta"] = re.compile(rb'event: ?response\.output_text\.delta\r?\ndata: ?\{[^\r\n]*?"delta' + _STRING).findall

_string = msgspec.json.Decoder(str)


class AnswerChain(msgspec.Struct, frozen=True, gc=False):
    """What extends a request's prefix chain by its answer: the chain's tail, and the key of its text in events."""

    tail: Tail
    key: str


def answer_chain(prompt: Prompt, nodes: tuple[int, ...], seed: int) -> AnswerChain | None:
    """What is kept of the prompt whose chain is `nodes`, to extend the chain by the answer. None: the answer is not
    needed.
    """
    if prompt.answer is None:
        return None
    return AnswerChain(chain.tail(prompt.canonical, nodes, seed, prompt.answer.opening), prompt.answer.key)


class Transcript(msgspec.Struct, eq=False, gc=False):
    """The text of one attempt's answer, as far as the next turn's prompt repeats it."""

    _of: AnswerChain
    _missed: bool = False
    pieces: bytearray = msgspec.field(default_factory=bytearray)  # as the engine wrote them, escapes and all
    _text: bytes = b""

    def __repr__(self) -> str:
        return "Transcript"

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return len(self.pieces) + len(self._text)

    def feed(self, events: bytes) -> None:
        """Take complete events of a stream."""
        if self._missed:
            return
        pieces = self.pieces
        pieces += b"".join(_PIECES[self._of.key](events))
        if len(pieces) > TEXT_BYTES_MAX:
            self.miss()

    def add(self, piece: bytes) -> None:
        """The text of one event, as JSON spells it, from a caller that knows it already."""
        if self._missed:
            return
        pieces = self.pieces
        pieces += piece
        if len(pieces) > TEXT_BYTES_MAX:
            self.miss()

    def read(self, document: bytes) -> None:
        """Take an answer in one piece."""
        text = openai.answer_text(document)
        self._text = text if len(text) <= TEXT_BYTES_MAX else b""

    def miss(self) -> None:
        """Something passed unread: neither what was read before nor what follows can be used."""
        self.pieces, self._missed = bytearray(), True

    def result(self) -> tuple[tuple[int, ...], int]:
        """At the end: the chain of prompt and answer, and the answer's bytes; () and 0 if unknown."""
        text = self._text or _unescaped(bytes(self.pieces))
        return (chain.extend_chain(self._of.tail, text), len(text)) if text else ((), 0)


def _unescaped(pieces: bytes) -> bytes:
    """Unescape all pieces at once: an escape may be the first half of a pair, whose other half came with the next
    event.
    """
    if b"\\" not in pieces:
        return pieces
    try:
        return _string.decode(b'"%b"' % pieces).encode()
    except openai.UNREADABLE:
        return b""
