"""`farhop engine`: emulated replicas in one process. Wrong options are reported all at once, a line each."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError

from farhop_cli.exits import FAULT, warn
from farhop_lab.engine.main import EngineSettings
from farhop_lab.engine.main import run as run_engine

_REPEATED = {"ports": "port", "adapters": "adapter"}  # options that may be given several times


def run(given: dict[str, Any]) -> None:
    """Serve until stopped. Options not given (None) are the settings' own defaults."""
    try:
        settings = EngineSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for problem in error.errors():
            field = "".join(str(step) for step in problem["loc"][:1])
            option = _REPEATED.get(field, field).replace("_", "-")
            message = problem["msg"].removeprefix("Value error, ")
            warn(f"engine: --{option}: {message}" if option else f"engine: {message}")
        raise typer.Exit(FAULT) from None
    run_engine(settings)
