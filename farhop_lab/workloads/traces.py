"""Recorded work as schedules: Mooncake's conversations, Azure's requests, ServeGen's rates. Rows come from `load`.

What a trace does not say is synthesised by stated rules. Regions: the rule that is given, by conversation (Mooncake),
by request (Azure) or by client (ServeGen). Texts: made up so that they share what the trace says they share and no
more. Moments: a Mooncake timestamp stands for 3 s, within which arrivals are spread. Lengths: an input is cut at its
end where input and answer together pass `context_tokens` (its beginning is what it shares); so is an answer past
`max_tokens`. Pure: all dice are given.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from random import Random

import msgspec
from xxhash import xxh3_64_intdigest

from farhop_lab.workloads.arrivals import Burst, Maker, renewals
from farhop_lab.workloads.places import Rule
from farhop_lab.workloads.program import Ask, Program, Schedule, Start, WorkloadError, one
from farhop_lab.workloads.prose import TOKEN_BYTES, prose

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_BUCKET_MS = 3000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines at hand can take, in tokens, and whose the work is."""

    context_tokens: int = 131_072
    max_tokens: int = 4096
    tenant: str = "t"

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < self.context_tokens:
            raise WorkloadError(
                f"max_tokens {self.max_tokens} must lie within 1 and context_tokens {self.context_tokens}"
            )

    def fit(self, prompt_tokens: int, answer_tokens: int) -> tuple[int, int]:
        """Both lengths as they can be asked for; each at least 1."""
        answer = max(1, min(answer_tokens, self.max_tokens))
        return max(1, min(prompt_tokens, self.context_tokens - answer)), answer


class MooncakeRow(msgspec.Struct, frozen=True, rename={"at_ms": "timestamp"}):
    """A line of the trace: milliseconds, tokens, and names of its blocks of 512 tokens."""

    at_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class AzureRow(msgspec.Struct, frozen=True):
    """A line of the trace: seconds from its first line, tokens."""

    at: float
    input_tokens: int
    output_tokens: int


class Histogram(msgspec.Struct, frozen=True):
    """Values with their cumulated shares."""

    values: tuple[int, ...]
    marks: tuple[float, ...]

    def draw(self, rng: Random) -> int:
        """One of the values."""
        return self.values[min(bisect_right(self.marks, rng.random() * self.marks[-1]), len(self.values) - 1)]


class Recorded(msgspec.Struct, frozen=True):
    """One of ServeGen's clients: its stretches of time, and its lengths (input, output) since given seconds."""

    name: str
    bursts: tuple[Burst, ...]
    lengths: tuple[tuple[float, Histogram, Histogram], ...] = ()


def mooncake(rows: Iterable[MooncakeRow], place: Rule, rng: Random, limits: Limits = Limits()) -> Schedule:  # noqa: B008
    """A request at each row's moment; equal blocks are equal texts. A conversation is told by its second block, since
    the first is everybody's."""
    for at_ms, bucket in groupby(rows, key=lambda row: row.at_ms):
        together = list(bucket)
        moments = sorted(at_ms + rng.random() * MOONCAKE_BUCKET_MS for _ in together)
        for at, row in zip(moments, together, strict=True):
            talk = f"mooncake {row.hash_ids[:2][-1] if row.hash_ids else 'empty'}"
            yield Start(at / 1e3, place(talk, at / 1e3), _asks_blocks(row, talk, limits))


def _asks_blocks(row: MooncakeRow, talk: str, limits: Limits) -> _Make:
    return _Make(
        talk,
        tuple(f"mooncake block {block}" for block in row.hash_ids),
        MOONCAKE_BLOCK_TOKENS,
        *limits.fit(row.input_length, row.output_length),
        limits,
    )


class _Make:
    """Makes a program of one request when it begins: until then a schedule holds no text."""

    __slots__ = ("_answer_tokens", "_blocks", "_each_tokens", "_limits", "_prompt_tokens", "_talk")

    def __init__(
        self,
        talk: str,
        blocks: tuple[str, ...],
        each_tokens: int,
        prompt_tokens: int,
        answer_tokens: int,
        limits: Limits,
    ) -> None:
        self._talk, self._blocks, self._each_tokens = talk, blocks, each_tokens
        self._prompt_tokens, self._answer_tokens, self._limits = prompt_tokens, answer_tokens, limits

    def __call__(self) -> Program:
        need = -(-self._prompt_tokens // self._each_tokens)
        text = b"".join(prose(block, self._each_tokens) for block in self._blocks[:need])
        return one(
            Ask(
                prompt=text[: self._prompt_tokens * TOKEN_BYTES],
                max_tokens=self._answer_tokens,
                answer_tokens=self._answer_tokens,
                tenant=self._limits.tenant,
                session=xxh3_64_intdigest(self._talk.encode()) or 1,
            )
        )


def azure(rows: Iterable[AzureRow], place: Rule, limits: Limits = Limits()) -> Schedule:  # noqa: B008 - frozen
    """A request at each row's moment, which shares its text with nobody: the control without reuse."""
    for number, row in enumerate(rows):
        name = f"azure {number}"
        prompt_tokens, answer_tokens = limits.fit(row.input_tokens, row.output_tokens)
        make = _Make(name, (name,), prompt_tokens, prompt_tokens, answer_tokens, limits)
        yield Start(row.at, place(name, row.at), make)


def servegen(
    clients: Sequence[Recorded],
    place: Rule,
    seed: int,
    *,
    make: Maker | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    scale: float = 1.0,
    since: float = 0.0,
    until: float,
) -> Schedule:
    """What these clients ask within [since, until) of the record, `scale` times as often; the first moment is 0. A
    client stays in its region. Requests have the lengths that were recorded of it, and share nothing; or they are the
    programs that `make` makes. WorkloadError for a client without lengths where nothing is made."""
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
        return _Make(name, (name,), prompt_tokens, prompt_tokens, answer_tokens, self._limits)()
