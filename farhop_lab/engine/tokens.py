"""An emulated engine's optional tokenizer: turns prompts into ids as a real engine does.

Inside the engine a token stays TOKEN_BYTES bytes: here those of its id. Needs the extra `tokenizer`. Never truncates
and never adds a token.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from msgspec.structs import replace
from tokenizers import Tokenizer

from farhop_lab.engine.core.text import TOKEN_BYTES, VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

    from farhop_lab.engine.core.sequence import EngineRequest


class EngineTokenizer:
    """Tokenizes prompts by a tokenizer.json. ValueError if it cannot be read."""

    def __init__(self, file: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions
            raise ValueError(f"tokenizer: cannot read {file}: {error}") from None
        self.piece_ids = {piece: ids for piece in VOCABULARY if len(ids := self._ids(piece.decode())) == TOKEN_BYTES}

    def tokenized(self, wanted: EngineRequest) -> EngineRequest:
        """The same request with its prompt's ids, if they were not given."""
        if wanted.ids:  # given as ids: the model continues from their text
            given = self._tokenizer.decode(struct.unpack(f">{len(wanted.ids) // TOKEN_BYTES}I", wanted.ids))
            return replace(wanted, prompt=given.encode(), piece_ids=self.piece_ids)
        return replace(wanted, ids=self._ids(wanted.prompt.decode("utf-8", "replace")), piece_ids=self.piece_ids)

    def _ids(self, text: str) -> bytes:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return struct.pack(f">{len(ids)}I", *ids)
