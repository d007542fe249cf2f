"""What routes, policies and splits share: a signature that says something, names that can be one, shapes that hold."""

import pytest
import typer

from farhop_cli import signed
from farhop_cli.standing import Item
from regional_lb.scheduler.policy import PolicyConfig


def test_a_signature_says_something(capsys):
    made = signed.signature("comparing", "ann")
    assert (made.author, made.why) == ("ann", "comparing")
    assert signed.stands([Item({}, 1)], made).author == "ann"
    assert signed.stands([Item({}, 1)], None).author is None
    for why, by, option in ((" ", "ann", "--why"), ("x", "a\tb", "--by")):
        with pytest.raises(typer.Exit):
            signed.signature(why, by)
        assert capsys.readouterr().err.startswith(f"farhop: {option}: must be")


def test_a_name_and_a_shape_are_checked_before_anything_is_written(capsys):
    assert signed.named("--model", "llama/70b") == "llama/70b"
    assert signed.named("--model", "") == ""
    for work in (lambda: signed.named("--model", "a b"), lambda: signed.checked(PolicyConfig, "fastest", "POLICY")):
        with pytest.raises(typer.Exit):
            work()
    assert capsys.readouterr().err.splitlines()[1].startswith("farhop: POLICY: no policy 'fastest'")
