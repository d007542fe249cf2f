"""What routes, policies and splits share: an author that says something, names that can be one, shapes that hold."""

import pytest
import typer

from farhop_cli import region_document
from farhop_cli.setting import Item
from regional_lb.scheduler.policy import PolicyConfig


def test_authorship_needs_author_and_reason(capsys):
    made = region_document.authorship("comparing", "ann")
    assert (made.author, made.why) == ("ann", "comparing")
    assert region_document.setting_of([Item({}, 1)], made).author == "ann"
    assert region_document.setting_of([Item({}, 1)], None).author is None
    for why, by, option in ((" ", "ann", "--why"), ("x", "a\tb", "--by")):
        with pytest.raises(typer.Exit):
            region_document.authorship(why, by)
        assert capsys.readouterr().err.startswith(f"farhop: {option}: must be")


def test_a_name_and_a_shape_are_checked_before_anything_is_written(capsys):
    assert region_document.named("--model", "llama/70b") == "llama/70b"
    assert region_document.named("--model", "") == ""
    for work in (
        lambda: region_document.named("--model", "a b"),
        lambda: region_document.checked(PolicyConfig, "fastest", "POLICY"),
    ):
        with pytest.raises(typer.Exit):
            work()
    assert capsys.readouterr().err.splitlines()[1].startswith("farhop: POLICY: no policy 'fastest'")
