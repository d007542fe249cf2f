"""One way to write what an option or argument takes: a name in capitals, no type of Python, no braces."""

import pytest
import typer
import typer.testing

from farhop_cli import help_page, main

PLACES = "env:NAME|file:PATH"  # the only thing in lower case: as the user types it


def every(command, words=()):
    yield words, command
    for name in getattr(command, "list_commands", lambda _: ())(None):
        yield from every(command.get_command(None, name), (*words, name))


def moving():
    """An app of one command."""
    app = help_page.App(rich_markup_mode=None, add_completion=False)

    @app.command("move")
    def move(
        which_region: str,
        to: str = typer.Argument("", help="Where to."),
        pace_s: float = typer.Option(1.0, metavar="SECONDS", help="How fast."),
        for_tenant: str = typer.Option("", help="Whose."),
        at_once: bool = typer.Option(False, "--at-once", help="Now."),
    ):
        """Move it."""

    return app


def run(*words):
    return typer.testing.CliRunner().invoke(moving(), words)


def test_values_have_names_and_no_types():
    lines = run("--help").stdout.splitlines()
    assert lines[0] == "Usage: move [OPTIONS] WHICH-REGION [TO]"
    told = {line.split("  ")[1] for line in lines if line.startswith("  ") and "  " in line.strip()}
    assert told == {"WHICH-REGION", "TO", "--pace-s SECONDS", "--for-tenant FOR-TENANT", "--at-once", "--help"}


def test_an_error_names_the_argument_as_its_help_does():
    result = run()
    assert (result.exit_code, "Missing argument 'WHICH-REGION'" in result.stderr) == (2, True)


@pytest.mark.parametrize("kind", ["argument", "option"])
def test_no_command_is_left_out(kind):
    odd = [
        (*words, one.name, one.metavar)
        for words, command in every(typer.main.get_command(main.app()))
        for one in command.params
        if one.param_type_name == kind
        and not getattr(one, "is_flag", False)
        and not (one.metavar or "").replace(PLACES, "WHERE").isupper()
    ]
    assert odd == []


def test_every_option_and_argument_has_a_help_text():
    silent = [
        (*words, one.name)
        for words, command in every(typer.main.get_command(main.app()))
        for one in command.params
        if not (one.help or "").endswith((".", "..."))
    ]
    assert [one for one in silent if one[-1] not in ("install_completion", "show_completion")] == []
