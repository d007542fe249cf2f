"""The listeners of a region: for global balancers (hop token), for clients (API key), for gateways that ask for a
choice.

Each has its own port and authenticator; all share one relay. Never decides: the flow does.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from farhop.identity.hop_token import HopVerifier
from farhop.identity.redirect_token import RedirectTokenVerifier, holder
from farhop.service.admission.ingress import Ingress
from farhop.service.admission.prompt_tokens import PromptTokens
from farhop.service.admission.request_reader import RequestReader
from farhop.service.admission.routing_keys import HeaderMatchReader, SessionReader
from farhop.service.assembly import dataplane
from farhop.service.authentication.authenticator import GatewayAuthenticator, KeyAuthenticator
from farhop.service.authentication.peer_authenticator import peer_authenticator_of
from farhop.service.process.clock import wall
from farhop.service.tokenization.tokenizer import Files, Tokenizers
from regional_lb.app.redirect_token import RedirectedCallers
from regional_lb.app.serve import HopAuthenticator

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from farhop.balance.machine import Request
    from farhop.balance.model_facts import ModelFacts
    from farhop.relay.answers import Reply
    from farhop.relay.relay import Relay
    from farhop.service.assembly.dataplane import DataPlane
    from farhop.service.assembly.instruments import Instruments
    from farhop.service.authentication.authenticator import Authenticator
    from farhop.service.process.clock import Clock
    from regional_lb.app.config import RegionalConfig
    from regional_lb.picker.config import PickerConfig
    from regional_lb.picker.server import PickerServer
    from regional_lb.scheduler.flow import RegionalFlow


class Listeners:
    """All ports of a regional balancer. `ready`: whether work should be sent here. `tokenizers` are None if none is
    configured, `picker` if no gateway uses it."""

    def __init__(
        self,
        config: RegionalConfig,
        flow: RegionalFlow,
        relay: Relay,
        plane: DataPlane,
        instruments: Instruments,
        clock: Clock,
        rng: Random,
        *,
        incarnation: int,
        ready: Callable[[], bool],
    ) -> None:
        self._config, self._flow, self._plane, self._clock, self._ready = config, flow, plane, clock, ready
        self._instruments, self._rng, tls = instruments, rng, plane.tls
        self._session = SessionReader(
            **config.session.model_dump(), wanted=lambda: flow.splits.wants_session or flow.policies.wants_session
        )
        self.tokenizers, self.prompt_tokens = _tokenizers(config), None
        if self.tokenizers is not None:
            lineages = flow.replicas.lineages
            self.tokenizers.bases_of = lambda model: lineages.of.get(model) or ()
            self.prompt_tokens = PromptTokens(self.tokenizers, self._wants_tokens, clock, instruments.telemetry)

        self._hop_verifier = HopVerifier(config.hop.secrets(), config.region)
        above = peer_authenticator_of(config.tier, config.trust_domain)
        self.hop_authenticator = HopAuthenticator(self._hop_verifier, flow, clock, names_body=not above.mutual)
        self.authenticator = KeyAuthenticator(config.region, flow, self._offered, config.limits.request_s)
        instruments.telemetry.may_record, instruments.telemetry.law_holder = self.authenticator.recorded, flow
        instruments.telemetry.collector = config.collector_in(flow.law.topology)
        flow.law_changes.append(instruments.telemetry.law_changed)
        self._redirect_tokens = RedirectTokenVerifier(
            config.hop.secrets(), config.region, holder(config.instance, incarnation)
        )
        self.authenticator.by_token = RedirectedCallers(self._redirect_tokens, flow, clock).caller

        self.hop_ingress = self._ingress(self.hop_authenticator)
        self.client_ingress = self._ingress(self.authenticator, ready)
        self.hop_ingress.relay = self.client_ingress.relay = relay
        relay.restart_with_model = (
            self.client_ingress.restart_with_model
        )  # only at this port may names stand for models
        self._ingresses = [self.hop_ingress, self.client_ingress]
        admits = partial(above.admits, "global") if above.mutual else None
        self.tier_listener = plane.listener(
            "tier", self.hop_ingress, tls.listener("tier", config.tier, admits), is_hop=True
        )
        self.client_listener = plane.listener("client", self.client_ingress, tls.listener("client", config.client))
        self.picker: PickerServer | None = None
        self._picker_authenticator: Authenticator | None = None
        if config.picker is not None:
            self._make_picker(config.picker, relay)

    def _ingress(self, authenticator: Authenticator, ready: Callable[[], bool] | None = None) -> Ingress:
        reader = RequestReader(
            authenticator,
            clock=self._clock,
            rng=self._rng,
            session=self._session,
            header_matches=HeaderMatchReader(self._flow.splits),
            guard=self._plane.guard,
            large=self._plane.large,
            to_engines=True,
        )
        return Ingress(
            authenticator, reader, telemetry=self._instruments.telemetry, clock=self._clock, rng=self._rng,
            tokens=self.prompt_tokens, ready=ready,
        )  # fmt: skip

    def _make_picker(self, config: PickerConfig, relay: Relay) -> None:
        """The port for gateways, which ask on behalf of their clients."""
        from regional_lb.picker.server import PickerServer  # brings HTTP/2: only where it is wanted

        flow, plane, authenticator = self._flow, self._plane, self._authenticator_of(config)
        self._picker_authenticator = authenticator
        handler = self._ingress(authenticator, self._ready)
        self._ingresses.append(handler)
        handler.relay = self.picker = PickerServer(
            config, handler, relay, dataplane.client_limits(self._config.limits), plane.budget, plane.requests,
            tls=plane.tls.listener("picker", config, protocol="h2"), view=lambda: flow.replicas.view, ready=self._ready,
            log=self._instruments.log,
        )  # fmt: skip

    def _authenticator_of(self, config: PickerConfig) -> Authenticator:
        if config.callers == "hop":  # the gateway's certificate is not that of the balancer that signed
            return HopAuthenticator(self._hop_verifier, self._flow, self._clock, names_body=True)
        if config.callers == "gateway":
            return GatewayAuthenticator(
                self._config.region, self._flow, self._offered, self._config.limits.request_s,
                config.tenant_header,
            )  # fmt: skip
        return self.authenticator

    def _offered(self, regions: frozenset[str]) -> dict[str, ModelFacts]:
        view = self._flow.replicas.view
        return {model: view.facts(model) for model in view.by_model} if self._config.region in regions else {}

    def _wants_tokens(self, request: Request) -> bool:
        return self._flow.wants_tokens(request, self._clock.now())

    # -- what is known later than they are made

    def gate(self, gate: Callable[[], Reply | None]) -> None:
        """Admit no request while `gate` returns a reason."""
        for ingress in self._ingresses:
            ingress.gate = gate

    def prioritise(self, objective: Callable[[str], int | None]) -> None:
        """Priorities by the name of an InferenceObjective, at every port where clients may name one."""
        for authenticator in (self.authenticator, self._picker_authenticator):
            if isinstance(authenticator, KeyAuthenticator):
                authenticator.objective = objective

    def prepared(self, config: RegionalConfig) -> Callable[[], None]:
        """Build everything that depends on a configuration; see Reloader."""
        hop, guard = HopVerifier(config.hop.secrets(), config.region), config.requests.guard()
        redirects = RedirectTokenVerifier(config.hop.secrets(), config.region, "")
        session = SessionReader(**config.session.model_dump(), wanted=lambda: False)

        def put() -> None:
            self._config = config
            self._hop_verifier.adopt(hop)
            self._redirect_tokens.adopt(redirects)
            self._plane.guard.adopt(guard)
            self._session.adopt(session)
            self._plane.relimit(config.limits)

        return put

    # -- open and closed

    async def open_tier(self) -> int:
        """Accept global balancers; returns the port."""
        return await self.tier_listener.open(self._config.tier.host, self._config.tier.port)

    async def open_entries(self) -> str:
        """Let clients and gateways in, where the configuration has ports for them; which ports, for people."""
        config, ports = self._config, ""
        if self.picker is not None and config.picker is not None:
            at = config.picker
            ports = f", gateways on {at.host}:{await self.picker.open(at.host, at.port)}"
        if config.client is not None:
            port = await dataplane.open_entry(self.client_listener, config.client, self._ready)
            ports = f", clients on {config.client.host}:{port}{ports}"
        return ports

    async def drain(self) -> None:
        """No new connections; requests under way may finish, for as long as is configured."""
        picked = () if self.picker is None else (self.picker.close(self._config.limits.drain_s),)
        await asyncio.gather(self._plane.drain(), *picked)

    async def close(self) -> None:
        """Stop tokenizing prompts."""
        if self.tokenizers is not None:
            self.tokenizers.close()


def _tokenizers(config: RegionalConfig) -> Tokenizers | None:
    """The configured tokenizers. Raises ConfigError."""
    files = {model: Files(named.file, named.template or "") for model, named in config.tokenizer_of().items()}
    return Tokenizers(files, wall) if files else None
