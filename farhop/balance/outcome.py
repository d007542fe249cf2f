"""How a request, or one attempt of it, ended: one low-cardinality word for metrics, retries, spans and status codes.

Invariant: an outcome is not retryable unless its entry below says so. Never holds text of a client or an engine.
"""

from enum import StrEnum

import msgspec


class Source(StrEnum):
    """The party that caused an outcome."""

    CLIENT = "client"
    LAW = "law"
    BALANCER = "balancer"
    REGION = "region"
    TRANSPORT = "transport"
    ENGINE = "engine"


class Outcome(msgspec.Struct, frozen=True):
    """One ending. `reason` is unique over all sources and comes from the catalogue below, never from input."""

    source: Source
    reason: str
    retryable: bool = False


_CATALOGUE: dict[str, Outcome] = {}


# What an engine's status says of the request alone. Not of our key for it (401, 403, 407), nor of its load (408, 429).
# By 501 llama.cpp says that it was not started for this (embeddings of a model that chats), and vLLM that it cannot do
# it.
_CLIENTS_FAULTS = frozenset((400, 404, 413, 415, 422, 501))
KEY_REFUSALS = frozenset((401, 407))
"""HTTP statuses of an engine's answers to our key for it."""
REDIRECTS = frozenset(range(300, 400))
"""HTTP statuses by which an engine, or a proxy before it, points elsewhere."""
ENGINES_FAULTS = frozenset(range(500, 600)) - _CLIENTS_FAULTS
"""HTTP statuses of answers that speak against the engine that gave them."""


def _declare(source: Source, reason: str, *, retryable: bool = False) -> Outcome:
    _CATALOGUE[reason] = outcome = Outcome(source, reason, retryable)
    return outcome


def by_reason(reason: str) -> Outcome | None:
    """The catalogue's outcome for a reason read from the wire, or None for a word this build does not know."""
    return _CATALOGUE.get(reason)


def of_answer(status: int) -> Outcome:
    """The outcome of an attempt whose complete answer has this HTTP status and is the engine's own."""
    if status < 400:
        return SERVED
    return REFUSED_BY_ENGINE if status in _CLIENTS_FAULTS else ENGINE_ERROR


def of_misconfigured(status: int) -> Outcome | None:
    """What an engine's HTTP status says of how the operator had us reach it, rather than of the request; None: nothing
    of the kind."""
    if status in KEY_REFUSALS:
        return ENGINE_KEY_REFUSED
    return ENGINE_REDIRECTS if status in REDIRECTS else None


def catalogue() -> tuple[Outcome, ...]:
    """Every outcome there is (for tests and for the status table, which must cover it)."""
    return tuple(_CATALOGUE.values())


SERVED = _declare(Source.ENGINE, "served")
ENGINE_ERROR = _declare(Source.ENGINE, "engine_error")  # an engine's own error: relayed, never retried (but DECLINED)
# What an engine's answer says of the engine itself (farhop.relay.upstream.engine_faults): relayed, never retried, and
# heeded.
ENGINE_OUT_OF_MEMORY = _declare(Source.ENGINE, "engine_out_of_memory")
ENGINE_BROKEN = _declare(Source.ENGINE, "engine_broken")

MALFORMED_HTTP = _declare(Source.CLIENT, "malformed_http")
HEAD_TOO_LARGE = _declare(Source.CLIENT, "head_too_large")
BODY_TOO_LARGE = _declare(Source.CLIENT, "body_too_large")
REQUEST_TIMEOUT = _declare(Source.CLIENT, "request_timeout")
METHOD_NOT_ALLOWED = _declare(Source.CLIENT, "method_not_allowed")
PATH_NOT_ALLOWED = _declare(Source.CLIENT, "path_not_allowed")
INVALID_JSON = _declare(Source.CLIENT, "invalid_json")
INVALID_FIELD = _declare(Source.CLIENT, "invalid_field")
# An engine says that the request is wrong (400, 404, 413, 415, 422): relayed, and no error of the engine's.
REFUSED_BY_ENGINE = _declare(Source.CLIENT, "request_refused_by_engine")
UNKNOWN_MODEL = _declare(Source.CLIENT, "unknown_model")
MISSING_KEY = _declare(Source.CLIENT, "missing_key")
UNKNOWN_KEY = _declare(Source.CLIENT, "unknown_key")
KEY_NOT_VALID = _declare(Source.CLIENT, "key_not_valid")  # revoked, or before or after its time
KEY_SCOPE = _declare(Source.CLIENT, "key_scope")  # the key is good, and not for this model or path
CLIENT_LEFT = _declare(Source.CLIENT, "client_left")
TOO_MANY_CONNECTIONS_OF_CLIENT = _declare(Source.CLIENT, "too_many_connections_of_client")

HOP_MISSING = _declare(Source.CLIENT, "hop_token_missing")
HOP_FORGED = _declare(Source.CLIENT, "hop_token_forged")
HOP_EXPIRED = _declare(Source.CLIENT, "hop_token_expired")
HOP_MISADDRESSED = _declare(Source.CLIENT, "hop_token_misaddressed")
HOP_USED = _declare(Source.CLIENT, "hop_token_used")

# Of the token by which a client that was redirected comes to a region (farhop.identity.redirect_token).
REDIRECT_TOKEN_FORGED = _declare(Source.CLIENT, "redirect_token_forged")
REDIRECT_TOKEN_OVER = _declare(Source.CLIENT, "redirect_token_over")  # its time is over, or it was used
REDIRECT_TOKEN_MISADDRESSED = _declare(Source.CLIENT, "redirect_token_misaddressed")

UNLAWFUL = _declare(Source.LAW, "no_lawful_region")
ENTRY_FORBIDDEN = _declare(Source.LAW, "entry_forbidden")
# The receiving region's own copy of the law says no: another lawful region may still serve the request.
UNLAWFUL_HERE = _declare(Source.LAW, "unlawful_here", retryable=True)
# The same, seen from the head: the token was signed under an earlier law than the region's, and the body was not read.
UNLAWFUL_UNREAD = _declare(Source.LAW, "unlawful_unread", retryable=True)

REDIRECTED = _declare(Source.BALANCER, "redirected")  # the client asks the region itself
ADVISED = _declare(Source.BALANCER, "advised")  # it asked for a decision alone
NO_REGION = _declare(Source.BALANCER, "no_region_serving")
NO_BUFFER = _declare(Source.BALANCER, "buffers_full", retryable=True)
# Usage or audit cannot be written, and the configuration says that nothing is served then.
ACCOUNTS_NOT_WRITABLE = _declare(Source.BALANCER, "accounts_not_writable", retryable=True)
TOO_MANY_CONNECTIONS = _declare(Source.BALANCER, "too_many_connections", retryable=True)
# Our own limit to one address, or no descriptors or ports left here: not the upstream's fault, and nothing was sent.
UPSTREAM_FULL = _declare(Source.BALANCER, "too_many_upstream_connections", retryable=True)
# What is bounded here has a share for each tenant, and this one's is used up.
TENANT_OVER_SHARE = _declare(Source.BALANCER, "tenant_over_its_share", retryable=True)
# The tenant, its key or a model of it has used up its limit (service.limits); the code is OpenAI's.
RATE_LIMITED = _declare(Source.BALANCER, "rate_limit_exceeded")
# The same body was under way at two processes when they ended: no third one is given to it.
ENDED_TWO_PROCESSES = _declare(Source.BALANCER, "request_ended_two_processes")
DEADLINE = _declare(Source.BALANCER, "deadline_exceeded")
# An answer that is not streamed took longer than our limit. That is no failure of its engine, and elsewhere it would
# take as long again: so it is not retried, and counts against no target.
WHOLE_ANSWER_TIMEOUT = _declare(Source.BALANCER, "whole_answer_timeout")
STOPPING = _declare(Source.BALANCER, "stopping", retryable=True)
INTERNAL = _declare(Source.BALANCER, "internal_error")

# A region's refusals: nothing was sent to an engine, so another region may take the request.
NO_REPLICA = _declare(Source.REGION, "no_replica_serving", retryable=True)
QUEUE_FULL = _declare(Source.REGION, "queue_full", retryable=True)
QUEUE_TIMEOUT = _declare(Source.REGION, "queue_timeout", retryable=True)
# Every replica that was asked says that it has no such path: another's engine may have it.
PATH_UNSUPPORTED = _declare(Source.REGION, "path_not_supported_by_engine", retryable=True)
# An engine says that it does not serve the model that it was known to serve: it was started again with another, say. If
# all that serve the model say so, the engine's own words are the answer.
MODEL_NOT_SERVED = _declare(Source.REGION, "model_not_served_by_engine", retryable=True)
# An engine says that it cannot hold such a long request, but another can. The code is OpenAI's.
TOO_LONG = _declare(Source.REGION, "context_length_exceeded", retryable=True)
# The region does not accept our token: keys or clocks of the two tiers disagree. Not the client's doing.
HOP_REJECTED = _declare(Source.REGION, "hop_token_rejected", retryable=True)
MODEL_NOT_HERE = _declare(Source.REGION, "model_not_in_region", retryable=True)
# An operator, or a drill, has it refuse (farhop.store.documents.overrides.RefuseOverride).
REFUSED_BY_OPERATOR = _declare(Source.REGION, "refused_by_operator", retryable=True)
# To work from other regions only, and never where it is the last resort.
FOREIGN_FULL = _declare(Source.REGION, "no_headroom_for_foreign_work", retryable=True)
BROKEN_PROMISE = _declare(Source.REGION, "promise_would_be_broken", retryable=True)

CONNECT_FAILED = _declare(Source.TRANSPORT, "connect_failed", retryable=True)
CONNECT_TIMEOUT = _declare(Source.TRANSPORT, "connect_timeout", retryable=True)
FIRST_BYTE_TIMEOUT = _declare(Source.TRANSPORT, "first_byte_timeout", retryable=True)
# Or a proxy before an engine says so of that engine: 502, and no engine's words.
DIED_BEFORE_START = _declare(Source.TRANSPORT, "upstream_died_before_first_byte", retryable=True)
# The upstream is alive and does not know the attempt: the network lost it, or its answer, before its first byte.
LOST = _declare(Source.TRANSPORT, "lost_on_the_way", retryable=True)
# A connection kept from earlier broke right after it was used again: most likely the other side had just closed it at
# rest, and never saw the request. Retried by the usual rules, as it may have been seen; it counts against no target.
KEPT_CLOSED = _declare(Source.TRANSPORT, "kept_connection_closed", retryable=True)
DIED_MID_STREAM = _declare(Source.TRANSPORT, "upstream_died_mid_stream")
STALLED = _declare(Source.TRANSPORT, "upstream_stalled")
# An engine, or a proxy before it, does not accept our key (401, 407): no client can fix that, as no client's key goes
# there.
ENGINE_KEY_REFUSED = _declare(Source.TRANSPORT, "engine_key_refused", retryable=True)
# An engine, or a proxy before it, redirects (3xx). Neither the balancer nor the client follows: the law knows no such
# place.
ENGINE_REDIRECTS = _declare(Source.TRANSPORT, "engine_redirects", retryable=True)
# What answers is a web page, which no engine sends: a proxy's where one signs in, or another server's at its address.
# Or, at a region's address, it does not name the region, as every answer of its balancer does.
NO_ENGINE_THERE = _declare(Source.TRANSPORT, "no_engine_there", retryable=True)
# An engine, or a proxy before it, says that it takes no request now, and did nothing for this one: while it loads its
# model or stops (503), or for its load alone (429). If no other takes the request, its own words are the answer.
ENGINE_UNAVAILABLE = _declare(Source.TRANSPORT, "engine_unavailable", retryable=True)
ENGINE_BUSY = _declare(Source.TRANSPORT, "engine_busy", retryable=True)
DECLINED_BY_STATUS = {429: ENGINE_BUSY, 503: ENGINE_UNAVAILABLE}
DECLINED = frozenset(DECLINED_BY_STATUS.values())
REFUSALS_OF_THE_WELL = frozenset((PATH_UNSUPPORTED, MODEL_NOT_SERVED, TOO_LONG, ENGINE_BUSY))
"""What an engine answers that is well, and has another to be asked."""
# Of a request that two replicas share: the first failed, or did not say where its KV cache is.
PREFILL_FAILED = _declare(Source.TRANSPORT, "prefill_failed", retryable=True)
BAD_FRAMING = _declare(Source.TRANSPORT, "upstream_bad_framing")


_BLAMELESS = frozenset((KEPT_CLOSED, LOST, ENGINE_BUSY))


def blames_target(reason: Outcome) -> bool:
    """Whether an attempt that broke with this outcome counts against its target: not if one of our own bounds was met,
    nor if the target itself reported the request as lost, or that it is full."""
    return reason.source is Source.TRANSPORT and reason not in _BLAMELESS
