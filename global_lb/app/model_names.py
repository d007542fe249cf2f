"""Resolves names that stand for models: the ingress's queries to the machine. Never decides anything itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farhop.balance import model_steps
from farhop.relay.formats.prompt import BodyError
from global_lb.routing.cascade import Unresolved

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from farhop.service.process.clock import Clock
    from global_lb.routing.flow import GlobalFlow


class ModelNames:
    """See farhop.service.admission.request_reader.ModelNames."""

    def __init__(self, flow: GlobalFlow, clock: Clock) -> None:
        self._flow, self._clock = flow, clock

    def resolved(self, request: Request, allowed: tuple[str, ...]) -> Request | None:
        """The request for the model that it gets; None if its name is a model's own. Raises BodyError."""
        found = self._flow.resolve(request, allowed, self._clock.now())
        if isinstance(found, Unresolved):
            raise BodyError(found.outcome, found.detail, "model")
        return found

    def listed(self, tenant: str) -> dict[str, tuple[str, ...]]:
        """The names that stand for other models for this tenant, and for which."""
        return model_steps.aliases(self._flow.routes.cascades, tenant)
