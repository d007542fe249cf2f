"""Usage records: one CloudEvent for each request, its cost in money, and sums over many. Pure.

A record's id is the decision's with the number of the attempt that answered, so that duplicates can be recognised. What
was not measured is null, never a guess; tokens computed again for a stream that was continued elsewhere are separate,
and not billed. Prices are by epoch: a record names the epoch it was made under, and is always priced by that. Never
holds a text, a prompt's hash or a key: only the key's name.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from farhop.accounts.moments import moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from farhop.accounts.prices import Prices

TYPE = "farhop.request"
DIMENSIONS = ("tenant", "key", "user", "model", "version", "region", "entry_region", "status", "day", "hour",
              "price_epoch", "answer_cache")  # fmt: skip


class Data(msgspec.Struct, frozen=True):
    """What one request took, as far as somebody measured it: `measured` is `engine` (its own count), `ids` (of a
    stream that broke, those that passed), `again` (an answer that was made for another request, and took nothing), or
    `none` (no answer, or one that broke and told nothing).

    `region` is where it was served, "" if nowhere; `entry_region` where it came in. `cached_tokens` are of the input,
    `reasoning_tokens` of the output; `regenerated_tokens` are beside both. `gpu_ms`: a share of a GPU's time, by the
    speeds that the region reports; `request_bytes` is the body's length. `price_epoch`: 0 without a price book.
    `answer_cache`: `hit`, `shared`, `miss` or `bypass` where the route lets answers be given again, else ""; the tokens
    `saved` are those of such an answer, as they were counted when it was made.
    """

    tenant: str
    key: str
    model: str
    version: str
    region: str
    entry_region: str
    status: int
    outcome: str
    stream: bool
    measured: str
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    regenerated_tokens: int
    attempts: int
    duration_ms: float
    ttft_ms: float | None
    gpu_ms: float | None
    request_bytes: int
    price_epoch: int
    user: str = ""
    answer_cache: str = ""
    saved_input_tokens: int = 0
    saved_output_tokens: int = 0


class CloudEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """CloudEvents 1.0, with an extension: `farhopstays` is true of what may not leave the region that wrote it."""

    specversion: Annotated[str, msgspec.Meta(pattern="^1[.]0$")]
    id: str
    source: str
    type: str
    subject: str
    time: str
    datacontenttype: str
    data: Data
    farhopstays: bool = False


class Record(msgspec.Struct, frozen=True, eq=False):
    """A request that is over, as the event loop hands it on: `at_s` is wall time. `data` lacks its price epoch."""

    id: str
    at_s: float
    stays: bool
    data: tuple[Any, ...]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(CloudEvent)
_EPOCH_AT = Data.__struct_fields__.index("price_epoch")


def lines(records: Iterable[Record], source: str, prices: Prices | None) -> list[bytes]:
    """The records as lines of JSON, with their cost if a price book is given."""
    return [_line(one, source, prices) for one in records]


def _line(record: Record, source: str, prices: Prices | None) -> bytes:
    data = record.data
    epoch = prices.epoch_at(record.at_s) if prices is not None else 0
    made = Data(*(*data[:_EPOCH_AT], epoch, *data[_EPOCH_AT:]))
    at = moment(record.at_s)
    event = CloudEvent("1.0", record.id, source, TYPE, made.tenant, at, "application/json", made, record.stays)
    return _encoder.encode(event) + b"\n"


def read(line: bytes) -> CloudEvent | None:
    """The event in a line; None if it is not a usage record."""
    try:
        event = _decoder.decode(line)
        at = datetime.fromisoformat(event.time)
    except (msgspec.DecodeError, ValueError):
        return None
    return event if event.type == TYPE and at.tzinfo is not None else None


# -- sums


class Sums(msgspec.Struct):
    """Over some records. Tokens, seconds, USD. `cost_usd` is what tenants owe; `gpu_usd` what the GPUs' time costs;
    `cache_saved_usd` how much dearer the input had been without the KV cache; `routed_usd` how much dearer (above 0) or
    cheaper (below) it had been to serve at the entry what was served in another region. `unpriced`: requests with
    tokens for which the book has no price. `given_again`: requests that got an answer made for another one, without
    which they had taken `saved_tokens` and cost `answers_saved_usd` more at the tenants' prices."""

    requests: int = 0
    failed: int = 0
    unmeasured: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    regenerated_tokens: int = 0
    gpu_s: float = 0.0
    cost_usd: float = 0.0
    gpu_usd: float = 0.0
    cache_saved_usd: float = 0.0
    routed_usd: float = 0.0
    unpriced: int = 0
    given_again: int = 0
    saved_tokens: int = 0
    answers_saved_usd: float = 0.0

    def add(self, data: Data, prices: Prices | None) -> None:
        """Add one record to the sums."""
        self.requests += 1
        self.failed += data.status >= 400 or data.status == 0
        self.unmeasured += data.measured == "none" and data.status < 400
        fresh, cached, output = data.input_tokens or 0, data.cached_tokens or 0, data.output_tokens or 0
        self.input_tokens += fresh
        self.cached_tokens += cached
        self.output_tokens += output
        self.reasoning_tokens += data.reasoning_tokens or 0
        self.regenerated_tokens += data.regenerated_tokens
        gpu_s = (data.gpu_ms or 0.0) / 1e3
        self.gpu_s += gpu_s
        self.given_again += data.measured == "again"
        self.saved_tokens += data.saved_input_tokens + data.saved_output_tokens
        epoch = prices.of(data.price_epoch) if prices is not None else None
        price = epoch.of_model(data.model) if epoch is not None else None
        if price is not None:
            of_cached = price.input if price.cached is None else price.cached
            self.cost_usd += ((fresh - cached) * price.input + cached * of_cached + output * price.output) / 1e6
            self.cache_saved_usd += cached * (price.input - of_cached) / 1e6
            given = data.saved_input_tokens * price.input + data.saved_output_tokens * price.output
            self.answers_saved_usd += given / 1e6
        elif prices is not None and fresh + output:
            self.unpriced += 1
        if epoch is not None and data.region:
            there, here = epoch.of_region(data.region), epoch.of_region(data.entry_region)
            self.gpu_usd += gpu_s / 3600 * there.usd_per_gpu_hour
            if data.region != data.entry_region:
                wire = data.request_bytes / 1e9 * here.egress_usd_per_gb
                self.routed_usd += gpu_s / 3600 * (here.usd_per_gpu_hour - there.usd_per_gpu_hour) - wire


class Reading:
    """The records read from a fleet's files, each once, however often it was delivered."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self.doubles = self.unreadable = 0

    def events(self, written: Iterable[bytes]) -> Iterator[CloudEvent]:
        """The records in these lines that were not read before."""
        for line in written:
            event = read(line)
            if event is None:
                self.unreadable += 1
            elif (event.source, event.id) in self._seen:
                self.doubles += 1
            else:
                self._seen.add((event.source, event.id))
                yield event


def value_of(event: CloudEvent, dimension: str) -> str:
    """A record's value in one of DIMENSIONS. Days and hours are in UTC."""
    if dimension == "day":
        return event.time[:10]
    if dimension == "hour":
        return event.time[:13]
    return str(getattr(event.data, dimension))
