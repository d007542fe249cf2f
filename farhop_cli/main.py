"""The `farhop` command: its commands, and the module that wires each. Help and completion import no other module.

Exit codes, of every command: 0 success; 1 the answer is negative (refused, down, a check that failed, a difference
found, nothing there to unset); 2 usage, configuration or environment are wrong, in one line on stderr; 3 not all
balancers could be asked, and the output is of the others; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import signal
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typer import Typer

VERSION = "--version"
RELOADED = ("global", "regional", "picker", "dns", "anycast")  # processes that read their files again at SIGHUP


class LazyCommand(NamedTuple):
    """A command: the module and the Typer of it that has the command's wiring, and its line in the help."""

    module: str
    app: str
    help: str


COMMANDS = {
    "up": LazyCommand("verbs", "app", "Run a whole world here until Ctrl-C: etcd, both tiers, engines."),
    "demo": LazyCommand("verbs", "app", "Start the default world, and check what Farhop does, line by line."),
    "ask": LazyCommand("verbs", "app", "Send a request; show its answer, decision and trace."),
    "explain": LazyCommand("look", "explain_app", "Show where a request would go, or why one went where it did."),
    "status": LazyCommand("look", "status_app", "Sum up the fleet: what is wrong, where the load is, which law."),
    "console": LazyCommand(
        "look", "console_app", "Serve a web page that shows the fleet live, and why requests go where they go."
    ),
    "top": LazyCommand("look", "top_app", "Show the fleet live in this terminal: regions, replicas, decisions, law."),
    "context": LazyCommand("context", "context_app", "Contexts: which fleet the commands are for."),
    "bundle": LazyCommand("look", "bundle_app", "Collect what a bug report needs into one file, without secrets."),
    "record": LazyCommand("look", "record_app", "Record a trace of what the fleet serves, for sim and plan."),
    "usage": LazyCommand("look", "usage_app", "Sum up who used what, and what it cost, from usage files."),
    "audit": LazyCommand("look", "audit_app", "Verify an audit log, and prove decisions from it."),
    "log-level": LazyCommand("look", "log_level_app", "Set how much balancers log, until their next start."),
    "law": LazyCommand(
        "law",
        "law_app",
        "The law that all balancers follow: who is served, where their prompts, records and hints may be.",
    ),
    "route": LazyCommand(
        "overrides", "route_app", "How an entry chooses regions and answers; overrides its configuration."
    ),
    "split": LazyCommand("overrides", "split_app", "What share of a model's traffic each version gets in a region."),
    "policy": LazyCommand(
        "overrides", "policy_app", "The policy by which a region picks replicas; overrides its configuration."
    ),
    "bias": LazyCommand("overrides", "bias_app", "Draw requests to a region, or away from it, for a while."),
    "pin": LazyCommand("overrides", "pin_app", "Send a tenant's or a model's requests to one region, for a while."),
    "drain": LazyCommand("overrides", "drain_app", "Move a region's new work, or an entry's clients, elsewhere."),
    "undrain": LazyCommand("overrides", "undrain_app", "End a drain; the region takes its work back gradually."),
    "drill": LazyCommand("drill", "app", "Rehearse a failure: check, inject, measure, restore, judge."),
    "check": LazyCommand(
        "verbs", "app", "Check maps, laws and configurations, each and together: every error at once."
    ),
    "healthcheck": LazyCommand("verbs", "app", "Ask the balancer in this container whether it is alive, or ready."),
    "key": LazyCommand("key", "key_app", "API keys: create, rotate, revoke and list them."),
    "limit": LazyCommand("limit", "limit_app", "What tenants, their keys and models may use, fleet-wide."),
    "hash-key": LazyCommand("verbs", "app", "Print the hash that a topology holds of an API key."),
    "certs": LazyCommand("verbs", "certs_app", "Make certificates and keys for a fleet."),
    "sim": LazyCommand("sim", "app", "Simulate a scenario in virtual time, one router beside another."),
    "plan": LazyCommand(
        "verbs", "app", "Plan capacity: replicas per region, N and N-1, with and without routing between regions."
    ),
    "bench": LazyCommand("bench", "app", "Measure what Farhop costs, how well it routes, and whether it holds."),
    "global": LazyCommand("verbs", "app", "Run a global balancer."),
    "regional": LazyCommand("verbs", "app", "Run a regional balancer."),
    "picker": LazyCommand("verbs", "app", "Run a regional balancer that picks endpoints for gateways (Envoy)."),
    "dns": LazyCommand("entry", "dns_app", "Answer DNS questions for entries, and publish or check the answers."),
    "where": LazyCommand("entry", "where_app", "Show which entry DNS gives a client, why, and for which network."),
    "anycast": LazyCommand(
        "anycast", "app", "Announce an entry's prefixes by BGP while it is ready, and show the state."
    ),
    "engine": LazyCommand("engine", "app", "Run emulated engines: OpenAI-like servers with a GPU's timing and no GPU."),
}


def app() -> Typer:
    """The command line. Typer is imported here: `--version` does without."""
    import typer
    from typer.core import TyperGroup

    class Commands(TyperGroup):
        """The table above as a group whose commands are imported on use."""

        def list_commands(self, _ctx: Any) -> list[str]:
            return list(COMMANDS)

        def get_command(self, _ctx: Any, cmd_name: str) -> Any:
            wired = COMMANDS.get(cmd_name)
            return _command(cmd_name, wired) if wired is not None else None

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """A mistyped name is answered with similar ones: Typer knows only commands that are imported already."""
            close = difflib.get_close_matches(args[0], COMMANDS) if args[0] not in COMMANDS else []
            if close and not ctx.resilient_parsing:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {', '.join(map(repr, close))}?")
            return super().resolve_command(ctx, args)

        def format_commands(self, _ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, wired.help) for name, wired in COMMANDS.items()])

    made = typer.Typer(
        cls=Commands,
        help="Farhop: routes LLM requests to the right region and the right replica, lawfully.",
        epilog="Example:  farhop up    then:  farhop ask hello\n\n"
        "Exit codes: 0 well; 1 the answer is negative; 2 usage, configuration or surroundings are at fault; 3 not all "
        "balancers could be asked.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @made.callback()
    def farhop(
        version: bool = typer.Option(False, VERSION, is_eager=True, callback=_version, help="Print it and end."),
    ) -> None:
        """Does nothing without a command."""

    return made


@cache
def _command(name: str, wired: LazyCommand) -> Any:
    """Built once a process: a run's state is in its context, not in the command."""
    import typer

    found = getattr(importlib.import_module(f"farhop_cli.commands.{wired.module}"), wired.app)
    for info in found.registered_commands:
        if info.name == name:
            single = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
            single.registered_commands.append(info)
            return typer.main.get_command(single)
    made = typer.main.get_command(found)
    made.name = name
    return made


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        sys.stdout.write(f"farhop {version('farhop')}\n")
        raise SystemExit(0)


def main() -> None:
    """The entry point. An unexpected error of the environment is one line, too."""
    _open_streams()
    if sys.argv[1:2] and sys.argv[1] in RELOADED:
        signal.signal(signal.SIGHUP, lambda *_: None)  # until it is up, and reads its files
    try:
        try:
            if sys.argv[1:] == [VERSION]:
                _version(True)
            app()()
        finally:
            sys.stdout.flush()  # here, so that a failure can be reported
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)  # as Click: the reader is gone
    except OSError as error:
        _drop_output()
        sys.stderr.write(f"farhop: {error.filename or 'standard output'}: {error.strerror or error}\n")
        sys.exit(2)


def _open_streams() -> None:
    """A closed standard stream goes to /dev/null, and characters that its encoding lacks become question marks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in this order: each gets its own number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as this process lives
    if sys.stdout.encoding.lower() not in ("utf-8", "utf8") and hasattr(sys.stdout, "reconfigure"):
        with contextlib.suppress(OSError):  # of a file replaced by a pipe, as in a fork of the lab's server
            sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Its buffer is not flushed again at the end of the process."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the same
