"""One request inside the engine: its text so far, how much of that is computed, and where its answer stops.

Pure. Invariants: 0 <= computed_tokens <= total_tokens; total_tokens == prompt_tokens + output_tokens; text that might
turn out to be part of a stop string is held back, so emitted text is never taken back; text generated ahead (`foresee`)
is what would have been generated later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from farhop_lab.engine.core.kv import BlockTable
from farhop_lab.engine.core.text import TOKEN_BYTES, ScriptWriter, TextWriter, token_count

if TYPE_CHECKING:
    from farhop_lab.engine.core.profiles import Profile

TOGETHER = 64  # blocks whose names are kept together
KEPT_MAX = 4096  # times so many: some 10 MB
FORESEEN = 32  # tokens generated ahead at once: most answers are longer, few much shorter


class EngineRequest(msgspec.Struct, frozen=True):
    """A request. `max_tokens` None means up to the end of the context. `stop` are texts, cut before.

    `adapter` names a LoRA adapter, "" is the model itself. `generates` False: a single pass over the prompt
    (embeddings, rankings), without output tokens. `ids`: the prompt's tokens, TOKEN_BYTES each, by a tokenizer; then
    `piece_ids` are those of the pieces that answers consist of. Without, a token is up to TOKEN_BYTES bytes of the text
    itself. `keeps`: another engine will fetch the prompt's KV when it ends. `shows_stop`: the stop string that ended
    the answer is included, and no text is held back for it (vLLM's `include_stop_str_in_output`). `script`: the
    answer's text by the model's seed, if a grammar or a tool's schema binds it; it ends where that does.
    """

    prompt: bytes
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    generates: bool = True
    adapter: str = ""
    ids: bytes = b""
    piece_ids: Mapping[bytes, bytes] = {}
    keeps: bool = False
    shows_stop: bool = False
    script: Callable[[int], bytes] | None = None


class TextModel(msgspec.Struct, frozen=True):
    """Determines the model's answers and their length: the model's name separates its KV, the seed and the mean shape
    its answers; `wide`: more than ASCII, with characters that tokens cut in two.
    """

    model: str
    seed: int = 0
    answer_tokens_mean: float = 200.0
    wide: bool = False


class Sequence:
    """A request from submission to end. Only the engine core writes to it; others may read."""

    __slots__ = (
        "_ahead",
        "_held",
        "_hold",
        "_piece_ids",
        "_shown_end",
        "_shows_stop",
        "_stop",
        "_undecoded",
        "_wide",
        "_writer",
        "adapter",
        "block_bytes",
        "cache_salt",
        "cached_tokens",
        "chain",
        "computed_tokens",
        "finished",
        "id",
        "ignore_eos",
        "keeps",
        "last_piece",
        "max_tokens",
        "min_tokens",
        "order",
        "output_tokens",
        "prompt",
        "prompt_tokens",
        "queued_until",
        "stop_reason",
        "submitted_at",
        "table",
        "text",
        "total_tokens",
    )

    def __init__(self, id: str, wanted: EngineRequest, text_model: TextModel, profile: Profile) -> None:  # noqa: A002
        self.id, self.adapter, self.keeps = id, wanted.adapter, wanted.keeps
        self.prompt = wanted.ids or wanted.prompt
        self.text = bytearray(self.prompt)
        self.prompt_tokens = self.total_tokens = token_count(wanted.ids or wanted.prompt)
        self.cache_salt = wanted.cache_salt
        self._piece_ids = wanted.piece_ids
        self.max_tokens = _max_tokens(wanted, self.prompt_tokens, profile.context_tokens)
        self.min_tokens = wanted.min_tokens
        self.ignore_eos = wanted.ignore_eos
        self.output_tokens = self.computed_tokens = self.cached_tokens = 0
        self.order = 0  # number in the order of admission
        self.submitted_at = 0.0
        self.queued_until: float | None = None
        self.finished: str | None = None
        self.stop_reason: str | None = None
        self.table = BlockTable()
        self.block_bytes = profile.block_tokens * TOKEN_BYTES
        # The first link carries what separates caches; full blocks follow as they are known.
        self.chain: list[int] = [
            xxh3_64_intdigest(f"{wanted.adapter or text_model.model}\0{wanted.cache_salt}".encode())
        ]
        self._writer: TextWriter | ScriptWriter = TextWriter(
            wanted.prompt, text_model.seed, text_model.answer_tokens_mean, wide=text_model.wide
        )
        if wanted.script is not None:
            self._writer = ScriptWriter(wanted.script(text_model.seed))
        self._wide = text_model.wide or wanted.script is not None  # a script's words are anybody's
        self._undecoded = b""  # bytes of an incomplete character
        self.last_piece = b""  # of the answer
        self._ahead: deque[bytes] = deque()  # pieces generated ahead; b"" ends the answer
        self._stop, self._shows_stop = wanted.stop, wanted.shows_stop
        self._hold = 0 if wanted.shows_stop else max(map(len, wanted.stop), default=1) - 1
        self._held = ""  # generated text that is not shown yet
        self._shown_end = ""  # the end of the shown text, as long as a stop string may begin in it

    def block_names(self, blocks: int, *, since: int = 0) -> list[int]:
        """Names of the first `blocks` blocks but for `since`; fewer if the text is shorter. A name covers all text
        before it too.
        """
        chain, size, text = self.chain, self.block_bytes, self.text
        known = len(chain) - 1
        blocks = min(blocks, len(text) // size)
        if known < blocks:
            fresh = bytes(memoryview(text)[known * size : blocks * size])  # slices of a bytes object are faster
            whole = len(fresh) - len(fresh) % (TOGETHER * size)
            for start in range(0, whole, TOGETHER * size):
                chain += _kept_names(fresh[start : start + TOGETHER * size], size, chain[-1])
            chain += _names(fresh[whole:], size, chain[-1])
        return chain[since + 1 : blocks + 1]

    def write_token(self) -> str:
        """Generate one token of the answer; returns the text that may be shown now. Sets `finished` at the end."""
        if not self.max_tokens:
            self.finished = "stop"
            return ""
        if self._ahead:
            piece = self._ahead.popleft()
        else:
            piece = self._writer.write(may_end=not self.ignore_eos and self.output_tokens >= self.min_tokens)
        self.output_tokens += 1
        self.total_tokens += 1
        self.last_piece = piece
        if not piece:  # the end token: it takes a step and counts, and has no text
            self.finished = "stop"
            return self._held
        self.text += self._piece_ids.get(piece, piece.rjust(TOKEN_BYTES, b"\0")) if self._piece_ids else piece
        shown = self._decoded(piece) if self._wide else piece.decode("ascii")
        if self._stop:
            shown = self._show(shown)
        if self.finished is None and self.output_tokens >= self.max_tokens:
            self.finished = "length"
            shown += self._held
        return shown

    def foresee(self, tokens: int) -> int:
        """How many of the next `tokens` tokens (at most) do not end the answer; 0 if that cannot be known. If the end
        is random, they must be generated ahead, so that fewer may be known.
        """
        if self._stop or self._piece_ids or self._wide:
            return 0
        tokens = min(tokens, self.max_tokens - 1 - self.output_tokens)
        if self.ignore_eos:
            return max(0, tokens)
        tokens, ahead = min(tokens, FORESEEN), self._ahead
        if len(ahead) < tokens and (not ahead or ahead[-1]):
            ends_from = max(0, self.min_tokens - self.output_tokens - len(ahead))
            ahead.extend(self._writer.write_on(FORESEEN - len(ahead), ends_from))
        known = len(ahead) - 1 if ahead and not ahead[-1] else len(ahead)
        return max(0, min(tokens, known))

    def advance(self, tokens: int) -> None:
        """Generate this many tokens, which `foresee` has returned. Their computation is the engine's business."""
        if ahead := self._ahead:
            pieces = [ahead.popleft() for _ in range(min(tokens, len(ahead)))]
            pieces += self._writer.write_on(tokens - len(pieces), tokens)
        else:
            pieces = self._writer.write_on(tokens, tokens)
        self.text += b"".join(pieces)
        self.output_tokens += tokens
        self.total_tokens += tokens

    def _decoded(self, piece: bytes) -> str:
        """A token that ends within a character has no text: it comes with the token that completes it (as in vLLM)."""
        self._undecoded += piece
        try:
            text = self._undecoded.decode()
        except UnicodeDecodeError:
            return ""
        self._undecoded = b""
        return text

    def _show(self, piece: str) -> str:
        """Hold back what could begin a stop string: a match can only lie in the end of the shown text plus the new
        piece. Between several their order decides, as in vLLM's check_stop_strings.
        """
        text = self._shown_end + piece
        shown = len(self._shown_end) - len(self._held)
        if piece and self.output_tokens > self.min_tokens:
            for stop in self._stop:
                if (at := text.find(stop, max(0, len(self._shown_end) + 1 - len(stop)))) >= 0:
                    self.finished, self.stop_reason, self._held = "stop", stop, ""
                    return text[shown : at + len(stop) if self._shows_stop else at]
        cut = max(shown, len(text) - self._hold)
        self._held, self._shown_end = text[cut:], text[max(0, len(text) - max(map(len, self._stop)) + 1) :]
        return text[shown:cut]


def _names(text: bytes, size: int, before: int) -> list[int]:
    """Names of the blocks of a text that follows block `before`."""
    names = []
    for start in range(0, len(text), size):
        before = xxh3_64_intdigest(text[start : start + size], before)
        names.append(before)
    return names


_kept: dict[int, list[int]] = {}  # a long prompt comes again and again, and each time a little longer


def _kept_names(text: bytes, size: int, before: int) -> list[int]:
    """As `_names`, cached for recent texts."""
    digest = xxh3_128_intdigest(text, before)
    names = _kept.get(digest)
    if names is None:
        if len(_kept) >= KEPT_MAX:
            _kept.clear()
        names = _kept[digest] = _names(text, size, before)
    return names


def _max_tokens(wanted: EngineRequest, prompt_tokens: int, context_tokens: int) -> int:
    """The most tokens of the answer. ValueError with vLLM's text if prompt and answer cannot fit the context."""
    if not prompt_tokens:
        raise ValueError("prompt: it is empty; at least one token is needed")
    asked = wanted.max_tokens if wanted.generates else 0
    if asked is None and prompt_tokens < context_tokens:
        asked = context_tokens - prompt_tokens
    if asked is None or prompt_tokens + asked > context_tokens:
        raise ValueError(
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{prompt_tokens + (asked or 0)} tokens ({prompt_tokens} in the messages, {asked or 0} in the completion). "
            "Please reduce the length of the messages or completion."
        )
    if asked < 1 and wanted.generates:
        raise ValueError(f"max_tokens must be at least 1, got {asked}.")
    if not 0 <= wanted.min_tokens <= asked:
        raise ValueError(f"min_tokens must be between 0 and max_tokens={asked}, got {wanted.min_tokens}.")
    return asked
