"""An attempt whose two halves run at once, as SGLang does it: both engines get the request, and find each other by a
bootstrap room at the first.

The body says where: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`. The second engine's answer is the answer; the
first one's is read to its end and dropped, except a 4xx, which the client gets: the second engine would wait for a
prompt that never comes. Never decides what follows when a half fails: it reports to its owner, once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from farhop.balance import outcome
from farhop.relay.upstream.attempt import AttemptRun
from farhop.relay.upstream.fetch import Collector, FetchError
from farhop.relay.upstream.pair import ANSWER_BYTES_MAX, id_line

if TYPE_CHECKING:
    from farhop.balance.machine import Address, Prefill
    from farhop.relay.active import ActiveRequest
    from farhop.relay.upstream.fetch import Fetched
    from farhop.relay.upstream.pair import PrefillOwner
    from farhop.relay.upstream.pool import UpstreamConnection

LINGER_S = 5.0  # the answer is complete, and that of the prefilling engine is not yet

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def both_body(body: bytes, prefill: Prefill) -> bytes:
    """The request as both engines get it. `body` is a JSON object, `prefill` has a room."""
    host = prefill.address.host
    bootstrap = {
        "bootstrap_host": f"[{host}]" if ":" in host else host,  # as SGLang's own router writes it
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": prefill.room,
    }
    document = _fields.decode(body)
    document.update({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in bootstrap.items()})
    return msgspec.json.encode(document)


class _Drain(Collector):
    """Keeps nothing of an answer that is dropped."""

    __slots__ = ()

    def received(self, data: bytes) -> None:
        """See Collector."""
        if self._head is None or self._head.status != 200:
            super().received(data)


class ConcurrentPairRun(AttemptRun):
    """Prefill and decode requests in flight together: an ordinary attempt at the engine that answers, and beside it the
    request to the prefill engine.
    """

    __slots__ = ("_asked_at", "_body", "_half", "_prefill", "_prefill_owner")

    def __init__(self, owner: PrefillOwner, active: ActiveRequest, number: int, now: float, prefill: Prefill) -> None:
        super().__init__(owner, active, number, now)
        self._prefill, self._asked_at, self._prefill_owner = prefill, now, owner
        self._body = both_body(active.body, prefill)
        self._half: _Drain | None = _Drain(self._write, self._fetched, ANSWER_BYTES_MAX)

    def start(self, address: Address) -> None:
        """Request both connections."""
        assert self._half is not None
        self.owner.pool.lend(self._prefill.address, self._half)
        if self.active.attempt is self:  # the tier's headers may have failed just now
            super().start(address)

    def request(self, host: bytes) -> tuple[bytes, bytes]:
        """See AttemptRun."""
        return self.owner.upstream_head(self.active, host, len(self._body), id_line(self.active)), self._body

    def abort(self) -> None:
        """Cancel the work at both engines at once, without a callback."""
        half, self._half = self._half, None
        if half is not None:
            half.abort()
        super().abort()

    @property
    def is_sent(self) -> bool:
        """See AttemptRun: to both."""
        half = self._half
        return super().is_sent and (half is None or (half.connection is not None and half.connection.has_sent))

    def completed(self) -> None:
        """The answer is complete. The prefill engine has done its part, and may take a moment to confirm it."""
        half = self._half
        if half is not None and not self.is_over:
            self._half = None
            if self.status < 400:
                asyncio.get_running_loop().call_later(LINGER_S, half.abort)
            else:
                half.abort()
        super().completed()

    def check(self, now: float) -> None:
        """As AttemptRun. If both are silent, it is unknown which one is stuck: the failure counts as the first
        half's."""
        if self._half is not None and now - self._asked_at > self.owner.pool.limits.first_byte_s:
            self._failed(outcome.FIRST_BYTE_TIMEOUT)
        else:
            super().check(now)

    # -- the first half

    def _write(self, connection: UpstreamConnection) -> None:
        try:
            head, body = self.request(connection.host)
        except Exception as error:  # noqa: BLE001 - as in AttemptRun.connected: the tier's headers failed, this request is over
            self.abort()
            self.owner.fault(self.active, error)
            return
        connection.write(head + body)

    def _fetched(self, answer: Fetched | FetchError) -> None:
        if self._half is None:
            return  # its answer is not needed any more: the answer is complete
        if isinstance(answer, FetchError):
            self._failed(outcome.PREFILL_FAILED if answer.reason == "size" else answer.outcome)
        elif answer.status == 200:
            self._half = None
            self._prefill_owner.prefill_over(self)
        elif (reason := outcome.of_misconfigured(answer.status)) is not None:
            self._failed(reason)
        elif 400 <= answer.status < 500 and not self.began:
            self.answer_with(answer)  # a 4xx is the client's to know
        else:
            self._failed(outcome.PREFILL_FAILED)

    def _failed(self, reason: outcome.Outcome) -> None:
        half, self._half = self._half, None
        if half is not None:
            half.abort()
        if not self.began:
            self.target = self._prefill.target  # of the two it broke at this one
        self._prefill_owner.prefill_failed(self, reason)
