"""How a command for a fleet is declared: the options that all share, and the verbs that all nouns share.

Only declares the commands and their options: other modules are imported when a command runs, so that help is quick.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from farhop_cli.help_page import App
from farhop_cli.options import FLEET, PLAIN, DryRun, FleetOptions, Json
from farhop_cli.options import regions as known_regions

if TYPE_CHECKING:
    from farhop_cli.setting import Noun

Region = Annotated[str, typer.Argument(help="The region.", autocompletion=known_regions)]
SomeRegion = Annotated[
    str,
    typer.Argument(
        metavar="REGION", help="Only this region. Default: all.", show_default=False, autocompletion=known_regions
    ),
]
OneRegion = Annotated[
    str, typer.Option("--region", help="Only this region. Default: all.", autocompletion=known_regions)
]
DrainedRegion = Annotated[
    str,
    typer.Argument(metavar="REGION", help="The region.", show_default=False, autocompletion=known_regions),
]
Tenant = Annotated[str, typer.Option("--tenant", help="Only requests of this tenant.")]
Model = Annotated[str, typer.Option("--model", help="Only requests for this model.")]
Against = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="What `get --json` printed, or a balancer's configuration. -: standard input.",
    ),
]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """For the imports of a process that keeps running: they leave no garbage, and looking for some takes a tenth of the
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def verb(
    app: typer.Typer, name: str, example: str, writes: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as the command `name` of `app`. It gets `fleet_options` and returns the exit code.

    The options that make up `fleet_options` are the same for all commands: they are added here only.
    """
    shared: dict[str, tuple[Any, Any]] = {
        **({"dry_run": (DryRun, False)} if writes else {}),
        **FLEET, "as_json": (Json, False),
    }  # fmt: skip

    def wire(work: Callable[..., int]) -> Callable[..., int]:
        def command(**given: Any) -> None:
            fleet_options = FleetOptions(**{option: given.pop(option) for option in shared})
            raise typer.Exit(work(**given, fleet_options=fleet_options))

        hints = get_type_hints(work, include_extras=True)
        own = [
            one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for one in inspect.signature(work).parameters.values()
            if one.name != "fleet_options"
        ]
        added = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for option, (hint, default) in shared.items()
        ]
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        command.__doc__ = work.__doc__
        app.command(name, epilog=f"Example:  {example}")(command)
        return work

    return wire


class Verbs(TyperGroup):
    """The commands of a noun, in one order for all."""

    def list_commands(self, _ctx: Any) -> list[str]:
        """By name, as help lists them."""
        order = ("get", "set", "unset", "diff", "history")
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A missing verb (`farhop drain tokyo`) is answered with the list of verbs."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            verbs = ", ".join(self.list_commands(ctx))
            ctx.fail(f"{args[0]!r} is no command of `{ctx.command_path}`; use one of {verbs}")
        return super().resolve_command(ctx, args)


NOUNS = {
    "bias": ("bias_pin", "BIAS"), "pin": ("bias_pin", "PIN"), "policy": ("by_model", "POLICY"),
    "split": ("by_model", "SPLIT"), "drain": ("drain", "NOUN"), "route": ("route", "NOUN"), "limit": ("limit", "NOUN"),
}  # fmt: skip


def noun(name: str) -> Noun:
    """The noun, from its own module. No other module is imported."""
    module, attribute = NOUNS[name]
    found: Noun = getattr(importlib.import_module(f"farhop_cli.{module}"), attribute)
    return found


def group(name: str, what: str, example: str, of: str = "tokyo") -> typer.Typer:
    """The commands of a noun, with the three that read, which are alike for all."""
    made = App(help=what, epilog=f"Example:  farhop {name} {example}", cls=Verbs, **PLAIN)

    @verb(made, "get", f"farhop {name} get {of}")
    def get(region: SomeRegion = "", *, fleet_options: FleetOptions) -> int:
        """Show what is set, by whom, why, and until when."""
        from farhop_cli import setting

        return setting.get(noun(name), region, fleet_options)

    @verb(made, "diff", f"farhop {name} diff was.json --region {of}")
    def diff(
        file: Against = "",
        region: OneRegion = "",
        *,
        fleet_options: FleetOptions,
    ) -> int:
        """Compare what is set with a file.

        Exit code 1 if they differ. Without a file: show what overrides the balancers' configurations, which `unset`
        would remove.
        """
        from farhop_cli import setting

        return setting.diff(noun(name), region, file, fleet_options)

    @verb(made, "history", f"farhop {name} history {of}")
    def history(region: SomeRegion = "", *, fleet_options: FleetOptions) -> int:
        """List what was set and unset, when, by whom and why.

        As far back as etcd's last compaction (`--auto-compaction-retention`). Nothing else keeps it.
        """
        from farhop_cli import setting

        return setting.history(noun(name), region, fleet_options)

    return made
