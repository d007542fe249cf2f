"""Reads trace files (plain or gzipped) and ServeGen's archives: the only IO of the workloads.

Every error is one line with the file, the line and the remedy; nothing is skipped silently and nothing is guessed. Rows
are returned in order of time, whatever their order in the file: clocks of several machines jitter. Never writes. Files
are given by path; none is shipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import accumulate, chain, islice, pairwise
from math import isfinite, isnan
from pathlib import Path
from statistics import median_low
from typing import IO, Any, TypeVar

import msgspec

from farhop_lab.workloads import own_logs
from farhop_lab.workloads.arrivals import Burst
from farhop_lab.workloads.traces import (
    MOONCAKE_BLOCK_TOKENS,
    AzureRow,
    Histogram,
    LogRow,
    MooncakeRow,
    Recorded,
    SessionRow,
)

ROWS_MAX = 5_000_000
TOKENS_MAX = 10_000_000
MEMBER_BYTES_MAX = 256 * 1024 * 1024
LINE_CHARS_MAX = 256 * 1024 * 1024  # a whole log may be one array on one line
PAUSE_S_MAX = 604_800.0
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
AZURE_HEAD = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_AS_OWN = "farhop sim import FILE --out mine.yaml"
_AS_A_LOG = f"{_AS_OWN} --block-tokens"
_HEAD_CHARS_MAX = 80
_TOLD_BY_LINES = 100
_TAR_AT, _TAR = 257, b"ustar"
_GZIP = b"\x1f\x8b"
_UNREADABLE = {
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it first: zstd -d"),
    b"BZh": ("compressed with bzip2", "unpack it first: bunzip2"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    b"\xff\xfe": ("UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "save it as UTF-8"),
}
_BEHIND = re.compile(r'[^{"]+\{\s*"[^"]+"\s*:')  # as container engines and syslog write a line of JSON
_STRETCH_S = 600.0  # ServeGen gives a rate for each 10 minutes

_Row = TypeVar("_Row")
_Timed = TypeVar("_Timed", LogRow, SessionRow)


class TraceError(Exception):
    """A trace that cannot be used. The text is one line: file, line, what is wrong, remedy."""


class BrokenOffError(TraceError):
    """A file that cannot be read further."""


def mooncake(path: Path) -> list[MooncakeRow]:
    """Mooncake's JSON lines. Raises TraceError."""
    rows: list[MooncakeRow] = []
    for number, row in _objects(path, MooncakeRow):
        _check_tokens(path, number, row.input_length, row.output_length)
        if row.at_ms < 0:
            at = f"{row.at_ms:.15g}"
            raise _bad(path, number, f"timestamp {at}; milliseconds from 0 on are expected, shift all of them")
        if not (isfinite(row.at_ms) and row.at_ms == int(row.at_ms)):  # of other traces in seconds, with blocks, too
            what = f"timestamp {row.at_ms:.15g}; whole milliseconds are expected"
            raise _bad(path, number, f"{what}, others need a log: {_AS_A_LOG} N --field at_s=timestamp (or at_ms=)")
        covers = len(row.hash_ids) * MOONCAKE_BLOCK_TOKENS
        if not covers - MOONCAKE_BLOCK_TOKENS < max(1, row.input_length) <= max(1, covers):
            what = f"hash_ids cover {covers} of input_length {row.input_length}; one per {MOONCAKE_BLOCK_TOKENS} is due"
            raise _bad(path, number, f"{what}, and blocks of another length need a log: {_AS_A_LOG} N")
        rows.append(row)
    return sorted(_some(path, rows), key=lambda row: row.at_ms)


def azure(path: Path) -> list[AzureRow]:
    """Azure's CSV. Times count from the earliest. Raises TraceError."""
    rows: list[AzureRow] = []
    first: datetime | None = None
    lines = _lines(path)
    for number, head in islice(lines, 1):
        if head.strip().split(",") != AZURE_HEAD:
            raise _bad(path, number, f"the head is {head.strip()[:80]!r}; {','.join(AZURE_HEAD)} is expected")
    for number, line in lines:
        try:
            moment, inputs, outputs = line.strip().split(",")
            at = datetime.fromisoformat(moment)
            tokens = int(inputs), int(outputs)
        except ValueError as error:
            raise _bad(path, number, f"{error}; a timestamp and two whole numbers are expected") from None
        _check_tokens(path, number, *tokens)
        first = first or at
        if (at.tzinfo is None) != (first.tzinfo is None):
            raise _bad(
                path, number, f"TIMESTAMP {moment} and line 2's differ in having a time zone; give it to all or none"
            )
        rows.append(AzureRow((at - first).total_seconds(), *tokens))
    return _from_zero(path, rows)


def burstgpt(path: Path) -> list[AzureRow]:
    """BurstGPT's CSV, with or without its later columns `Session ID` and `Elapsed time`. A row without response tokens
    is a request that failed there: it was asked, so it is kept with an answer of one token. Raises TraceError.
    """
    rows: list[AzureRow] = []
    columns: list[int] = []
    lines = _lines(path)
    for number, head in islice(lines, 1):
        cells = [cell.strip() for cell in head.split(",")]
        missing = [name for name in BURSTGPT_COLUMNS if name not in cells]
        if missing:
            raise _bad(path, number, f"no column {missing[0]!r}; {', '.join(BURSTGPT_COLUMNS)} are expected")
        columns = [cells.index(name) for name in BURSTGPT_COLUMNS]
    for number, line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        try:
            at, inputs, outputs = (float(cells[column]) for column in columns)
        except IndexError:
            raise _bad(path, number, "columns are missing; is the file truncated?") from None
        except ValueError as error:
            raise _bad(path, number, f"{error}; {', '.join(BURSTGPT_COLUMNS)} must be numbers") from None
        _check_moment(path, number, at)
        _check_tokens(path, number, inputs, outputs)
        rows.append(AzureRow(at, int(inputs), max(1, int(outputs))))
    return _from_zero(path, rows)


def _from_zero(path: Path, rows: list[AzureRow]) -> list[AzureRow]:
    ordered = sorted(_some(path, rows), key=lambda row: row.at)
    return [AzureRow(row.at - ordered[0].at, row.input_tokens, row.output_tokens) for row in ordered]


def _from_first(path: Path, rows: list[_Timed]) -> list[_Timed]:
    """In the order of their times, which count from the earliest."""
    first = min(row.at_s for row in _some(path, rows))
    moved = (msgspec.structs.replace(row, at_s=row.at_s - first) for row in rows)
    return sorted(moved, key=lambda row: row.at_s)


def log(path: Path) -> list[LogRow]:
    """A log's JSON lines, each a LogRow. Times count from the earliest. A block has one length wherever it stands, the
    median. Raises TraceError.
    """
    rows: list[LogRow] = []
    for number, row in _objects(path, LogRow):
        _check_tokens(path, number, row.input_tokens, row.output_tokens, *(tokens for _, tokens in row.blocks))
        _check_moment(path, number, row.at_s, *(() if row.pause_s is None else (row.pause_s,)))
        rows.append(row)
    return _from_first(path, _alike(rows))


def _alike(rows: list[LogRow]) -> list[LogRow]:
    """Each block of one length: a recording estimates it anew from each prompt's tokens and bytes, and texts that begin
    alike would part where it differs. The median, since a prompt in another script may be far off.
    """
    found: dict[str, list[int]] = {}
    for row in rows:
        for name, tokens in row.blocks:
            found.setdefault(name, []).append(tokens)
    lengths = {name: median_low(tokens) for name, tokens in found.items()}
    return [
        msgspec.structs.replace(row, blocks=tuple((name, lengths[name]) for name, _ in row.blocks))
        if row.blocks
        else row
        for row in rows
    ]


def published(path: Path) -> tuple[str, list[LogRow]] | None:
    """The kind of trace that a file is, if a scenario plays it as it is (`mooncake`, `sessions`), and a summary of its
    requests. Raises TraceError.
    """
    if not path.is_file():  # a pipe can be read once only
        return None
    for _, line in islice(_lines(path), 1):
        with suppress(msgspec.MsgspecError, RecursionError):
            names = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
            if {"hash_ids", "input_length"} <= names and "session_id" not in names:
                return "mooncake", [
                    LogRow(at_s=row.at_ms / 1e3, input_tokens=row.input_length, output_tokens=row.output_length)
                    for row in mooncake(path)
                ]
            if {"session", "turns"} <= names:
                found = (row for session in sessions(path) for row in _turns(session))
                return "sessions", sorted(found, key=lambda row: row.at_s)
    return None


def _turns(session: SessionRow) -> Iterator[LogRow]:
    """A session's requests, as if answers took no time."""
    at_s, held = session.at_s, sum(tokens for _, tokens in session.prefix)
    for turn in session.turns:
        at_s, held = at_s + max(turn.pause_s, turn.since_s), held + turn.input_tokens
        yield LogRow(
            at_s=at_s,
            input_tokens=held,
            output_tokens=turn.output_tokens,
            session=session.session,
            region=session.region,
        )
        held += turn.output_tokens


def own_log(
    path: Path, fields: Mapping[str, str], *, skip: bool = False, block_tokens: int = 0
) -> tuple[list[LogRow], list[str]]:
    """A user's own request log: JSON lines, one JSON array, or CSV with a head; with fields of any names (own_logs), as
    rows of a `log` in order of time, with pauses within sessions if it is known how long answers took. Also returns
    what was left out: with `skip`, one message for each line that cannot be read, before them one for the rest of a
    file that breaks off; otherwise none. `block_tokens`: the length of the blocks that `hash_ids` name; 0: these are
    not read. Raises TraceError.

    AIPerf's and Dynamo's form of Mooncake's traces (`own_logs.MOONCAKE_SESSIONS`), unless it comes by a pipe, is told
    by its first lines; its blocks have 512 tokens unless said otherwise.
    """
    found: list[tuple[LogRow, float | None, str]] = []
    complaints: list[str] = []
    if _has_mooncake_sessions(path):
        times = {} if "at_s" in fields else own_logs.MOONCAKE_SESSIONS
        fields, block_tokens = {**times, **fields}, block_tokens or MOONCAKE_BLOCK_TOKENS
    try:
        for at, request in _requests(path):
            try:
                found.append(_row(path, at, request, fields, block_tokens))
            except TraceError as error:
                if not skip:
                    raise TraceError(f"{error} (--skip leaves such lines out)") from None
                complaints.append(str(error))
    except BrokenOffError as error:
        if not found:
            raise
        if not skip:
            raise TraceError(f"{error} (--skip reads what is before)") from None
        complaints.insert(0, f"{error}; nothing from there on was read")
    if complaints and not found:
        raise TraceError(f"{complaints[0]}; no line of the file can be read")
    found = _with_times(path, found)
    found.sort(key=lambda one: one[0].at_s)
    first = _some(path, found)[0][0].at_s
    ended: dict[str, float | None] = {}  # by session: when its last answer did, if known
    begun: dict[str, str] = {}  # the session of each request, by its own
    rows: list[LogRow] = []
    held: dict[str, LogRow] = {}  # by session: its last row
    for row, took_s, before in found:
        session = begun[row.session] = begun.get(before, row.session) if before else row.session
        last, pause_s = ended.get(session), row.pause_s
        if pause_s is None and session and last is not None:
            pause_s = max(0.0, row.at_s - last)
        pause_s = None if pause_s is None else min(PAUSE_S_MAX, pause_s)
        ended[session] = None if took_s is None else row.at_s + took_s
        at_s = round(row.at_s - first, 6)
        whole = msgspec.structs.replace(row, at_s=at_s, pause_s=pause_s, session=session)
        if "new_tokens" in fields and (last_row := held.get(session)) is not None:
            conversation_tokens = last_row.input_tokens + last_row.output_tokens
            whole = msgspec.structs.replace(
                whole, input_tokens=row.input_tokens + conversation_tokens, blocks=last_row.blocks
            )
        if session:
            held[session] = whole
        rows.append(whole)
    return rows, complaints


def _has_mooncake_sessions(path: Path) -> bool:
    if not path.is_file():  # a pipe can be read once only
        return False
    with suppress(TraceError):  # whoever reads it all reports that
        for _, request in islice(_requests(path), _TOLD_BY_LINES):
            if not isinstance(request, TraceError) and own_logs.is_mooncake_session(request):
                return True
    return False


def _with_times(
    path: Path, found: Sequence[tuple[LogRow, float | None, str]]
) -> list[tuple[LogRow, float | None, str]]:
    """A line without a time comes after its session's line before: by its pause, as if that answer took no time unless
    it says so (in a closed loop the pause alone counts). Raises TraceError.
    """
    timed: list[tuple[LogRow, float | None, str]] = []
    ends: dict[str, float] = {}
    for row, took_s, before in found:
        at_s = row.at_s
        if isnan(at_s):
            if row.session not in ends:
                name = ascii(row.session[:64])
                raise TraceError(f"{path}: the first line of session {name} has a pause and no time; give it a time")
            at_s = ends[row.session] + (row.pause_s or 0.0)
        if row.session:
            ends[row.session] = at_s + (took_s or 0.0)
        timed.append((msgspec.structs.replace(row, at_s=at_s), took_s, before))
    return timed


def _row(
    path: Path, at: int | str, request: Mapping[str, Any] | TraceError, fields: Mapping[str, str], block_tokens: int
) -> tuple[LogRow, float | None, str]:
    """As `own_logs` reads it: a row, how long its answer took, what it goes on from. Raises TraceError."""
    if isinstance(request, TraceError):
        raise request
    try:
        row, took_s = own_logs.row_of(request, fields, block_tokens)
        before = own_logs.before(request, fields)
    except own_logs.FieldError as error:
        raise _bad(path, at, str(error)) from None
    _check_tokens(path, at, row.input_tokens, row.output_tokens, *(tokens for _, tokens in row.blocks))
    return row, took_s, before


def _requests(path: Path) -> Iterator[tuple[int | str, Mapping[str, Any] | TraceError]]:
    """Each request of a log with its place, or what is wrong with the line that should hold it."""
    for at, line in _log_lines(path):
        try:
            whole = msgspec.json.decode(line, type=dict[str, Any]) if isinstance(line, bytes) else line
            spans = None if isinstance(whole, TraceError) else own_logs.spans_of(whole)
        except (msgspec.MsgspecError, RecursionError) as error:
            yield at, _bad(path, at, f"{error}; JSON objects, one a line or in one array, or CSV are expected")
        except own_logs.FieldError as error:
            yield at, _bad(path, at, str(error))
        else:
            if spans is None:
                yield at, whole
            else:
                place = at if isinstance(at, str) else f"line {at}"
                yield from ((f"{place}, span {number}", span) for number, span in enumerate(spans, 1))


def _log_lines(path: Path) -> Iterator[tuple[int | str, bytes | dict[str, str] | TraceError]]:
    """A log's objects, with their line numbers or, in an array, their place in it: as text, or the cells of CSV. A line
    of CSV that is none comes as its error.
    """
    lines = _lines(path)
    for number, first in islice(lines, 1):
        whole = chain([(number, first)], lines)
        if first.lstrip().startswith("["):
            yield from _of_array(path, whole)
        elif _BEHIND.match(first):
            raise _bad(path, number, "JSON behind other text; cut that off, as by: sed 's/^[^{]*//'")
        elif not first.lstrip().startswith("{") and (separator := max(",;\t", key=first.count)) in first:
            yield from _of_csv(path, whole, separator)
        else:
            yield from ((at, line.encode()) for at, line in whole)


def _of_array(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, bytes]]:
    try:
        objects = msgspec.json.decode("".join(line for _, line in lines), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"{path}: {error}; give JSON lines, or one whole array") from None
    yield from ((f"entry {at} of the array", bytes(one)) for at, one in enumerate(objects, 1))


def _of_csv(
    path: Path, lines: Iterable[tuple[int, str]], separator: str
) -> Iterator[tuple[int, dict[str, str] | TraceError]]:
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for number, line in lines:  # noqa: B007 - read below
            yield line

    try:
        reader = csv.reader(texts(), delimiter=separator, strict=True)
        head = [name.strip() for name in next(reader)]
        if max(map(len, head)) > _HEAD_CHARS_MAX:  # of a program's log, perhaps with a prompt: none of it is repeated
            raise _bad(path, number, "no head of CSV; JSON objects, one a line or in one array, or CSV are expected")
        if twice := next((name for name in head if name and head.count(name) > 1), ""):
            raise _bad(path, number, f"the head has {twice!r} twice; leave one of them out")
        for cells in reader:
            if len(cells) == len(head):
                yield number, {name: cell.strip() for name, cell in zip(head, cells, strict=True) if cell.strip()}
            else:
                what = f"{len(cells)} cells under a head of {len(head)}; is the file truncated?"
                yield number, _bad(path, number, what)
    except csv.Error as error:
        what = f"{error}; give whole CSV, or leave its columns of texts out"
        raise BrokenOffError(f"{path}, line {number}: {what}") from None


def sessions(path: Path) -> list[SessionRow]:
    """Sessions' JSON lines, each a SessionRow. Times count from the earliest. Raises TraceError."""
    rows: list[SessionRow] = []
    for number, row in _objects(path, SessionRow):
        if not row.turns:
            raise _bad(path, number, "turns is empty; a session has at least one")
        for turn in row.turns:
            _check_tokens(path, number, turn.input_tokens, turn.output_tokens)
        _check_tokens(path, number, *(tokens for _, tokens in row.prefix))
        pauses_s = (pause_s for turn in row.turns for pause_s in (turn.pause_s, turn.since_s))
        _check_moment(path, number, row.at_s, *pauses_s)
        rows.append(row)
    return _from_first(path, rows)


def _objects(path: Path, kind: type[_Row]) -> Iterator[tuple[int, _Row]]:
    decode = msgspec.json.Decoder(kind).decode
    for number, line in _lines(path):
        try:
            yield number, decode(line)
        except msgspec.ValidationError as error:
            own = f", or make a log of your own names: {_AS_OWN}" if kind is LogRow else ""
            raise _bad(path, number, f"{error}; correct that field, or leave the line out{own}") from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _bad(path, number, f"{error}; one JSON object a line is expected, is the file truncated?") from None


def servegen(path: Path, kind: str) -> list[Recorded]:
    """ServeGen's clients of one kind (such as `m-large` or `deepseek-r1`) from its archive. Raises TraceError."""
    traces: dict[str, tuple[Burst, ...]] = {}
    lengths: dict[str, tuple[tuple[float, Histogram, Histogram], ...]] = {}
    kinds: set[str] = set()
    for name, content in _members(path):
        *_, found, file = ("", *name.split("/"))
        kinds.add(found)
        if found != kind:
            continue
        client, _, what = file.rpartition("-")
        source = Path(f"{path}:{name}")
        if what == "trace.csv":
            traces[client] = _bursts(source, content)
        elif what == "dataset.json":
            lengths[client] = _lengths(source, content)
    if not traces:
        raise TraceError(f"{path}: nothing of kind {kind!r}; it holds {', '.join(sorted(kinds)) or 'nothing'}")
    return [Recorded(f"{kind} {client}", traces[client], lengths.get(client, ())) for client in sorted(traces)]


def _bursts(source: Path, content: str) -> tuple[Burst, ...]:
    bursts: list[tuple[int, Burst]] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            at, per_s, cv, *_ = line.split(",")
            burst = Burst(float(at), _STRETCH_S, float(per_s), float(cv) or 1.0)
        except ValueError as error:
            raise _bad(source, number, f"{error}; seconds, a rate and its variation are expected") from None
        if not (isfinite(burst.at) and 0.0 <= burst.per_s < 1e6 and 0.0 < burst.cv < 1e6):
            raise _bad(
                source, number, f"a rate of {burst.per_s} with variation {burst.cv}; numbers of 0 or more are due"
            )
        bursts.append((number, burst))
    bursts.sort(key=lambda one: one[1].at)
    for (_, before), (number, burst) in pairwise(bursts):
        if burst.at - before.at < _STRETCH_S:  # their requests would be out of order
            overlaps = f"its {_STRETCH_S:g} s from {burst.at:g} s overlap those from {before.at:g} s"
            raise _bad(source, number, f"{overlaps}; give one line for each {_STRETCH_S:g} s")
    return tuple(burst for _, burst in bursts)


def _lengths(source: Path, content: str) -> tuple[tuple[float, Histogram, Histogram], ...]:
    try:
        stretches = msgspec.json.decode(content, type=dict[str, dict[str, str]])
        return tuple(
            (float(at), _histogram(parts["input_tokens"]), _histogram(parts["output_tokens"]))
            for at, parts in sorted(stretches.items(), key=lambda item: float(item[0]))
            if parts["input_tokens"] != "{}"  # no requests in that interval
        )
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise _bad(source, 1, f"{error}; histograms input_tokens and output_tokens by second are expected") from None


def _histogram(text: str) -> Histogram:
    # As Python prints a dictionary: JSON has its keys as texts. Python's own parser takes ten times as long, and an
    # archive has hundreds of these.
    quoted = text.replace(" ", "").replace("{", '{"').replace(",", ',"').replace(":", '":')
    shares = msgspec.json.decode(quoted, type=dict[int, float])
    values, marks = tuple(shares), tuple(accumulate(shares.values()))
    if not marks or not marks[-1] > 0.0 or min(values) < 0:
        raise ValueError("a histogram without any share")
    return Histogram(values, marks)


def _members(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                if member.size > MEMBER_BYTES_MAX:
                    raise TraceError(f"{path}: {member.name} has {member.size} bytes, {MEMBER_BYTES_MAX} at the most")
                file = archive.extractfile(member)
                if file is not None:
                    yield member.name, file.read().decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise TraceError(f"{path}: {_reason(error)}; give a whole .tar.gz archive") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, each with its number."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_CHARS_MAX), ""), 1):
                if number > ROWS_MAX:
                    raise TraceError(f"{path}: more than {ROWS_MAX} lines; cut it")
                if len(line) == LINE_CHARS_MAX:
                    raise _bad(path, number, f"{LINE_CHARS_MAX} characters and more; one object a line is expected")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        at = f", line {number + 1}" if number else ""
        raise BrokenOffError(f"{path}{at}: {_reason(error)}; give a whole, readable file") from None


def _reason(error: Exception) -> str:
    """Without the file's name, which stands before it, and the number."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    """As text: UTF-8 with or without a byte order mark, gzipped or not, whatever the file is called."""
    with path.open("rb") as raw:
        head = raw.peek(4)
        for mark, (what, remedy) in _UNREADABLE.items():
            if head.startswith(mark):
                raise TraceError(f"{path}: it is {what}; {remedy}")
        plain = gzip.GzipFile(fileobj=raw) if head.startswith(_GZIP) else raw
        if plain.peek(_TAR_AT + len(_TAR))[_TAR_AT:].startswith(_TAR):
            remedy = "name ServeGen's in a scenario, as `path` of a work of `kind: servegen`"
            raise TraceError(f"{path}: it is an archive; {remedy}")
        with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="replace") as file:
            yield file


def _check_tokens(path: Path, at: int | str, *counts: float) -> None:
    for tokens in counts:
        if not 0 <= tokens <= TOKENS_MAX:
            raise _bad(path, at, f"{tokens} tokens; a number from 0 to {TOKENS_MAX} is expected")


def _check_moment(path: Path, number: int, at_s: float, *pauses_s: float) -> None:
    if not isfinite(at_s):
        raise _bad(path, number, f"a moment of {at_s} s; a finite number of seconds is expected")
    for pause_s in pauses_s:
        if not 0.0 <= pause_s <= PAUSE_S_MAX:
            raise _bad(path, number, f"a pause of {pause_s} s; 0 to {PAUSE_S_MAX:g} are expected")


def _some(path: Path, rows: list[_Row]) -> list[_Row]:
    if not rows:
        raise TraceError(f"{path}: it holds no request; give the whole file")
    return rows


def _bad(path: Path, at: int | str, what: str) -> TraceError:
    return TraceError(f"{path}, {at if isinstance(at, str) else f'line {at}'}: {what}")
