"""Reads trace files (plain or gzipped) and ServeGen's archives: the only IO of the workloads.

Every error is one line with the file, the line and the remedy; nothing is skipped silently and nothing is guessed. Rows
are returned in order of time, whatever their order in the file: clocks of several machines jitter. Never writes. Files
are given by path; none is shipped.
"""

from __future__ import annotations

import ast
import gzip
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import accumulate, pairwise
from math import isfinite
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from farhop_lab.workloads import own_logs
from farhop_lab.workloads.arrivals import Burst
from farhop_lab.workloads.traces import AzureRow, Histogram, LogRow, MooncakeRow, Recorded, SessionRow

ROWS_MAX = 5_000_000
TOKENS_MAX = 10_000_000
MEMBER_BYTES_MAX = 256 * 1024 * 1024
PAUSE_S_MAX = 604_800.0
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
AZURE_HEAD = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_STRETCH_S = 600.0  # ServeGen gives a rate for each 10 minutes

_Row = TypeVar("_Row")


class TraceError(Exception):
    """A trace that cannot be used. The text is one line: file, line, what is wrong, remedy."""


def mooncake(path: Path) -> list[MooncakeRow]:
    """Mooncake's JSON lines. Raises TraceError."""
    rows: list[MooncakeRow] = []
    for number, row in _objects(path, MooncakeRow):
        _check_tokens(path, number, row.input_length, row.output_length)
        if row.at_ms < 0:
            raise _bad(path, number, f"timestamp {row.at_ms}; milliseconds from 0 on are expected, shift all of them")
        if len(row.hash_ids) * 512 < row.input_length:
            covers = len(row.hash_ids) * 512
            raise _bad(path, number, f"hash_ids cover {covers} of input_length {row.input_length}; one per 512 is due")
        rows.append(row)
    return sorted(_some(path, rows), key=lambda row: row.at_ms)


def azure(path: Path) -> list[AzureRow]:
    """Azure's CSV. Times count from the earliest. Raises TraceError."""
    rows: list[AzureRow] = []
    first: datetime | None = None
    for number, line in _lines(path):
        cells = line.strip().split(",")
        if number == 1:
            if cells != AZURE_HEAD:
                raise _bad(path, 1, f"the head is {line.strip()[:80]!r}; {','.join(AZURE_HEAD)} is expected")
            continue
        try:
            moment, inputs, outputs = cells
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
    for number, line in _lines(path):
        cells = [cell.strip() for cell in line.rstrip("\r\n").split(",")]
        if number == 1:
            missing = [name for name in BURSTGPT_COLUMNS if name not in cells]
            if missing:
                raise _bad(path, 1, f"no column {missing[0]!r}; {', '.join(BURSTGPT_COLUMNS)} are expected")
            columns = [cells.index(name) for name in BURSTGPT_COLUMNS]
            continue
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


def log(path: Path) -> list[LogRow]:
    """A log's JSON lines, each a LogRow. Times count from the earliest. Raises TraceError."""
    rows: list[LogRow] = []
    for number, row in _objects(path, LogRow):
        _check_tokens(path, number, row.input_tokens, row.output_tokens, *(tokens for _, tokens in row.blocks))
        _check_moment(path, number, row.at_s, *(() if row.pause_s is None else (row.pause_s,)))
        rows.append(row)
    first = min(_some(path, rows), key=lambda row: row.at_s).at_s
    moved = (msgspec.structs.replace(row, at_s=row.at_s - first) for row in rows)
    return sorted(moved, key=lambda row: row.at_s)


def own_log(path: Path, fields: Mapping[str, str], *, skip: bool = False) -> tuple[list[LogRow], list[str]]:
    """A user's own request log: JSON lines (or one JSON array) with fields of any names (own_logs), as rows of a `log`
    in order of time, with pauses within sessions if it is known how long answers took. Also returns what was left out:
    with `skip`, one message for each line that cannot be read; otherwise none. Raises TraceError.
    """
    found: list[tuple[LogRow, float | None]] = []
    complaints: list[str] = []
    for number, line in _log_lines(path):
        try:
            row, took_s = own_logs.row_of(msgspec.json.decode(line, type=dict[str, Any]), fields)
            _check_tokens(path, number, row.input_tokens, row.output_tokens, *(tokens for _, tokens in row.blocks))
            found.append((row, took_s))
        except (msgspec.MsgspecError, own_logs.FieldError, TraceError) as error:
            complaint = str(error) if isinstance(error, TraceError) else f"{path}, line {number}: {error}"
            if isinstance(error, msgspec.MsgspecError):
                complaint += "; one JSON object a line, or one whole array, is expected"
            if not skip:
                raise TraceError(complaint) from None
            complaints.append(complaint)
    found.sort(key=lambda one: one[0].at_s)
    first = _some(path, found)[0][0].at_s
    ended: dict[str, float] = {}
    rows: list[LogRow] = []
    for row, took_s in found:
        before, pause_s = ended.get(row.session), row.pause_s
        if pause_s is None and row.session and before is not None:
            pause_s = max(0.0, row.at_s - before)
        pause_s = None if pause_s is None else min(PAUSE_S_MAX, pause_s)
        if took_s is not None:
            ended[row.session] = row.at_s + took_s
        rows.append(msgspec.structs.replace(row, at_s=round(row.at_s - first, 6), pause_s=pause_s))
    return rows, complaints


def _log_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """A log's objects as text, with their line numbers; those of an array count from 1."""
    array: list[str] | None = None
    for number, line in _lines(path):
        if number == 1 and line.lstrip().startswith("["):
            array = []
        if array is not None:
            array.append(line)
        elif line.strip():
            yield number, line.encode()
    if array is not None:
        try:
            objects = msgspec.json.decode("".join(array), type=list[msgspec.Raw])
        except msgspec.MsgspecError as error:
            raise _bad(path, 1, f"{error}; give JSON lines, or one whole array") from None
        yield from ((at, bytes(one)) for at, one in enumerate(objects, 1))


def sessions(path: Path) -> list[SessionRow]:
    """Sessions' JSON lines, each a SessionRow. Times count from the earliest. Raises TraceError."""
    rows: list[SessionRow] = []
    for number, row in _objects(path, SessionRow):
        if not row.turns:
            raise _bad(path, number, "turns is empty; a session has at least one")
        for turn in row.turns:
            _check_tokens(path, number, turn.input_tokens, turn.output_tokens)
        _check_tokens(path, number, *(tokens for _, tokens in row.prefix))
        _check_moment(path, number, row.at_s, *(turn.pause_s for turn in row.turns))
        rows.append(row)
    first = min(_some(path, rows), key=lambda row: row.at_s).at_s
    moved = (msgspec.structs.replace(row, at_s=row.at_s - first) for row in rows)
    return sorted(moved, key=lambda row: row.at_s)


def _objects(path: Path, kind: type[_Row]) -> Iterator[tuple[int, _Row]]:
    decode = msgspec.json.Decoder(kind).decode
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield number, decode(line)
        except msgspec.ValidationError as error:
            raise _bad(path, number, f"{error}; correct that field, or leave the line out") from None
        except msgspec.MsgspecError as error:
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
    except (msgspec.MsgspecError, KeyError, ValueError, TypeError, SyntaxError) as error:
        raise _bad(source, 1, f"{error}; histograms input_tokens and output_tokens by second are expected") from None


def _histogram(text: str) -> Histogram:
    # Written as Python prints a dictionary, not as JSON.
    shares = ast.literal_eval(text)
    values = tuple(int(value) for value in shares)
    marks = tuple(accumulate(float(share) for share in shares.values()))
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
        raise TraceError(f"{path}: {error}; give a whole .tar.gz archive") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if number > ROWS_MAX:
                    raise TraceError(f"{path}: more than {ROWS_MAX} lines; cut it")
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        at = f", line {number + 1}" if number else ""
        raise TraceError(f"{path}{at}: {error}; give a whole, readable file") from None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _check_tokens(path: Path, number: int, *counts: float) -> None:
    for tokens in counts:
        if not 0 <= tokens <= TOKENS_MAX:
            raise _bad(path, number, f"{tokens} tokens; a number from 0 to {TOKENS_MAX} is expected")


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


def _bad(path: Path, number: int, what: str) -> TraceError:
    return TraceError(f"{path}, line {number}: {what}")
