"""Authenticates callers by API key: who the caller is, whether this balancer may read the body, and which law applies.

If a tenant's law forbids reading its requests here, the request is redirected (307) to an entry that may read it, or
refused; its body is not read. Keys come with the law: a key that a new law does not name is unknown at once. Never
widens: `x-farhop-allow`, `x-farhop-timeout-ms`, the host's name (`eu.`, `us.`) and the body's residency fields can only
narrow, and a value that is not understood is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from farhop.balance import outcome
from farhop.balance.outcome import Outcome
from farhop.identity.api_keys import PRIORITY_MAX, Keyring, NotIdentified, Principal
from farhop.identity.hop_token import BodyMac
from farhop.identity.redirect_token import HEADER as REDIRECT_TOKEN
from farhop.identity.tenant_certificates import HEADER as CERTIFICATE
from farhop.relay import answers
from farhop.relay.http.head import values
from farhop.service.process.clock import wall
from topology.law import Scope, narrowing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farhop.balance.model_facts import ModelFacts
    from farhop.identity.api_keys import SignedTokens
    from farhop.identity.redirect_token import RedirectToken
    from farhop.identity.tenant_certificates import TenantCertificates
    from farhop.relay.answers import Reply
    from farhop.relay.formats.prompt import Preferences
    from farhop.relay.http.head import Head
    from farhop.service.authentication.keybook import KeyBook
    from topology.law import Law
    from topology.model import Topology

NARROW_PLACES_MAX = 32
NARROW_BYTES_MAX = 1024
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DETAILS = {
    # Clients that follow a redirect leave the key behind if it leads to another host (or, of httpx, another port).
    outcome.MISSING_KEY: "an API key is required: send `Authorization: Bearer KEY`, or `x-api-key: KEY` (if another "
    "entry redirected the client here, most clients do not send their key along: give the client this address)",
    outcome.UNKNOWN_KEY: "this API key is not known",
    outcome.KEY_NOT_VALID: "this API key was revoked, has expired, or is not valid yet: ask for another",
}
_UNREADABLE = "this balancer may not read the request: "
_WHAT = {"jwt": "token", "cert": "certificate"}  # by how a Principal's key_id begins
_TIMEOUT_DIGITS_MAX = 12
# Host names that imply a residency: OpenRouter's, and those that OpenAI's SDKs write for `data_residency`.
_HOST = re.compile(rb"(?:(eu|us)|(ae|au|in|jp)(?=\.api\.))\.", re.IGNORECASE)
_SHOWN_MAX = 16
_OBJECTIVES, _SLO = (b"x-llm-d-inference-objective: ", b"x-gateway-inference-objective: "), b"x-llm-d-slo-ttft-ms: "
CALLERS_MAX = 65_536
_LOGGING = Scope.LOGGING  # to look up an enum's member is a call, and this is asked for every request


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller: who it is, under which law, with how much time."""

    tenant: str
    deadline_s: float  # how long it waits for the whole answer
    hint_scope: str  # separates prefixes that may not be shared
    recorded: bool  # whether its spans and decisions may be kept here, whatever the model
    priority: int = 0
    key: str = ""  # the name of a key of the law

    # From a hop token.
    entry_region: str = ""
    issuer: str = ""
    attempt: str = ""
    decision_id: str = ""
    lawful: frozenset[str] | None = None
    narrow: tuple[tuple[str, ...], ...] = ()
    promised_ttft_ms: float | None = None
    body_mac: BodyMac | None = None  # of the only body that the token admits; None: it has none
    body_hash: bytes = b""  # the SHA-256 of that body; b"": it has none
    waited_s: float = 0.0

    # From an issued key, a token or a certificate.
    key_id: str = ""  # the id of the credential (api_keys.Principal)
    models: tuple[str, ...] = ()  # the only models that an issued key is for; (): any
    user: str = ""  # the salted hash of the user that a token names
    priority_max: int = PRIORITY_MAX  # the highest priority that it allows
    explain: bool = False  # whether an issued key allows route receipts; for keys of the law, the law says so
    # The balancer that relays the request has already charged it to the tenant's limits. Not so for a redirected
    # client, which may ask for more here than it showed that balancer.
    charged: bool = False
    ttft_s: float | None = None  # how soon the client wants the first token; None: not stated


class Authenticator(Protocol):
    """A tier's authentication of callers, as a listener uses it."""

    def caller(self, head: Head) -> Caller | Reply:
        """The authenticated caller of a request, or the refusal."""

    def with_preferences(self, caller: Caller, preferences: Preferences, lines: bytes) -> Caller | Reply:
        """The caller with what the body of its request asks for, and its header `lines`; or why that cannot be."""

    def shut_out(self, caller: Caller) -> Reply | None:
        """The refusal for a caller admitted before the law changed, if it may not be read any more; else None."""

    def models(self, caller: Caller) -> dict[str, ModelFacts]:
        """The models that this caller may use, sorted, with the facts that the law allows it to see."""

    def recorded(self, caller: Caller, model: str) -> bool:
        """Whether spans and decisions of a request for this model may be kept here."""


class LawHolder(Protocol):
    """The holder of a law in force: a tier's machine."""

    @property
    def law(self) -> Law:
        """The law in force now."""


class KeyAuthenticator:
    """The authenticator of a client listener standing in `region`. The holder's law and `offered` are read anew for
    each caller.

    `offered` gives, for a set of regions, the models on offer there.
    """

    _details = _DETAILS
    may_raise_priority = False

    def __init__(
        self,
        region: str,
        holder: LawHolder,
        offered: Callable[[frozenset[str]], Mapping[str, ModelFacts]],
        request_s: float,
    ) -> None:
        self._region, self._holder, self._keyring_law = region, holder, holder.law
        self._keyring = Keyring(self._keyring_law.topology.key)
        self._offered, self._request_s = offered, request_s
        # Priorities by InferenceObjective; the tier sets it.
        self.objective: Callable[[str], int | None] = lambda _name: None
        # Callers with a redirect's token instead, and for which path.
        self.by_token: Callable[[bytes, bytes], Caller | Reply] | None = None
        self.certificates: TenantCertificates | None = None  # callers with a certificate and nothing else
        self._callers: dict[Principal, Caller] = {}  # under this law, for callers without wishes of their own

    def admit_issued(self, issued: KeyBook, tokens: SignedTokens | None = None) -> None:
        """Also admit callers by the keys of this book, and by these tokens."""
        self._keyring = Keyring(self._holder.law.topology.key, issued.get, lambda: wall().timestamp(), tokens)
        issued.changes.append(self._issued_anew)

    def _issued_anew(self) -> None:
        """The issued keys have changed."""
        self._keyring.forget()
        self._callers.clear()

    def caller(self, head: Head) -> Caller | Reply:
        """The authenticated caller of a request, or the refusal."""
        law = self._holder.law
        if law is not self._keyring_law:
            self._keyring.replace(law.topology.key)
            self._callers.clear()
            self._keyring_law = law
        known = head.known
        if self.by_token is not None and REDIRECT_TOKEN in known:
            wish = narrow_of(known.get(b"x-farhop-allow"))
            return (
                _unreadable_allow()
                if wish is None
                else self._within(self.by_token(known[REDIRECT_TOKEN], head.path), wish)
            )
        principal = self._identified(head)
        if not isinstance(principal, Principal):
            return self._unidentified(principal)
        if principal.key_id and (refused := self._key_refusal(principal, head)) is not None:
            return refused
        named = _HOST.match(known.get(b"host", b""))
        if named is not None or b"x-farhop-allow" in known or b"x-farhop-timeout-ms" in known:
            return self._admitted(principal, head, (named[1] or named[2]).decode().lower() if named is not None else "")
        caller: Caller | Reply | None = self._callers.get(principal)
        if caller is not None:
            return caller
        caller = self._admitted(principal, head)
        if isinstance(caller, Caller):
            if len(self._callers) >= CALLERS_MAX:
                del self._callers[next(iter(self._callers))]
            self._callers[principal] = caller
        return caller

    def _unidentified(self, why: NotIdentified | Outcome) -> Reply:
        if isinstance(why, NotIdentified):
            return answers.refusal(why.outcome, why.detail)
        return answers.refusal(why, self._details[why])

    def _key_refusal(self, principal: Principal, head: Head) -> Reply | None:
        """Why an issued key is not valid here; None if it is."""
        if principal.tenant not in self._holder.law.topology.tenants:
            what = _WHAT.get(principal.key_id.partition(":")[0], "API key")
            return answers.refusal(outcome.UNKNOWN_KEY, f"this {what} is of a tenant that the law does not name")
        path = head.path.decode("latin-1")
        if principal.paths and path not in principal.paths:
            detail = f"this API key is not for this path; it is for {', '.join(principal.paths[:_SHOWN_MAX])}"
            return answers.refusal(outcome.KEY_SCOPE, detail)
        return None

    def _identified(self, head: Head) -> Principal | NotIdentified | Outcome:
        """The principal of the API key or token in a head, or, without either, of the certificate."""
        known = head.known
        authorization, x_api_key = known.get(b"authorization"), known.get(b"x-api-key")
        if self.certificates is not None and authorization is None and x_api_key is None and CERTIFICATE in known:
            return self.certificates.identify(known[CERTIFICATE])
        return self._keyring.identify(authorization, x_api_key)

    def _admitted(self, principal: Principal, head: Head, host: str = "") -> Caller | Reply:
        """The caller of this credential, with the options in the request's head; or the refusal. `host` is the
        residency that the host's name states, "" for none."""
        elsewhere = self.entry_refusal(principal.tenant, head.target)
        if elsewhere is not None and not host:
            return elsewhere
        within = self._holder.law.within(host) if host else ()
        if within is None:
            detail = f"host name `{host}.`: there is no such place here; use another host name"
            return answers.refusal(outcome.INVALID_FIELD, detail, param="host")
        if elsewhere is not None or (within and not self._lies_in(within)):
            # Sent elsewhere it would come by another name, and the wish be lost.
            detail = f"host name `{host}.`: the balancer that it led to may not read the request; ask another entry"
            return answers.refusal(outcome.ENTRY_FORBIDDEN, detail)
        wish = narrow_of(head.get(b"x-farhop-allow"))
        if wish is None:
            return _unreadable_allow()
        patience_s = self.patience_of(head.get(b"x-farhop-timeout-ms"))
        if patience_s is None:
            detail = "`x-farhop-timeout-ms` must be a whole number of milliseconds above 0"
            return answers.refusal(outcome.INVALID_FIELD, detail, param="x-farhop-timeout-ms")
        narrow = narrowing(principal.within, wish, within)
        caller = self.trusted(principal.tenant, narrow, principal.key_name, patience_s)
        return caller if not principal.key_id else as_issued(caller, principal)

    def _within(self, caller: Caller | Reply, wish: tuple[str, ...]) -> Caller | Reply:
        """The caller of a token, whose request asks to stay within these places: the token may be of a wider one."""
        if not isinstance(caller, Caller) or not wish or wish in caller.narrow:
            return caller
        narrow = (*caller.narrow, wish)
        is_recorded = recorded(self._holder.law, caller.tenant, "", narrow, self._region, caller.key)
        return replace(caller, narrow=narrow, recorded=is_recorded)

    def _lies_in(self, within: tuple[str, ...]) -> bool:
        """Whether this balancer is in one of these places."""
        topology = self._holder.law.topology
        return self._region in topology.regions and not {self._region, *topology.ancestors(self._region)}.isdisjoint(
            within
        )

    def patience_of(self, given: bytes | None) -> float | None:
        """How long the client will wait for the whole answer: the time that it states, or our limit if that is less."""
        if given is None:
            return self._request_s
        if not given.isdigit() or len(given) > _TIMEOUT_DIGITS_MAX or not int(given):
            return None
        return min(int(given) / 1e3, self._request_s)

    def trusted(
        self, tenant: str, narrow: tuple[tuple[str, ...], ...], key: str = "", patience_s: float | None = None
    ) -> Caller:
        """The caller for a tenant already identified (by key, or by an operator who asks on its behalf)."""
        law = self._holder.law
        known = law.topology.tenants.get(tenant)
        return Caller(
            tenant=tenant,
            deadline_s=self._request_s if patience_s is None else patience_s,
            hint_scope=hint_scope(law.topology, tenant),
            recorded=recorded(law, tenant, "", narrow, self._region, key),
            priority=known.priority if known is not None else 0,
            key=key,
            entry_region=self._region,
            narrow=narrow,
        )

    def vouched(self, claims: RedirectToken) -> Caller | Reply:
        """The caller that one of our redirect tokens names, or the refusal if the law in force does not let this
        balancer read its request.
        """
        why = self._holder.law.verdict(claims.tenant, "", Scope.ENTRY).why_not(self._region)
        if why is not None:
            return answers.refusal(outcome.ENTRY_FORBIDDEN, _UNREADABLE + why)
        patience_s = min(claims.deadline_ms / 1e3, self._request_s)
        caller = self.trusted(claims.tenant, claims.narrow, claims.key, patience_s)
        return caller if not claims.key_id else as_issued(caller, claims)

    def shut_out(self, caller: Caller) -> Reply | None:
        """See Authenticator. Not sent elsewhere: its host's name, or a token that is used up, may have let it in."""
        why = self._holder.law.verdict(caller.tenant, "", Scope.ENTRY).why_not(self._region)
        return None if why is None else answers.refusal(outcome.ENTRY_FORBIDDEN, _UNREADABLE + why)

    def entry_refusal(self, tenant: str, target: bytes) -> Reply | None:
        """The refusal if no balancer in this region may read the tenant's requests; None if it may."""
        law = self._holder.law
        verdict = law.verdict(tenant, "", Scope.ENTRY)
        why = verdict.why_not(self._region)
        if why is None:
            return None
        topology = law.topology
        nearest = sorted(verdict.lawful, key=lambda name: (topology.rtt_ms(self._region, name), name))
        entry = next((url for name in nearest for url in topology.regions[name].entry), None)
        if entry is None:
            return answers.refusal(outcome.ENTRY_FORBIDDEN, _UNREADABLE + why)
        return answers.redirect(entry.rstrip("/") + target.decode("latin-1"), outcome.ENTRY_FORBIDDEN)

    def with_preferences(self, caller: Caller, preferences: Preferences, lines: bytes) -> Caller | Reply:
        """The caller with what the body of its request asks for, and its header `lines`; or why that cannot be."""
        law = self._holder.law
        tenant = law.topology.tenants.get(caller.tenant)
        objective = next((value for name in _OBJECTIVES for value in values(lines, name)), b"").decode("latin-1")
        (slo,) = (*values(lines, _SLO), b"")[:1]
        ttft_ms = float(slo) if slo.isdigit() and len(slo) <= _TIMEOUT_DIGITS_MAX else None
        if ttft_ms and caller.ttft_s is None:  # else the hop token says what is left of it
            caller = replace(caller, ttft_s=min(ttft_ms / 1e3, caller.deadline_s))
        if tenant is not None and (tenant.tiers or tenant.objectives):
            names = (preferences.tier, objective)
            priority = min(tenant.priority_of(names, ttft_ms), caller.priority_max)
            caller = replace(caller, priority=priority) if priority != caller.priority else caller
        if objective and (tenant is None or objective not in tenant.tiers):
            caller = self._by_objective(caller, objective)
        for field, place in preferences.residency:
            if law.within(place) is None:
                known = law.residencies()
                more = ", ..." if len(known) > _SHOWN_MAX else ""
                detail = f"`{field}`: no place here has this name; there is {', '.join(known[:_SHOWN_MAX])}{more}"
                return answers.refusal(outcome.INVALID_FIELD, detail, param=field)
        return narrowed(law, caller, preferences)

    def _by_objective(self, caller: Caller, name: str) -> Caller:
        """The caller with the priority of an InferenceObjective. Any caller may name any objective, so it can lower the
        priority of the tenant's law, and raise it only if a gateway states it."""
        priority = self.objective(name)
        if priority is None:
            return caller
        most = PRIORITY_MAX if self.may_raise_priority else caller.priority
        return replace(caller, priority=max(0, min(priority, most)))

    def models(self, caller: Caller) -> dict[str, ModelFacts]:
        """The models offered in a region where this caller may use them, sorted, with their facts."""
        law = self._holder.law
        everywhere = frozenset(law.topology.regions)
        offers = {everywhere: self._offered(everywhere)}  # by where it is lawful: mostly the same for all models
        models: dict[str, ModelFacts] = {}
        judged: dict[str, frozenset[str]] = {}  # the law caches none for places that a client made up
        for model in sorted(offers[everywhere] if not caller.models else offers[everywhere].keys() & {*caller.models}):
            bound = model if model in law.bound_models else ""
            if bound not in judged:
                judged[bound] = law.verdict(caller.tenant, bound, narrow=caller.narrow, key=caller.key).lawful
            lawful = judged[bound]
            if lawful not in offers:
                offers[lawful] = self._offered(lawful)
            if model in offers[lawful]:
                models[model] = offers[lawful][model]
        return models

    def recorded(self, caller: Caller, model: str) -> bool:
        """Whether spans and decisions of a request for this model may be kept here."""
        return recorded(self._holder.law, caller.tenant, model, caller.narrow, self._region, caller.key)


class GatewayAuthenticator(KeyAuthenticator):
    """Trusts a gateway that has authenticated its callers and names the tenant in a header: for a port that only
    gateways can reach."""

    may_raise_priority = True

    def __init__(
        self,
        region: str,
        holder: LawHolder,
        offered: Callable[[frozenset[str]], Mapping[str, ModelFacts]],
        request_s: float,
        header: str,
    ) -> None:
        super().__init__(region, holder, offered, request_s)
        self._header = header.encode()
        self._details = {
            outcome.MISSING_KEY: f"the gateway must name the tenant, once, in the header `{header}`",
            outcome.UNKNOWN_KEY: f"the tenant that the gateway names in the header `{header}` is not known",
        }

    def _identified(self, head: Head) -> Principal | Outcome:
        """The tenant named by the header. A header given twice is refused: a client may have added one."""
        known = head.known.get(self._header)
        named = [known] if known is not None else list(values(head.onward, self._header + b": "))
        if len(named) != 1:
            return outcome.MISSING_KEY
        tenant = named[0].decode("latin-1")
        return Principal(tenant, "") if tenant in self._holder.law.topology.tenants else outcome.UNKNOWN_KEY


def as_issued(caller: Caller, by: Principal | RedirectToken) -> Caller:
    """The caller with the restrictions of a credential that was issued beside the law: key, token or certificate."""
    priority = min(caller.priority, by.priority_max)
    return replace(
        caller, key_id=by.key_id, models=by.models, user=by.user, priority=priority, priority_max=by.priority_max,
        explain=by.explain,
    )  # fmt: skip


def narrowed(law: Law, caller: Caller, preferences: Preferences) -> Caller:
    """The caller, narrowed to the residency that its request's body names, by this law's map: a place that the map
    lacks contains no region. Lists that the caller already has are not repeated, since a hop token brings them, too."""
    lists = [within if (within := law.within(place)) is not None else (place,) for _, place in preferences.residency]
    more = tuple(within for within in dict.fromkeys(lists) if within and within not in caller.narrow)
    return replace(caller, narrow=(*caller.narrow, *more)) if more else caller


def hint_scope(topology: Topology, tenant: str) -> str:
    """The scope that separates this tenant's prefixes from those of others: its name, or "" if it shares prefixes."""
    known = topology.tenants.get(tenant)
    return "" if known is not None and known.share_prefixes else f"tenant:{tenant}"


def recorded(
    law: Law, tenant: str, model: str, narrow: tuple[tuple[str, ...], ...], region: str, key: str = ""
) -> bool:
    """Whether spans and decisions of a tenant's requests may be kept in `region`. `model` "": whatever the model. `key`
    is the law's, whose places may be fewer by now than `narrow` says."""
    return region in law.verdict(tenant, model, _LOGGING, narrow, key).lawful


def _unreadable_allow() -> Reply:
    detail = f"`x-farhop-allow` must be a comma-separated list of at most {NARROW_PLACES_MAX} names of places"
    return answers.refusal(outcome.INVALID_FIELD, detail, param="x-farhop-allow")


def narrow_of(value: bytes | None) -> tuple[str, ...] | None:
    """The places in an `x-farhop-allow` header; None if it is malformed or too much for a hop token to carry on."""
    if value is None:
        return ()
    places = tuple(place.strip(" \t") for place in value.decode("latin-1").split(","))
    fits = len(value) <= NARROW_BYTES_MAX and len(places) <= NARROW_PLACES_MAX
    return places if fits and all(map(_PLACE.fullmatch, places)) else None
