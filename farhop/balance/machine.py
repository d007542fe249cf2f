"""The events and commands of a tier's state machine: what can happen to a request, and what can be done about it.

`flow.py` of either tier turns one Event into Commands: `handle(event, now) -> list[Command]`. The live relay and the
simulator both use exactly these types. Events are past tense and cover a request's edges, never its chunks; commands
are imperative. Each of them names its request, because the end of one request may wake another. Nothing here does IO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from farhop.balance.outcome import Outcome

if TYPE_CHECKING:
    from topology.law import Law


Carrier = Literal["ids", "solid", "text"]
"""What a stream goes on by elsewhere: token ids; text that begins and ends with characters that no chat template
trims; any text."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The usage that an engine reports, in its own tokens. `cached_tokens` and `reasoning_tokens` (of the completion)
    are None if the engine does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """The load that an engine reported with an answer: requests waiting and running, the share (0..1) of its KV cache
    in use. None: not reported."""

    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None


class HeaderMatch(msgspec.Struct, frozen=True, gc=False):
    """A header or a cookie of this name and value, which an operator's rule looks for in a request's head."""

    kind: Literal["header", "cookie"]
    name: str
    value: str


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """A prompt as its model's tokenizer reads it: `ids`, four bytes each, least first. `cache_salt` is the client's.
    `shape`: of all ways in which a body may be rendered, which this was; one of few words. `whole`: they are all of
    them; else those that it begins with."""

    ids: bytes
    cache_salt: str = ""
    shape: str = ""
    whole: bool = True


class Request(msgspec.Struct, frozen=True, gc=False):
    """Everything that either tier may decide by; the body itself stays in the relay. Points in time are seconds of this
    process's monotonic clock."""

    id: str
    tenant: str
    model: str
    prompt_bytes: int  # canonical and opaque bytes (farhop.relay.formats.prompt.Prompt)
    body_bytes: int
    chain: tuple[int, ...]  # the prompt's prefix chain (farhop.balance.prefix.chain)
    deadline: float  # a point in time
    max_tokens: int | None = None  # of each answer; None: no limit given, 0: nothing is generated
    stream: bool = False
    priority: int = 0  # a larger one is served first

    # Identity and law.
    key: str = ""  # the name of the API key; "": none
    entry_region: str = ""  # the region of the entry that the client reached; "": unknown
    issuer: str = ""  # the global balancer that forwarded the request; "": it came straight from a client
    lawful: frozenset[str] | None = None  # the regions that the hop token permits; None: it came straight from a client
    # Lists of places: the request stays within one of each list. They restrict, and never widen.
    narrow: tuple[tuple[str, ...], ...] = ()
    # The time to the first token that the global balancer promised; None: no promise.
    promised_ttft_ms: float | None = None

    # Routing keys. "", 0 or (): the request has none, or nothing configured here reads it.
    session: int = 0  # a hash of the configured session name
    version: str = ""  # the model version that the client asks for
    header_matches: tuple[HeaderMatch, ...] = ()  # the headers and cookies it bears that operators' rules look for

    # Facts about its prompt, body and past.

    # The prompt's tokens, if a tokenizer is configured here; never sent to another process.
    tokens: Tokens | None = None
    divisible: bool = False  # one replica may prefill it, another decode
    body_hash: int = 0  # distinguishes bodies; 0: bodies are not compared
    waited_s: float = 0.0  # how long it waited in queues of other regions that released it

    # Hashes of session names that are well known and not configured (of coding agents and others): they decide only
    # near ties. 0: none.
    soft_session: int = 0
    parent_session: int = 0  # the session that it came from

    # How it may be sent.
    recomputed: bool = False  # the engine computes the whole prompt, whatever it has cached
    among: frozenset[str] | None = None  # the replicas that a gateway allows; None: any
    once: bool = False  # a gateway carries it: it cannot be sent a second time
    by_anycast: bool = False  # it came by an address that other entries announce, too
    # It continues a broken stream: the engine must accept this carrier. None: it does not.
    continues: Carrier | None = None

    # Names that stand for several models.
    alias: str = ""  # the name that the client asked for, if that stands for `model` and the body was changed; "": none
    alias_why: str = ""  # which models were passed over before this one, and why

    # Its answer.
    answers: int = 1  # how many answers it asks for, each of up to `max_tokens`
    tools: bool = False  # it offers the model tools, so a program waits for the whole answer

    # Other models, and time.
    fallbacks: tuple[str, ...] = ()  # the other models that its name stands for and that may serve it, in order
    # Where each of them may be processed by the law that the request came under; (): the same as `lawful`.
    fallbacks_lawful: tuple[frozenset[str], ...] = ()
    attempted: int = 0  # how many attempts were made while it was another model's request
    # The point in time at which the client wants the first token; None: not stated. A later request is still served.
    first_token_by: float | None = None


# How much more usage than what was sent and asked for an engine may report: media and templates make tokens that are
# not in the body; an engine that calls tools itself continues, and counts each turn; no model's answer is longer.
PROMPT_TOKENS_BEYOND, ANSWER_TOKENS_BEYOND, ANSWER_TIMES, ANSWER_TOKENS_MAX = 1 << 18, 1024, 2, 1 << 20


def plausible(usage: Usage | None, request: Request) -> Usage | None:
    """The usage that an engine reported, clipped to what the request can have used. Otherwise an engine that lies, or
    errs, could use up a tenant's limits for days, and push the tenant behind all others."""
    if usage is None:
        return None
    prompt_most, limit = request.body_bytes + PROMPT_TOKENS_BEYOND, request.max_tokens
    # Some engines take 0 for no limit.
    each_most = min(ANSWER_TOKENS_MAX, ANSWER_TIMES * limit) if limit else ANSWER_TOKENS_MAX
    output_most = request.answers * each_most + ANSWER_TOKENS_BEYOND
    if usage.prompt_tokens <= prompt_most and usage.completion_tokens <= output_most:
        return usage
    prompt, output = min(usage.prompt_tokens, prompt_most), min(usage.completion_tokens, output_most)
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    return Usage(
        prompt,
        output,
        None if cached is None else min(cached, prompt),
        None if reasoning is None else min(reasoning, output),
    )


class Address(msgspec.Struct, frozen=True, gc=False):
    """Where to connect. `host` is a name or literal address, `port` a TCP port, `via` an HTTP proxy on the way.

    `tls` is the name that the certificate there must bear; None is plaintext.
    """

    host: str
    port: int
    via: Address | None = None
    tls: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened. Its name is in the past tense."""


class LawChanged(Event, frozen=True):
    """Another law is in force here from now on. Ignored if its epoch is not later than that of the present law."""

    law: Law


class RequestArrived(Event, frozen=True):
    """Head and body are read, identity is known, and nothing has been decided."""

    request: Request


class PromptTokenized(Event, frozen=True):
    """A request's prompt was tokenized while the request waited; it arrived without tokens, since it had to wait
    anyway."""

    id: str
    tokens: Tokens


class PrefillEnded(Event, frozen=True):
    """The first half of an attempt is done: its decode replica is being sent the request, and where the KV is, or has
    it already (`Prefill.together`)."""

    id: str
    attempt: int


class PrefillFailed(Event, frozen=True):
    """The first half of an attempt broke, or the engine there refused it. If the attempt had not begun it is over: its
    decode replica got nothing, or the request there is cancelled; else the decode replica goes on."""

    id: str
    attempt: int
    outcome: Outcome


class AttemptMoved(Event, frozen=True):
    """The gateway that carries the request could not connect to the chosen target, nor to those after it on its list
    (`passed`, in order): the attempt is at `target` now."""

    id: str
    attempt: int
    target: str
    passed: tuple[str, ...]


class AttemptBegan(Event, frozen=True):
    """The first byte of the upstream's answer is here, and now on its way to the client: the request has started.
    `load` is the load that the engine reported with it, if it did."""

    id: str
    attempt: int
    status: int
    load: EngineLoad | None = None


class AttemptEnded(Event, frozen=True):
    """The upstream's answer was relayed completely. `fault`: what it reported about its engine, if that is broken.

    `chain` is that of the prompt and, behind it, the `answer_bytes` of the answer; () if the answer was not read.
    `whole`: it came with its first byte, without an AttemptBegan before; `load` is then as there.
    """

    id: str
    attempt: int
    status: int
    usage: Usage | None
    fault: Outcome | None = None
    chain: tuple[int, ...] = ()
    answer_bytes: int = 0
    whole: bool = False
    load: EngineLoad | None = None


class AttemptRefused(Event, frozen=True):
    """The tier below refused before it sent anything to an engine. `wait_ms`: how long the request would have waited
    there."""

    id: str
    attempt: int
    outcome: Outcome
    wait_ms: float | None = None


class AttemptFailed(Event, frozen=True):
    """The attempt broke; whether it had begun is known to the machine from AttemptBegan. `resumable`: if it had, its
    stream can be continued by another target that accepts what it is `carried_by` (ids or text), without a character
    lost or repeated. `target_lives`: the target, a tier, ended the answer itself, since its own upstream broke."""

    id: str
    attempt: int
    outcome: Outcome
    resumable: bool = False
    target_lives: bool = False
    carried_by: Carrier = "ids"


class ClientLeft(Event, frozen=True):
    """The client is gone, whatever state the request is in."""

    id: str


class TimerFired(Event, frozen=True):
    """A timer asked for by SetTimer is due. A request has one timer; setting it again moves it."""

    id: str


class Command(msgspec.Struct, frozen=True, gc=False):
    """Something that the relay must do. Its name is an imperative."""


class Prefill(msgspec.Struct, frozen=True, gc=False):
    """The replica that computes a request's prompt before the one that answers it is asked, or, with a `room` of its
    own at its `bootstrap_port`, while that one waits for it there."""

    target: str
    address: Address
    bootstrap_port: int = 0
    room: int | None = None

    @property
    def together(self) -> bool:
        """Whether the prefill and the decode engine are asked at the same time."""
        return self.room is not None


class Forward(Command, frozen=True):
    """Send the request upstream as attempt number `attempt` (from 1). `target` is the region or replica chosen.

    `promised_ttft_ms` is the prediction the choice rests on, None where there is no other choice: then it is no reason
    to refuse; `lawful` is what the next tier may use; `reasons` is the tier's decision, for explanations. With
    `prefill` the prompt is computed there: PrefillEnded or PrefillFailed says how that went. `waited_s`: what the
    request waited in queues of regions asked before. `first_token_by`: by when the target is to begin its answer, so
    that it is with the client in time; None where the client does not say. `longer`: another can hold longer requests
    than the target, so that a refusal for its length is no answer yet (outcome.TOO_LONG).
    """

    id: str
    attempt: int
    target: str
    address: Address
    promised_ttft_ms: float | None
    lawful: frozenset[str] | None = None
    reasons: Any = None
    prefill: Prefill | None = None
    waited_s: float = 0.0
    first_token_by: float | None = None
    longer: bool = False


class Resume(Forward, frozen=True):
    """As Forward, for a request whose client has the beginning of its stream: continue that stream."""


class Hold(Command, frozen=True):
    """Keep the request here, buffered, until a later command names it."""

    id: str


class Answer(Command, frozen=True):
    """Conclude the request from here. If it has started, the relay breaks the stream cleanly with the same words."""

    id: str
    outcome: Outcome
    detail: str
    retry_after_s: float | None = None
    wait_ms: float | None = None
    reasons: Any = None


class FallBack(Command, frozen=True):
    """No target takes the request for its model: it ends here, and starts again as `request`, which is for another
    model."""

    id: str
    request: Request
    reasons: Any = None


class Redirect(Command, frozen=True):
    """Send the client to another entry (307). With `forward` that is the region's own, which the client asks instead
    of us: the tier below gets no more from here than the token it brings. `own`: it is this very process, by the name
    that leads to it alone."""

    id: str
    url: str
    outcome: Outcome
    forward: Forward | None = None
    own: bool = False


class Cancel(Command, frozen=True):
    """Stop the attempt upstream at once; its client is gone or it is given up."""

    id: str
    attempt: int


class Move(Command, frozen=True):
    """Its upstream is drained: break off this attempt, which has begun, if its stream can be continued elsewhere
    without losing a character, and report that (AttemptFailed, `stopping`, resumable); otherwise leave it as it is, and
    report nothing."""

    id: str
    attempt: int


class Recall(Command, frozen=True):
    """The present law forbids its target: take this attempt back unless all of it has been sent, and report so
    (AttemptFailed or PrefillFailed, `unlawful_here`); else leave it as it is, and report nothing."""

    id: str
    attempt: int


class SetTimer(Command, frozen=True):
    """Wake the machine for this request at `at` (monotonic seconds)."""

    id: str
    at: float


class Flow(Protocol):
    """A tier's state machine as its two drivers (relay, simulator) see it."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return the commands, in order. Never awaits, never raises on known events."""
        ...
