"""wrk as the load of requests that are answered in one piece: its script, and its output.

Pure except for `find`. wrk is one C process that keeps a fixed number of connections busy (a closed loop).
"""

from __future__ import annotations

import json
import shutil

import msgspec

from farhop_lab.bench.bodies import KEY, NUMBER, PATH

_MARK = "farhop-bench"
_SCRIPT = """-- Sends the bodies in turn; says in the end, in one line, what happened.
local bodies = {{}}
local function read(path)
  local file = assert(io.open(path, "rb"))
  for line in file:lines() do bodies[#bodies + 1] = line end
  file:close()
end
local requests, turn, first = {{}}, 0, {first}
local headers = {{["authorization"] = "Bearer {key}", ["content-type"] = "application/json"}}

function init(args)
  read({path})
  if first >= 0 then return end
  for i, body in ipairs(bodies) do requests[i] = wrk.format("POST", "{url}", headers, body) end
end

function request()
  turn = turn + 1
  local index = (turn - 1) % #bodies + 1
  if first < 0 then return requests[index] end
  -- No two prompts are the same: each has its number at its end.
  local body = bodies[index]:gsub("{number}", string.format("%010d", first + turn), 1)
  return wrk.format("POST", "{url}", headers, body)
end

function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format("{mark} %d %d %d %d %d %d\\n", summary.requests, summary.duration, e.status,
    e.connect + e.read + e.write + e.timeout, latency:percentile(50), latency:percentile(99)))
end
"""


class WrkError(Exception):
    """wrk did not report its measurements; the text is its output."""


class WrkOutput(msgspec.Struct, frozen=True):
    """The result of a wrk run. `failed` requests met a socket error or a timeout, `refused` a status above 399."""

    requests: int
    seconds: float
    refused: int
    failed: int
    p50_ms: float
    p99_ms: float

    @property
    def errors(self) -> int:
        """All requests that were not answered well."""
        return self.refused + self.failed


def find() -> str | None:
    """Where wrk is; None if it is not installed."""
    return shutil.which("wrk")


def script(bodies_file: str, first: int = -1) -> str:
    """The Lua script: POSTs the bodies of a file, one a line, in rotation. With `first` it numbers their prompts from
    there on.
    """
    return _SCRIPT.format(path=json.dumps(bodies_file), url=PATH, key=KEY, mark=_MARK, first=first, number=NUMBER)


def command(binary: str, script_file: str, url: str, connections: int, seconds: float) -> list[str]:
    """How to run it. wrk measures whole seconds, at least one."""
    return [binary, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout=10s", "-s", script_file, url]


def read(output: str) -> WrkOutput:
    """Parse its output. Raises WrkError."""
    for line in output.splitlines():
        if line.startswith(_MARK + " "):
            try:
                requests, duration_us, refused, failed, p50_us, p99_us = map(int, line.split()[1:])
            except ValueError:
                break
            return WrkOutput(requests, duration_us / 1e6, refused, failed, p50_us / 1e3, p99_us / 1e3)
    raise WrkError(f"wrk did not finish; it said: {output.strip()[-300:] or 'nothing'}")
