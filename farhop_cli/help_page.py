"""The form of a command's help: `farhop law set [OPTIONS] FILE`, `--tenant TENANT`, without Python types.

Imports nothing but Typer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Callable

Work = TypeVar("Work", bound="Callable[..., Any]")


class HelpPage(TyperCommand):
    """A command whose values are named in capitals: by the metavar or, without one, the parameter's name."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for one in self.params:
            if one.metavar is None and not getattr(one, "is_flag", False):
                one.metavar = (one.name or "").strip("_").replace("_", "-").upper()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - of TyperCommand
        """`FILE` for what is required, `[REGION]` for what is optional."""
        names = [(one.metavar or "", one.required) for one in self._arguments()]
        return [self.options_metavar or "", *(name if required else f"[{name}]" for name, required in names)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments by their names alone, then options."""
        arguments = [
            (one.metavar or "", record[1]) for one in self._arguments() if (record := one.get_help_record(ctx))
        ]
        options = [one.get_help_record(ctx) for one in self.get_params(ctx) if one.param_type_name == "option"]
        for title, rows in (("Arguments", arguments), ("Options", [row for row in options if row])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _arguments(self) -> list[Any]:
        return [one for one in self.params if one.param_type_name == "argument"]


class App(typer.Typer):
    """A Typer whose commands all have such help."""

    def command(  # the few of its arguments that are used here
        self, name: str | None = None, **named: Any
    ) -> Callable[[Work], Work]:
        """See typer.Typer."""
        return super().command(name, cls=HelpPage, **named)
