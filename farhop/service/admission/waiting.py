"""Holds a request that waits before its machine has it: for a thread or process that reads it, or for a root's loan.

Meanwhile the client may leave or the process may stop. Then the request is answered and counted here, and the result
that it waited for is dropped. A bug in the code that follows is answered, and raised. Never decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.balance import outcome
from farhop.relay import answers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from farhop.balance.outcome import Outcome
    from farhop.relay.answers import Reply
    from farhop.relay.http.exchange import Exchange
    from farhop.service.observability.request_telemetry import RequestTelemetry


class Waiting:
    """One request until `future` is done (exchange.ExchangeCallbacks). `then` takes that future and goes on with the
    request, or says what to answer instead."""

    def __init__(
        self,
        exchange: Exchange,
        telemetry: RequestTelemetry,
        future: asyncio.Future[Any],
        then: Callable[[asyncio.Future[Any]], Reply | None],
    ) -> None:
        self._exchange, self._telemetry, self._future, self._then = exchange, telemetry, future, then
        exchange.callbacks = self
        future.add_done_callback(self._over)

    def client_left(self) -> None:
        """See exchange.ExchangeCallbacks."""
        self._give_up(outcome.CLIENT_LEFT, 0)

    def stopped(self) -> None:
        """See exchange.ExchangeCallbacks."""
        reply = answers.stopping()
        self._give_up(reply.outcome, reply.status)
        self._exchange.reply(reply)

    def pause(self) -> None:
        """See exchange.ExchangeCallbacks. Nothing is written yet."""

    def resume(self) -> None:
        """See exchange.ExchangeCallbacks."""

    def _give_up(self, reason: Outcome, status: int) -> None:
        self._exchange.callbacks = None
        self._future.cancel()
        self._telemetry.turned_away(self._exchange.context, reason, status)

    def _over(self, future: asyncio.Future[Any]) -> None:
        exchange = self._exchange
        if future.cancelled():
            return
        if exchange.callbacks is not self:
            future.exception()  # its caller is gone
            return
        exchange.callbacks = None
        try:
            reply = self._then(future)
        except Exception:
            reply = answers.refusal(outcome.INTERNAL, "the balancer failed on this request; it is logged")
            self._telemetry.turned_away(exchange.context, reply.outcome, reply.status)
            if exchange.is_open and not exchange.started:
                exchange.reply(reply)
            raise  # the loop's handler has it logged
        if reply is not None:
            self._telemetry.turned_away(exchange.context, reply.outcome, reply.status)
            exchange.reply(reply)
