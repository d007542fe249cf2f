"""Turns a caller and a body into the Request that a machine decides by. Both tiers use it, so that both see the same
prompt, chain and tokens.

The body gives the model, the length of the answer, and where it must stay; its model may be a name that stands for
other models. A body that cannot be read, or asks for something forbidden, is refused with the field named. Never
answers and never sends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from farhop.balance import outcome
from farhop.balance.machine import Request
from farhop.balance.model_facts import UNKNOWN_FACTS
from farhop.balance.prefix import chain
from farhop.relay import answers
from farhop.relay.formats import bodies, openai
from farhop.relay.formats.field_guard import DEFAULT, OTHER
from farhop.relay.formats.prompt import NO_PREFERENCES, TOOLS
from farhop.service.admission.large_bodies import LARGE_BYTES, Job
from farhop.service.admission.routing_keys import VERSION_HEADER, soft_session
from farhop.service.authentication.authenticator import Caller
from farhop.service.observability.request_telemetry import MODEL_CHARS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import HeaderMatch
    from farhop.balance.model_facts import ModelFacts
    from farhop.relay.answers import Reply
    from farhop.relay.formats.field_guard import Guard
    from farhop.relay.formats.paths import Kind
    from farhop.relay.formats.prompt import Prompt
    from farhop.relay.http.exchange import Exchange
    from farhop.service.admission.large_bodies import LargeBodyReader, ParsedBody
    from farhop.service.admission.routing_keys import HeaderMatchReader, SessionReader
    from farhop.service.authentication.authenticator import Authenticator
    from farhop.service.observability.request_telemetry import RequestContext
    from farhop.service.process.clock import Clock

_LLM_D, _OBJECTIVE = b"x-llm-d-", b"x-gateway-inference-objective: "


class RefusedError(Exception):
    """A request is refused. `reply`: its answer."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.outcome.reason)
        self.reply = reply


class ModelNames(Protocol):
    """Resolves names that stand for other models."""

    def resolved(self, request: Request, allowed: tuple[str, ...]) -> Request | None:
        """The request for the model that it gets, as GlobalFlow.resolve, by its prompt's canonical text; None where its
        name is that. Raises bodies.BodyError."""

    def listed(self, tenant: str) -> dict[str, tuple[str, ...]]:
        """The names that stand for other models for this tenant, and for which."""


class RequestReader:
    """What a listener's requests are read by. `guard` says what engines may be sent. `to_engines`: they are asked from
    here, so that what they cache is kept apart. Bodies above LARGE_BYTES, and heavy ones, are read by `large`, where
    there is one: `job` says how, `read_apart` goes on. `signs`: whether the hash of what is sent on is wanted, too."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        clock: Clock,
        rng: Random,
        session: SessionReader | None = None,
        header_matches: HeaderMatchReader | None = None,
        guard: Guard = DEFAULT,
        large: LargeBodyReader | None = None,
        to_engines: bool = False,
        signs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._authenticator, self._clock, self._rng = authenticator, clock, rng
        self._session, self._header_matches, self._guard = session, header_matches, guard
        self.large, self.to_engines, self.signs = large, to_engines, signs
        self.names: ModelNames | None = None  # while there are names that stand for other models

    def read(self, exchange: Exchange) -> tuple[Request, Prompt]:
        """The request of an exchange whose body was received. Raises RefusedError, or bodies.HeavyError if `large` must
        parse it.
        """
        head, context = exchange.head, exchange.context
        caller, kind, lines = context.caller, context.kind, head.onward
        try:
            prompt = bodies.read(
                kind, exchange.body, head.path, lines, self._guard, lambda: self._only_model(caller),
                light=self.large is not None,
            )  # fmt: skip
        except bodies.BodyError as error:
            raise _refused(error) from None
        finally:
            if self._guard.pending:
                context.unknown_fields = self._guard.met()
        if prompt.preferences is not NO_PREFERENCES or _LLM_D in lines or _OBJECTIVE in lines:
            caller = self._with_preferences(context, caller, prompt, lines)
        version = head.known.get(VERSION_HEADER)
        return self._request(caller, prompt, exchange.body, lines, version, self._clock.now()), prompt

    def job(self, exchange: Exchange) -> Job:
        """How to read a large body in the process for them."""
        head, guard, caller = exchange.head, self._guard, exchange.context.caller
        return Job(
            exchange.context.kind,
            head.path,
            head.onward,
            tuple(guard.media_hosts),
            guard.refuses_unknown,
            caller.hint_scope if self.to_engines else None,
            bool(caller.body_hash),
            self.signs(),
            self._session.field if self._session is not None else "",
            self._only_model(caller),
        )

    def read_apart(self, exchange: Exchange, parsed: ParsedBody, arrived_at: float) -> tuple[Request, Prompt]:
        """As `read`, for a large body that was parsed in another process. Raises RefusedError."""
        head, context, prompt = exchange.head, exchange.context, parsed.prompt
        context.unknown_fields = parsed.unknown
        if context.caller.body_hash and parsed.sha256 != context.caller.body_hash:
            raise RefusedError(other_body())
        if prompt is None:
            raise _refused(parsed.refusal())
        caller = self._with_preferences(context, context.caller, prompt, head.onward)
        context.body_sha256 = parsed.onward_sha256
        version = head.known.get(VERSION_HEADER)
        return self._request(caller, prompt, exchange.body, head.onward, version, arrived_at, parsed.session), prompt

    def compose(self, caller: Caller, kind: Kind, body: bytes, path: bytes = b"") -> tuple[Request, Prompt]:
        """The request that this caller would make with a body. Raises RefusedError."""
        try:
            prompt = bodies.read(kind, body, path, b"", self._guard, lambda: self._only_model(caller))
        except bodies.BodyError as error:
            raise _refused(error) from None
        finally:
            self._guard.met()  # it is not forwarded
        asking = self._authenticator.with_preferences(caller, prompt.preferences, b"")
        if not isinstance(asking, Caller):
            raise RefusedError(asking)
        request = self._request(asking, prompt, body, b"", None, self._clock.now())
        found = None if self.names is None else self.renamed(self.names, asking, kind, request, prompt, body)
        return (request, prompt) if found is None else found[:2]

    def renamed(
        self, names: ModelNames, caller: Caller, kind: Kind, request: Request, prompt: Prompt, body: bytes
    ) -> tuple[Request, Prompt, bytes] | None:
        """The request for the model that its name stands for; None if it is for that already, and for no other in its
        place. Raises RefusedError."""
        if caller.decision_id:
            return None  # it was sent here for this model, which another balancer chose
        try:
            found = names.resolved(request, caller.models)
        except bodies.BodyError as error:
            raise _refused(error) from None
        if found is None or found.model == request.model:
            return (found, prompt, body) if found is not None and bodies.renames(kind) else None
        if not bodies.renames(kind):
            name = request.model[:128]
            detail = f"`{name}` stands for other models, which this path cannot ask for; name a model itself"
            raise RefusedError(answers.refusal(outcome.INVALID_FIELD, detail, param="model"))
        body = openai.renamed(body, found.model)
        prompt = replace(prompt, model=found.model, lacks_model=False)
        made = replace(found, body_bytes=len(body), chain=chain.chain(prompt.canonical, seed_of(caller, prompt)))
        return made, prompt, body

    def chain_anew(self, exchange: Exchange, body: bytes) -> tuple[int, ...]:
        """Of a prompt that was read before, for another model: caches know it by the model. A large one is not read
        again, since all others would wait for it."""
        head, caller = exchange.head, exchange.context.caller
        if len(body) > LARGE_BYTES:
            return ()
        try:
            prompt = bodies.read(
                exchange.context.kind, body, head.path, head.onward, self._guard, lambda: self._only_model(caller),
                light=self.large is not None,
            )  # fmt: skip
        except bodies.HeavyError:
            return ()
        except bodies.BodyError:
            return ()  # what may be asked for has been narrowed since: it was let in before
        finally:
            self._guard.met()  # they were counted when it came
        return chain.chain(prompt.canonical, seed_of(caller, prompt))

    def count_unknown(self, context: RequestContext) -> None:
        """Count the unknown fields of a body that is forwarded: by name, if they may be recorded here."""
        met = context.unknown_fields
        self._guard.count(met if context.recorded else [OTHER] * len(met))

    def models(self, caller: Caller) -> dict[str, ModelFacts]:
        """The models that the caller may use, and the names that stand for any of them, sorted."""
        offered = self._authenticator.models(caller)
        models = dict(offered)
        for name, others in self.names.listed(caller.tenant).items() if self.names is not None else ():
            mine = not caller.models or name in caller.models
            if mine and any(other in offered for other in others):
                models.setdefault(name, UNKNOWN_FACTS)  # its models may differ in every fact
        return dict(sorted(models.items()))

    def _only_model(self, caller: Caller) -> str:
        """The model to use if the body names none: the only one on offer; "" if there are several."""
        models = self._authenticator.models(caller)
        return next(iter(models)) if len(models) == 1 else ""

    def _with_preferences(self, context: RequestContext, caller: Caller, prompt: Prompt, lines: bytes) -> Caller:
        """The caller, once the body is read: every later decision respects the body's preferences."""
        asking = self._authenticator.with_preferences(caller, prompt.preferences, lines)
        if not isinstance(asking, Caller):
            raise RefusedError(asking)
        context.caller, context.law = asking, None  # it may stay within less
        return asking

    def _request(
        self, caller: Caller, prompt: Prompt, body: bytes, headers: bytes, version: bytes | None, arrived_at: float,
        session: bytes | None = None,
    ) -> Request:  # fmt: skip
        """The machine's Request; `session` is what the body's field for it says, if that was read before."""
        header_matches, hashed, soft = self._header_matches, 0, (0, 0)
        matches: tuple[HeaderMatch, ...] = ()
        if header_matches is not None and prompt.model in header_matches.wanted.by_model:
            matches = header_matches.header_matches(prompt.model, headers)
        if prompt.preferences is not NO_PREFERENCES or b"session" in headers:
            soft = soft_session(caller.tenant, headers, prompt.preferences)
        if self._session is not None and self._session.wanted():
            hashed = self._session.read(caller.tenant, body, headers, session)
        return Request(
            # Not the decision's id: a region may see one decision twice, after a failure on the way.
            id=f"{self._rng.getrandbits(64):016x}",
            tenant=caller.tenant,
            model=prompt.model,
            prompt_bytes=len(prompt.canonical) + prompt.opaque_bytes,
            body_bytes=len(body),
            body_hash=xxh3_64_intdigest(body),
            chain=chain.chain(prompt.canonical, seed_of(caller, prompt)),
            deadline=arrived_at + caller.deadline_s,
            first_token_by=None if caller.ttft_s is None else arrived_at + caller.ttft_s,
            max_tokens=prompt.max_tokens,
            answers=prompt.answers,
            tools=prompt.canonical.startswith(TOOLS),
            stream=prompt.stream,
            priority=caller.priority,
            key=caller.key,
            entry_region=caller.entry_region,
            issuer=caller.issuer,
            lawful=caller.lawful,
            narrow=caller.narrow,
            promised_ttft_ms=caller.promised_ttft_ms,
            waited_s=caller.waited_s,
            divisible=prompt.divisible,
            recomputed=prompt.recomputed,
            session=hashed,
            version="" if version is None or header_matches is None else header_matches.version(prompt.model, version),
            header_matches=matches,
            soft_session=soft[0],
            parent_session=soft[1],
        )


def other_body() -> Reply:
    """The answer to a body that its hop token was not signed for."""
    return answers.refusal(outcome.HOP_FORGED, "the hop token was signed for another body")


def _refused(error: bodies.BodyError) -> RefusedError:
    return RefusedError(answers.refusal(error.outcome, error.detail, param=error.param))


def seed_of(caller: Caller, prompt: Prompt) -> int:
    """The first node of the caller's prefix chains for this model: callers that may not share prefixes have no node in
    common."""
    if prompt.cache_salt or len(prompt.model) > MODEL_CHARS_MAX:
        return chain.seed_of(prompt.model, "", prompt.cache_salt, caller.hint_scope)
    return _unsalted_seed(prompt.model, caller.hint_scope)


@lru_cache(maxsize=1024)  # a salt is a secret, and a long name may be anything: neither is remembered
def _unsalted_seed(model: str, scope: str) -> int:
    return chain.seed_of(model, "", "", scope)
