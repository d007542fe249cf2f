"""The experiment that a drill is exported as; Chaos Toolkit's own `chaos` validates each shipped one, where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drill_documents import NAMES, made

from farhop_cli.drill_fleet import shipped
from farhop_drill.document import read
from farhop_drill.experiment import experiment
from tests.conftest import chaos


def test_an_exported_experiment_has_the_fields_that_its_format_demands() -> None:
    text = experiment(made().model_dump(mode="json"), {"region": "tokyo"}, "--context prod")
    assert {"title", "description", "method"} <= set(text)
    (action,) = text["method"]
    assert action["provider"]["arguments"] == "drill run a-drill --set region=tokyo --context prod"
    assert action["provider"]["timeout"] > made().duration_max_s
    (probe,) = text["steady-state-hypothesis"]["probes"]
    for asked in (probe, *text["rollbacks"]):
        assert asked["provider"]["arguments"].endswith(" --context prod"), "the same fleet is asked for its verdict"
    # Whether the hypotheses hold beforehand or not, the method runs; and whatever happens, running faults are stopped.
    assert text["runtime"] == {
        "rollbacks": {"strategy": "always"}, "hypothesis": {"strategy": "after-method-only"}
    }  # fmt: skip


@pytest.mark.chaos
def test_chaos_toolkit_accepts_every_shipped_drill(tmp_path: Path) -> None:
    command = chaos()
    assert command is not None
    for name, found in shipped().items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(experiment(read(found.text, name, NAMES).model_dump(mode="json"), {})))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it looks for `farhop` there
        asked = [command, "--no-version-check", "--no-log-file", "validate", str(file)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path})
        assert done.returncode == 0, (name, done.stdout, done.stderr)
