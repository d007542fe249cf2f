"""Reads trace files, the only part of workloads that opens any: plain or gzipped, and ServeGen's archives.

Every complaint is one line that names the file, the line and the remedy; nothing is skipped silently and nothing is
guessed. Never writes. The files are given by path, and none is shipped.
"""

from __future__ import annotations

import ast
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from datetime import datetime
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from farhop_lab.workloads.arrivals import Burst
from farhop_lab.workloads.traces import AzureRow, Histogram, MooncakeRow, Recorded

ROWS_MAX = 5_000_000
TOKENS_MAX = 10_000_000
CLIENTS_MAX = 10_000
MEMBER_BYTES_MAX = 256 * 1024 * 1024
AZURE_HEAD = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_STRETCH_S = 600.0  # ServeGen gives a rate for each 10 minutes

_Row = TypeVar("_Row")


class TraceError(Exception):
    """A trace that cannot be used. The text is one line: file, line, what is wrong, remedy."""


def mooncake(path: Path) -> list[MooncakeRow]:
    """Mooncake's JSON lines. TraceError."""
    decode = msgspec.json.Decoder(MooncakeRow).decode
    rows: list[MooncakeRow] = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except msgspec.MsgspecError as error:
            raise _bad(path, number, f"{error}; one JSON object a line is expected, is the file truncated?") from None
        _check_tokens(path, number, row.input_length, row.output_length)
        if rows and row.at_ms < rows[-1].at_ms:
            raise _bad(path, number, f"timestamp {row.at_ms} is before {rows[-1].at_ms}; sort the file by timestamp")
        if len(row.hash_ids) * 512 < row.input_length:
            covers = len(row.hash_ids) * 512
            raise _bad(path, number, f"hash_ids cover {covers} of input_length {row.input_length}; one per 512 is due")
        rows.append(row)
    return _some(path, rows)


def azure(path: Path) -> list[AzureRow]:
    """Azure's CSV. Moments count from the first line. TraceError."""
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
            # fromisoformat knows microseconds, the trace has a digit more.
            at = datetime.fromisoformat(moment[:26])
            tokens = int(inputs), int(outputs)
        except ValueError as error:
            raise _bad(path, number, f"{error}; a timestamp and two whole numbers are expected") from None
        _check_tokens(path, number, *tokens)
        first = first or at
        row = AzureRow((at - first).total_seconds(), *tokens)
        if rows and row.at < rows[-1].at:
            raise _bad(path, number, "its timestamp is before the line's above; sort the file by TIMESTAMP")
        rows.append(row)
    return _some(path, rows)


def servegen(path: Path, kind: str) -> list[Recorded]:
    """ServeGen's clients of one kind (such as `m-large` or `deepseek-r1`) from its archive. TraceError."""
    traces: dict[str, tuple[Burst, ...]] = {}
    lengths: dict[str, tuple[tuple[float, Histogram, Histogram], ...]] = {}
    kinds: set[str] = set()
    for name, content in _members(path):
        *_, found, file = ("", *name.split("/"))
        kinds.add(found)
        if found != kind:
            continue
        client, _, what = file.rpartition("-")
        where = Path(f"{path}:{name}")
        if what == "trace.csv":
            traces[client] = _bursts(where, content)
        elif what == "dataset.json":
            lengths[client] = _lengths(where, content)
    if not traces:
        raise TraceError(f"{path}: nothing of kind {kind!r}; it holds {', '.join(sorted(kinds)) or 'nothing'}")
    return [Recorded(f"{kind} {client}", traces[client], lengths.get(client, ())) for client in sorted(traces)]


def _bursts(where: Path, content: str) -> tuple[Burst, ...]:
    bursts = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            at, per_s, cv, *_ = line.split(",")
            burst = Burst(float(at), _STRETCH_S, float(per_s), float(cv) or 1.0)
        except ValueError as error:
            raise _bad(where, number, f"{error}; seconds, a rate and its variation are expected") from None
        if not (isfinite(burst.at) and 0.0 <= burst.per_s < 1e6 and 0.0 < burst.cv < 1e6):
            raise _bad(
                where, number, f"a rate of {burst.per_s} with variation {burst.cv}; numbers of 0 or more are due"
            )
        bursts.append(burst)
    return tuple(bursts)


def _lengths(where: Path, content: str) -> tuple[tuple[float, Histogram, Histogram], ...]:
    try:
        stretches = msgspec.json.decode(content, type=dict[str, dict[str, str]])
        return tuple(
            (float(at), _histogram(parts["input_tokens"]), _histogram(parts["output_tokens"]))
            for at, parts in sorted(stretches.items(), key=lambda item: float(item[0]))
            if parts["input_tokens"] != "{}"  # nobody came in that stretch
        )
    except (msgspec.MsgspecError, KeyError, ValueError, TypeError, SyntaxError) as error:
        raise _bad(where, 1, f"{error}; histograms input_tokens and output_tokens by second are expected") from None


def _histogram(text: str) -> Histogram:
    # They are written as Python writes a dictionary, not as JSON.
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


def _check_tokens(path: Path, number: int, inputs: int, outputs: int) -> None:
    for tokens in (inputs, outputs):
        if not 0 <= tokens <= TOKENS_MAX:
            raise _bad(path, number, f"{tokens} tokens; a number from 0 to {TOKENS_MAX} is expected")


def _some(path: Path, rows: list[_Row]) -> list[_Row]:
    if not rows:
        raise TraceError(f"{path}: it holds no request; give the whole file")
    return rows


def _bad(path: Path, number: int, what: str) -> TraceError:
    return TraceError(f"{path}, line {number}: {what}")
