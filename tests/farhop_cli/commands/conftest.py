"""A command as it is wired: its group, and the options that it takes."""

import importlib

import pytest
import typer

from farhop_cli import main


@pytest.fixture
def wired():
    """`wired(name)` is the command, or the group of commands, of that name."""

    def find(name):
        one = main.COMMANDS[name]
        module = importlib.import_module(f"farhop_cli.commands.{one.module}")
        return typer.main.get_command(getattr(module, one.app))

    return find


@pytest.fixture
def options():
    """The options that a command takes, all spellings."""
    return lambda command: {name for one in command.params for name in one.opts}
