"""Recorded work as schedules: traces of Mooncake, Azure, BurstGPT and ServeGen, logs, sessions. `load` reads the rows.

What a trace does not say is synthesised by stated rules. Regions: as recorded, or by the given rule: by session
(Mooncake's conversation, a log's session), by request (Azure, BurstGPT) or by client (ServeGen). Texts: made up so that
they share what the trace says and no more. Times: as recorded; if a Mooncake trace has them only to 3 s, arrivals are
spread within these. Lengths: an input is cut at its end if input and answer together exceed `context_tokens` (its
beginning is what it shares); so is an answer beyond `max_tokens`. Pure: takes random generators.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import inf
from random import Random

import msgspec
from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.arrivals import Burst, Maker, renewals
from farhop_lab.workloads.places import PlaceRule
from farhop_lab.workloads.program import Ask, Program, Schedule, Start, WorkloadError, one
from farhop_lab.workloads.prose import TOKEN_BYTES, prose

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_BUCKET_MS = 3000
MOONCAKE_SLACK_MS = 10
"""How far a bucket's time may be off: the published conversations have gaps of 2,997 to 3,003 ms (5999 for 6000)."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the engines used, in tokens, and the tenant."""

    context_tokens: int = 131_072
    max_tokens: int = 4096
    tenant: str = "t"

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < self.context_tokens:
            raise WorkloadError(
                f"max_tokens {self.max_tokens} must lie within 1 and context_tokens {self.context_tokens}"
            )

    def fit(self, prompt_tokens: int, answer_tokens: int) -> tuple[int, int]:
        """Both lengths within the limits; each at least 1."""
        answer = max(1, min(answer_tokens, self.max_tokens))
        return max(1, min(prompt_tokens, self.context_tokens - answer)), answer


class MooncakeRow(msgspec.Struct, frozen=True, rename={"at_ms": "timestamp"}):
    """A line of the trace: milliseconds, tokens, and names of its blocks of 512 tokens."""

    at_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class AzureRow(msgspec.Struct, frozen=True):
    """A line of the trace: seconds from its first line, tokens."""

    at: float
    input_tokens: int
    output_tokens: int


Blocks = tuple[tuple[str, int], ...]
"""Pieces of a prompt from its beginning: a name and a length in tokens. Equal names are equal texts."""


class LogRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request of a log: seconds from its beginning (any zero), lengths in tokens. Missing fields are unknown.

    Requests of the same `session` build on each other; `pause_s` passed since the session's previous answer. `blocks`
    are the pieces of the prompt that others may share; the rest is the session's own. `region` is where it came.
    `tools`: it offered the model some.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    session: str = ""
    pause_s: float | None = None
    blocks: Blocks = ()
    region: str = ""
    tools: bool = False


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call within a session: how many tokens it adds to the conversation, the length of its answer, and the seconds
    since the previous answer (a person thinks, a tool works). If those are unknown, `since_s` since the previous
    request: it is sent then, or once that answer is there.
    """

    input_tokens: int
    output_tokens: int
    pause_s: float = 0.0
    since_s: float = 0.0


class SessionRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A session of an agent or a chat: its beginning (seconds), the beginning of its context, and its turns. `tools`:
    they offer the model some. `part`: how often its context began anew before; parts share their prefix alone.
    """

    session: str
    at_s: float
    turns: tuple[Turn, ...]
    prefix: Blocks = ()
    region: str = ""
    tools: bool = False
    part: int = 0

    @property
    def text_name(self) -> str:
        """What its texts are made from."""
        return f"{self.session} {self.part}" if self.part else self.session


class Histogram(msgspec.Struct, frozen=True):
    """Values with their cumulated shares."""

    values: tuple[int, ...]
    marks: tuple[float, ...]

    def draw(self, rng: Random) -> int:
        """One of the values."""
        return self.values[min(bisect_right(self.marks, rng.random() * self.marks[-1]), len(self.values) - 1)]


class Recorded(msgspec.Struct, frozen=True):
    """One of ServeGen's clients: its intervals of time, and its lengths (input, output) since given seconds."""

    name: str
    bursts: tuple[Burst, ...]
    lengths: tuple[tuple[float, Histogram, Histogram], ...] = ()


def mooncake(rows: Iterable[MooncakeRow], place: PlaceRule, rng: Random, limits: Limits = Limits()) -> Schedule:  # noqa: B008
    """A request at each row's time, or within its 3 s if times are recorded no finer; equal blocks are equal texts. A
    conversation is identified by its second block, since all share the first.
    """
    buckets = [(at_ms, list(bucket)) for at_ms, bucket in groupby(sorted(rows, key=_at_ms), key=_at_ms)]
    begins = [at_ms for at_ms, _ in buckets]
    is_shared = any(len(bucket) > 1 for _, bucket in buckets)
    width_ms = MOONCAKE_BUCKET_MS if _are_bucketed(begins, is_shared) else 0
    for (at_ms, bucket), next_ms in zip(buckets, [*begins[1:], inf], strict=True):
        # A bucket may end a little early: an arrival spread past its end would come after later ones.
        within_ms = min(width_ms, next_ms - at_ms)
        moments = sorted(at_ms + rng.random() * within_ms for _ in bucket)
        for at, row in zip(moments, bucket, strict=True):
            talk = f"mooncake {row.hash_ids[:2][-1] if row.hash_ids else 'empty'}"
            yield Start(at / 1e3, place(talk, at / 1e3), _asks_blocks(row, talk, limits), talk)


def _at_ms(row: MooncakeRow) -> float:
    return row.at_ms


def _are_bucketed(moments_ms: Sequence[float], is_shared: bool) -> bool:
    """Whether these times, each once and in order, represent the 3 s from them on: no two lie closer, and they are
    multiples of 3 s or shared by requests. One condition alone is not enough: Mooncake's first trace has buckets of
    3,053 ms (27482, 30535), its synthetic one has Poisson times, two of which may be equal, and few requests may lie
    far apart.
    """
    slack_ms, half_ms = MOONCAKE_SLACK_MS, MOONCAKE_BUCKET_MS // 2
    if any(after - before < MOONCAKE_BUCKET_MS - slack_ms for before, after in pairwise(moments_ms)):
        return False
    return is_shared or all(abs((at_ms + half_ms) % MOONCAKE_BUCKET_MS - half_ms) <= slack_ms for at_ms in moments_ms)


def _asks_blocks(row: MooncakeRow, talk: str, limits: Limits) -> _Make:
    blocks = tuple((f"mooncake block {block}", MOONCAKE_BLOCK_TOKENS) for block in row.hash_ids)
    return _Make(talk, blocks, *limits.fit(row.input_length, row.output_length), limits)


class _Make:
    """Makes a program of one request when it begins: until then a schedule holds no text."""

    __slots__ = ("_answer_tokens", "_blocks", "_limits", "_prompt_tokens", "_session", "_tools")

    def __init__(
        self, session: str, blocks: Blocks, prompt_tokens: int, answer_tokens: int, limits: Limits, tools: bool = False
    ) -> None:
        self._session, self._blocks, self._tools = session, blocks, tools
        self._prompt_tokens, self._answer_tokens, self._limits = prompt_tokens, answer_tokens, limits

    def __call__(self) -> Program:
        prompt = _text(self._blocks, self._session, self._prompt_tokens)
        return one(_ask(prompt, self._answer_tokens, self._session, self._limits, tools=self._tools))


def _text(blocks: Blocks, own: str, tokens: int) -> bytes:
    """A prompt of that length: its blocks, then its own text by that name."""
    parts, left = [], tokens
    for name, block_tokens in blocks:
        if left <= 0:
            break
        parts.append(prose(name, block_tokens))
        left -= block_tokens
    parts.append(prose(own, left))
    return b"".join(parts)[: tokens * TOKEN_BYTES]


def _ask(
    prompt: bytes,
    answer_tokens: int,
    session: str,
    limits: Limits,
    think_s: float = 0.0,
    since_s: float = 0.0,
    *,
    tools: bool,
) -> Ask:
    return Ask(
        prompt=prompt,
        max_tokens=answer_tokens,
        answer_tokens=answer_tokens,
        tenant=limits.tenant,
        session=xxh3_64_intdigest(session.encode()) or 1,
        tools=tools,
        think_s=think_s,
        since_s=since_s,
    )


def azure(rows: Iterable[AzureRow], place: PlaceRule, limits: Limits = Limits()) -> Schedule:  # noqa: B008 - frozen
    """A request at each row's time that shares its text with no other: the control without reuse. Also for BurstGPT."""
    for number, row in enumerate(rows):
        name = f"azure {number}"
        prompt_tokens, answer_tokens = limits.fit(row.input_tokens, row.output_tokens)
        yield Start(row.at, place(name, row.at), _Make(name, (), prompt_tokens, answer_tokens, limits))


def log(rows: Sequence[LogRow], place: PlaceRule | None, limits: Limits = Limits()) -> Schedule:  # noqa: B008 - frozen
    """An open loop: a request at each row's time, whatever became of others. Its text is that of its blocks, then its
    session's: without blocks, a session's longer prompts begin with its shorter ones. `place` None: as recorded.
    """
    for number, row in enumerate(rows):
        session = row.session or f"log {number}"
        region = row.region if place is None else place(session, row.at_s)
        prompt_tokens, answer_tokens = limits.fit(row.input_tokens, row.output_tokens)
        make = _Make(session, row.blocks, prompt_tokens, answer_tokens, limits, row.tools)
        yield Start(row.at_s, region, make, session)


def sessions(rows: Sequence[SessionRow], place: PlaceRule | None, limits: Limits = Limits()) -> Schedule:  # noqa: B008
    """Sessions begin at their times. A turn contains the whole conversation, follows the previous answer by its pause,
    and ends its session if the context is full. `place` None: as recorded.
    """
    for row in rows:
        region = row.region if place is None else place(row.session, row.at_s)
        yield Start(row.at_s, region, _Talk(row, limits), row.session)


def sessions_of(rows: Sequence[LogRow]) -> list[SessionRow]:
    """A log's sessions, for a closed loop; a row without a session is one of its own.

    If a prompt is shorter than the conversation so far, its context began anew (it was cut or summarised): this part
    ends there, and another one with the same blocks begins as much later as it did. If a pause was not recorded, a turn
    comes when it came, or after the previous answer: the amount of work stays the same.
    """
    found: dict[str, list[LogRow]] = {}
    for number, row in enumerate(rows):
        found.setdefault(row.session or f"log {number}", []).append(row)
    made: list[SessionRow] = []
    for name, turns in found.items():
        parts: list[list[LogRow]] = []
        held = inf
        for row in turns:
            if row.input_tokens < held:
                parts.append([])
                held = 0
            parts[-1].append(row)
            held = row.input_tokens + row.output_tokens
        made += (_session(name, part, n) for n, part in enumerate(parts))
    return sorted(made, key=lambda row: row.at_s)


def _session(name: str, rows: Sequence[LogRow], part: int) -> SessionRow:
    first, turns, held = rows[0], [], 0
    prefix_tokens = min(first.input_tokens, sum(tokens for _, tokens in first.blocks))
    before = first.at_s
    for row in rows:
        new = row.input_tokens - (held or prefix_tokens)
        since_s = row.at_s - before if row.pause_s is None else 0.0
        turns.append(Turn(new, row.output_tokens, row.pause_s or 0.0 if held else 0.0, since_s))
        held, before = row.input_tokens + row.output_tokens, row.at_s
    prefix = _cut(first.blocks, prefix_tokens)
    return SessionRow(
        session=name,
        at_s=first.at_s,
        turns=tuple(turns),
        prefix=prefix,
        region=first.region,
        tools=first.tools,
        part=part,
    )


def _cut(blocks: Blocks, tokens: int) -> Blocks:
    """The blocks of the first `tokens` tokens."""
    kept: list[tuple[str, int]] = []
    for name, block_tokens in blocks:
        if tokens <= 0:
            break
        kept.append((name, min(block_tokens, tokens)))
        tokens -= block_tokens
    return tuple(kept)


class _Talk:
    """Makes a session's program when it begins."""

    __slots__ = ("_limits", "_row")

    def __init__(self, row: SessionRow, limits: Limits) -> None:
        self._row, self._limits = row, limits

    def __call__(self) -> Program:
        row, limits = self._row, self._limits
        prompt = b"".join(prose(name, tokens) for name, tokens in row.prefix)
        for number, turn in enumerate(row.turns):
            prompt += prose(f"{row.text_name} turn {number}", turn.input_tokens)
            prompt = prompt or prose(row.text_name, 1)
            held = len(prompt) // TOKEN_BYTES
            prompt_tokens, answer_tokens = limits.fit(held, turn.output_tokens)
            if prompt_tokens < held:
                if number:
                    return
                prompt = prompt[: prompt_tokens * TOKEN_BYTES]
            waits_s = (turn.pause_s, turn.since_s) if number else (0.0, 0.0)
            (reply,) = yield (_ask(prompt, answer_tokens, row.session, limits, *waits_s, tools=row.tools),)
            prompt += reply


def servegen(
    clients: Sequence[Recorded],
    place: PlaceRule,
    seed: int,
    *,
    make: Maker | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    scale: float = 1.0,
    since: float = 0.0,
    until: float,
) -> Schedule:
    """What these clients ask within [since, until) of the record, `scale` times as often; `since` becomes 0. A client
    keeps its region. Requests have the lengths recorded of it and share nothing; or they are the programs that `make`
    makes. WorkloadError for a client without lengths if there is no `make`.
    """
    bare = next((client.name for client in clients if make is None and not client.lengths), None)
    if bare is not None:
        raise WorkloadError(f"client {bare} was recorded without lengths; say what its requests are with `make`")
    streams = []
    for client in clients:
        dice = Random(f"{seed} {client.name}")
        bursts = (_window(burst, scale, since, until) for burst in client.bursts)
        moments = renewals((burst for burst in bursts if burst.seconds > 0.0), dice)
        streams.append(_of_client(client, moments, place(client.name, since), seed, make, limits, since))
    return heapq.merge(*streams, key=lambda start: start.at)


def _window(burst: Burst, scale: float, since: float, until: float) -> Burst:
    at = max(burst.at, since)
    return Burst(at - since, min(burst.at + burst.seconds, until) - at, burst.per_s * scale, burst.cv)


def _of_client(
    client: Recorded,
    moments: Iterator[float],
    region: str,
    seed: int,
    make: Maker | None,
    limits: Limits,
    since: float,
) -> Iterator[Start]:
    for number, at in enumerate(moments):
        name = f"{client.name} {seed} {number}"
        yield Start(at, region, _Drawn(client, name, at + since, make, limits))


class _Drawn:
    """Makes one request of a ServeGen client when it begins."""

    __slots__ = ("_at", "_client", "_limits", "_make", "_name")

    def __init__(self, client: Recorded, name: str, at: float, make: Maker | None, limits: Limits) -> None:
        self._client, self._name, self._at, self._make, self._limits = client, name, at, make, limits

    def __call__(self) -> Program:
        name, rng, lengths = self._name, Random(self._name), self._client.lengths
        if self._make is not None:
            return self._make(name, rng)
        known = max(0, bisect_right([at for at, _, _ in lengths], self._at) - 1)
        _, inputs, outputs = lengths[known]
        prompt_tokens, answer_tokens = self._limits.fit(inputs.draw(rng), outputs.draw(rng))
        return _Make(name, (), prompt_tokens, answer_tokens, self._limits)()
