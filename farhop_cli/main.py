"""The `farhop` command: one line per subcommand's wiring; what they do lives in the rooms they call.

Errors are one line on stderr and a non-zero exit: 2 for bad usage, configuration or topology, 1 for a check that failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Farhop: routes LLM requests to the right region and the right replica, lawfully.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (YAML).")]


@app.command("global")
def run_global(config: Config) -> None:
    """Run a global balancer.    Example: farhop global --config virginia-global.yaml"""
    from global_lb.main import run

    run(config)


@app.command("regional")
def run_regional(config: Config) -> None:
    """Run a regional balancer.    Example: farhop regional --config virginia-regional.yaml"""
    from regional_lb.main import run

    run(config)


def main() -> None:
    """The entry point."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
