"""A drill as a Chaos Toolkit experiment, which `chaos validate` and `chaos run` take.

Pure. The drill keeps its own checks, aborts and rollback: the experiment runs it by its command and asks for its
verdict. Chaos Toolkit skips a method whose hypothesis is unmet beforehand, and still ends `completed`: so the
hypothesis is only evaluated after the method, and says that the drill *ran* and passed. Rollbacks always run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

VERDICT_WITHIN = "1h"


def experiment(document: Mapping[str, Any], values: Mapping[str, str], extra: str = "") -> dict[str, Any]:
    """Of a drill's document as it was read. `extra`: more arguments of the command, such as `--context prod`."""
    name = str(document["drill"])
    sets = "".join(f" --set {key}={value}" for key, value in sorted(values.items()))
    more = f" {extra}" if extra else ""
    longest_s = int(float(document["duration_max_s"])) + 120  # its bound, and what coming back and judging may take
    return {
        "title": document["title"],
        "description": str(document.get("description") or document["title"]).strip(),
        "tags": ["farhop", "drill", name, str(document["kind"])],
        "configuration": {},
        "steady-state-hypothesis": {
            "title": "the drill ran, and every hypothesis of it holds",
            "probes": [
                {
                    "type": "probe",
                    "name": f"the verdict of {name} is PASS",
                    "tolerance": 0,
                    "provider": _farhop(f"drill report --of {name} --within {VERDICT_WITHIN} --verdict{more}", 60),
                }
            ],
        },
        "method": [
            {
                "type": "action",
                "name": f"run {name}",
                "provider": _farhop(f"drill run {name}{sets}{more}", longest_s),
            }
        ],
        "rollbacks": [
            {"type": "action", "name": f"stop {name}", "provider": _farhop(f"drill stop{more}", 60)},
        ],
        "runtime": {"rollbacks": {"strategy": "always"}, "hypothesis": {"strategy": "after-method-only"}},
        "extensions": [{"name": "farhop", "drill": dict(document)}],
    }


def _farhop(arguments: str, timeout_s: int) -> dict[str, Any]:
    return {"type": "process", "path": "farhop", "arguments": arguments, "timeout": timeout_s}
