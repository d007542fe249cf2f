from __future__ import annotations

import pickle

import pytest

from topology.problems import Problem, TopologyError, did_you_mean, path_of, quoted


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        (("tenants", 2, "residency", "processing", "allow", 0), "tenants[2].residency.processing.allow[0]"),
        (("models", "meta/llama-3.1", "deny"), 'models["meta/llama-3.1"].deny'),
        (("rtt_ms", "us-east", "tokyo"), "rtt_ms.us-east.tokyo"),
        (("a b",), '["a b"]'),
        ((), ""),
    ],
)
def test_a_problems_path_is_written_as_in_yaml(parts: tuple[str | int, ...], path: str) -> None:
    assert path_of(*parts) == path


def test_names_are_quoted_on_one_bounded_line() -> None:
    assert quoted("tokyo") == '"tokyo"'
    assert quoted("a\nb\x1b") == '"a\\nb\\x1b"'
    assert len(quoted("x" * 10_000)) < 70


def test_a_close_name_is_proposed_and_a_far_one_is_not() -> None:
    assert did_you_mean("Frankfort", ["tokyo", "frankfurt"], "declare it") == 'did you mean "frankfurt"?'
    assert did_you_mean("atlantis", ["tokyo", "frankfurt"], "declare it") == "declare it"
    assert did_you_mean("x", [], "declare it") == "declare it"


def test_one_problem_is_one_line_and_more_are_a_list() -> None:
    one, two = Problem("epoch", "missing", "give one"), Problem("", "empty", "fill it")
    assert str(TopologyError("w.yaml", [one])) == "w.yaml: epoch: missing; give one"
    text = str(TopologyError("w.yaml", [one, two]))
    assert text == "w.yaml: 2 problems\n  epoch: missing; give one\n  empty; fill it"


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(TopologyError("w", [Problem("a", "b", "c")])))
    assert (error.source, error.problems) == ("w", (Problem("a", "b", "c"),))
