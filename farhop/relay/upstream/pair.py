"""An attempt in two halves, as vLLM does it: one engine prefills the prompt, another fetches its KV cache and answers.

The first engine is asked for one token; its answer's `kv_transfer_params` are copied into the request to the second.
The client sees nothing of the first half, and only the fields named here are changed in a body. Never decides what
follows when a half fails: it reports to its owner, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from farhop.balance import outcome
from farhop.relay.upstream.attempt import AttemptOwner, AttemptRun
from farhop.relay.upstream.fetch import Collector, FetchError

if TYPE_CHECKING:
    from farhop.balance.machine import Address, Prefill, Usage
    from farhop.balance.outcome import Outcome
    from farhop.relay.active import ActiveRequest, Attempt
    from farhop.relay.upstream.fetch import Fetched
    from farhop.relay.upstream.pool import UpstreamConnection

ANSWER_BYTES_MAX = 1024 * 1024

_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What a body says of its answer, as far as one token contradicts it. `min_tokens` 1: an engine whose first token were
# the end would keep no KV.
_ONE_TOKEN = {
    name: msgspec.Raw(msgspec.json.encode(value))
    for name, value in (("max_tokens", 1), ("min_tokens", 1), ("stream", False), ("kv_transfer_params", _ASK))
}


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw]


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answer = msgspec.json.Decoder(_Answer)


def prefill_body(body: bytes) -> bytes:
    """The request as the prefill engine gets it. `body` is a JSON object."""
    document = _fields.decode(body)
    document.update(_ONE_TOKEN)
    if "max_completion_tokens" in document:
        document["max_completion_tokens"] = _ONE_TOKEN["max_tokens"]
    document.pop("stream_options", None)
    document.pop("n", None)
    return msgspec.json.encode(document)


def decode_body(body: bytes, kv_transfer_params: bytes) -> bytes:
    """The request as the decode engine gets it. `kv_transfer_params` is a JSON object: where the KV cache is."""
    document = _fields.decode(body)
    document["kv_transfer_params"] = msgspec.Raw(kv_transfer_params)
    return msgspec.json.encode(document)


def kv_transfer_params_of(answer: bytes) -> bytes | None:
    """The object in a prefill's answer that says where its KV is, as JSON; None if there is none."""
    try:
        return msgspec.json.encode(_answer.decode(answer).kv_transfer_params)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def id_line(active: ActiveRequest) -> bytes:
    """The `x-request-id` header line. Both engines must know the request by the same id: some vLLM versions release the
    KV cache when its fetcher names that id."""
    return b"x-request-id: %b\r\n" % active.request.id.encode()


class PrefillOwner(AttemptOwner, Protocol):
    """Receives the callbacks of an attempt in two parts, in addition to those of every attempt. `run` is that
    attempt.
    """

    def prefilled(self, run: PrefillRun, kv_transfer_params: bytes) -> None:
        """The first half is done. `kv_transfer_params` is a JSON object: where its KV cache is."""

    def prefill_over(self, run: Attempt) -> None:
        """The first half is done, and the second was asked with it."""

    def prefill_failed(self, run: Attempt, reason: Outcome) -> None:
        """The prefill request failed, or was refused."""


class PrefillRun:
    """The first half under way. To its owner it looks like an AttemptRun; nothing of it reaches the client."""

    __slots__ = ("_collector", "_owner", "_sent_at", "active", "number", "target")

    began, streams, status, timing = False, False, 0, b""
    usage: Usage | None = None

    def __init__(self, owner: PrefillOwner, active: ActiveRequest, number: int, prefill: Prefill) -> None:
        self._owner, self.active, self.number, self.target = owner, active, number, prefill.target
        self._collector = Collector(self._write, self._fetched, ANSWER_BYTES_MAX)
        self._sent_at = owner.clock()

    @property
    def last_activity_at(self) -> float:
        """When it was made or sent: it gives no sign before it is over."""
        return self._sent_at

    def start(self, address: Address) -> None:
        """Request a connection to the prefill engine."""
        self._owner.pool.lend(address, self._collector)

    def abort(self) -> None:
        """Cancel the work upstream at once, without a callback."""
        self._collector.abort()

    def recall(self) -> None:
        """See active.Attempt. Who is to answer has not been sent it."""
        self.abort()
        self._owner.prefill_failed(self, outcome.UNLAWFUL_HERE)

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer that are held in memory now."""
        return self._collector.held_bytes

    def pause(self) -> None:
        """The client is behind, and is sent nothing."""

    def resume(self) -> None:
        """The client has read what was sent: send more."""

    def check(self, now: float) -> None:
        """Apply the time limit of a first byte to the whole answer; called by the owner's sweep."""
        if self._collector.connection is not None and now - self._sent_at > self._owner.pool.limits.first_byte_s:
            self.abort()
            self._owner.prefill_failed(self, outcome.FIRST_BYTE_TIMEOUT)

    def _write(self, connection: UpstreamConnection) -> None:
        active = self.active
        self._sent_at = self._owner.clock()
        try:
            body = prefill_body(active.body)
            head = self._owner.upstream_head(active, connection.host, len(body), id_line(active))
        except Exception as error:  # noqa: BLE001 - as in AttemptRun.connected: the tier's headers failed, this request is over
            self._collector.abort()
            self._owner.fault(active, error)
            return
        connection.write(head + body)

    def _fetched(self, answer: Fetched | FetchError) -> None:
        if isinstance(answer, FetchError):
            too_much = answer.reason == "size"
            self._owner.prefill_failed(self, outcome.PREFILL_FAILED if too_much else answer.outcome)
        elif (reason := outcome.of_misconfigured(answer.status)) is not None:
            self._owner.prefill_failed(self, reason)
        elif 400 <= answer.status < 500:
            self._owner.prefill_failed(self, outcome.ENGINE_ERROR)
        elif answer.status == 200 and (kv_transfer_params := kv_transfer_params_of(answer.body)) is not None:
            self._owner.prefilled(self, kv_transfer_params)
        else:
            self._owner.prefill_failed(self, outcome.PREFILL_FAILED)


class DecodeRun(AttemptRun):
    """The decode request: an ordinary attempt whose body says where the prompt's KV cache is."""

    __slots__ = ("_kv_transfer_params",)

    def __init__(
        self, owner: PrefillOwner, active: ActiveRequest, number: int, now: float, kv_transfer_params: bytes
    ) -> None:
        super().__init__(owner, active, number, now)
        self._kv_transfer_params = kv_transfer_params

    def request(self, host: bytes) -> tuple[bytes, bytes]:
        """See AttemptRun."""
        body = decode_body(self.active.body, self._kv_transfer_params)
        return self.owner.upstream_head(self.active, host, len(body), id_line(self.active)), body
