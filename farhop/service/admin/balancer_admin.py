"""What the admin port of a balancer shows, in either tier: the process, the law, and where a request would go.

Each tier adds what it knows of its regions or replicas. Reads only: no page changes what it shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import msgspec

from farhop.relay.formats import paths
from farhop.service.admin.server import ExplainError
from farhop.service.admission.request_reader import RefusedError
from farhop.store.disk_cache import notice
from farhop.telemetry.release import release
from topology.law import narrowing

if TYPE_CHECKING:
    from farhop.balance.machine import Request
    from farhop.service.admin.server import Question
    from farhop.service.admission.ingress import Ingress
    from farhop.service.authentication.authenticator import KeyAuthenticator
    from farhop.service.law.lawbook import LawBook
    from topology.law import Law

StatusPart: TypeAlias = Callable[[], dict[str, Any]]
StatusList: TypeAlias = Callable[[], list[dict[str, Any]]]


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a status page that the state machine does not know; each is asked when the page is. `disk_caches`: what
    of etcd is kept on disk; `ignored`: what in etcd does not count by our signing keys; `keys`: which API keys are
    known; `accounts`: the usage and audit records."""

    configuration: StatusPart
    disk_caches: StatusList
    ignored: StatusList
    keys: StatusPart
    limits: StatusPart
    accounts: StatusPart


class Machine(Protocol):
    """What both state machines say of themselves."""

    @property
    def law(self) -> Law:
        """The law in force."""

    @property
    def under_way(self) -> int:
        """Requests not finished."""


class BalancerAdmin(ABC):
    """See farhop.service.admin.server.TierAdmin."""

    tier: ClassVar[str]

    def __init__(
        self,
        region: str,
        instance: str,
        machine: Machine,
        *,
        authenticator: KeyAuthenticator,
        ingress: Ingress,
        laws: LawBook,
        process: ProcessStatus,
    ) -> None:
        self._region, self._instance, self._machine, self._process = region, instance, machine, process
        self._authenticator, self._ingress, self._laws = authenticator, ingress, laws
        self.stopping = False

    @abstractmethod
    def ready(self) -> bool:
        """See TierAdmin."""

    @abstractmethod
    def explain(self, request: Request, drained: str = "") -> dict[str, Any]:
        """See TierAdmin."""

    @abstractmethod
    def scaling(self) -> dict[str, dict[str, int]]:
        """See TierAdmin."""

    @abstractmethod
    def tier_status(self) -> dict[str, Any]:
        """What only this tier's status shows, or shows otherwise."""

    def notice(self) -> str:
        """See TierAdmin."""
        return notice(self._process.disk_caches())

    def status(self) -> dict[str, Any]:
        """See TierAdmin."""
        process = self._process
        return {
            "tier": self.tier,
            "region": self._region,
            "instance": self._instance,
            "version": release(),
            "law_epoch": self._machine.law.epoch,
            "law": self._laws.status(),
            "configuration": process.configuration(),
            "kept": process.disk_caches(),
            "ignored": process.ignored(),
            "keys": process.keys(),
            "limits": process.limits(),
            "accounts": process.accounts(),
            "under_way": self._machine.under_way,
            **self.tier_status(),
        }

    def compose(self, question: Question) -> Request:
        """The Request that a question describes, made as the ingress makes it for a client. Raises ExplainError."""
        path = question.path.encode("utf-8", "replace")
        kind = paths.classify(b"POST", path)
        if not isinstance(kind, paths.Kind):
            raise ExplainError(kind.detail)
        try:
            caller = self._authenticator.trusted(question.tenant, narrowing(question.allow))
            return self._ingress.compose(caller, kind, bytes(question.body), path)
        except RefusedError as refused:
            raise ExplainError(msgspec.json.decode(refused.reply.body)["error"]["message"]) from None

    def law(self) -> dict[str, Any]:
        """See TierAdmin."""
        return self._laws.document()

    def topology(self) -> dict[str, Any]:
        """See TierAdmin."""
        return self._laws.topology()
