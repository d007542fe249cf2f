from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology import document as document_module
from topology.document import DEPTH_MAX, document, read
from topology.problems import Problem, TopologyError


def _only(text: str) -> Problem:
    with pytest.raises(TopologyError) as caught:
        document(text, "w.yaml")
    assert caught.value.source == "w.yaml"
    [problem] = caught.value.problems
    assert "\n" not in str(problem)
    return problem


def test_plain_data_is_read_unchanged() -> None:
    assert document("a: [1, 2.5, x]\nb: {c: true}\n") == {"a": [1, 2.5, "x"], "b": {"c": True}}


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("a: [1\nb: 2\n", "2:2"),
        ("a: b: c\n", "1:5"),
        ("a:\n\t- 1\n", "2:1"),
        ("a: *nothing\n", "1:4"),
        ("a: !!python/object:os.system {}\n", "1:4"),
        ("a: 1\n---\nb: 2\n", "2:1"),
        ("? [a]\n: 1\n", "1:3"),
    ],
)
def test_a_text_that_is_not_yaml_is_reported_with_line_and_column(text: str, position: str) -> None:
    problem = _only(text)
    assert problem.path == position
    assert problem.message.startswith("not YAML: ")


@pytest.mark.parametrize("text", ["a: 2026-13-45\n", "a: \x00\n", "a: " + "1" * 5000 + "\n"])
def test_odd_scalars_are_a_problem_not_a_crash(text: str) -> None:
    assert "not YAML" in _only(text).message


@pytest.mark.parametrize(
    ("text", "held"), [("", "nothing"), ("# only this\n", "nothing"), ("- a\n", "a list"), ("7\n", "a single")]
)
def test_only_a_mapping_is_a_topology(text: str, held: str) -> None:
    assert f"this holds {held}" in _only(text).message


def test_a_key_given_twice_is_reported_with_path_and_lines() -> None:
    problem = _only("x:\n  - a: 1\n    b: 2\n    a: 3\n")
    assert problem == Problem("x[0].a", '"a" is given twice, in lines 2 and 4', "keep one")


def test_duplicate_keys_are_reported_beside_the_data() -> None:
    data, doubles = read("a: 1\na: 2\nb: {c: 1, c: 1}\n", "w")
    assert data == {"a": 2, "b": {"c": 1}}
    assert [problem.path for problem in doubles] == ["a", "b.c"]


def test_anchors_and_merges_are_allowed_and_overriding_a_merged_key_is_no_double() -> None:
    text = "base: &base {a: 1, b: 2}\nmine:\n  <<: *base\n  a: 3\nlist: [*base, *base]\n"
    assert document(text)["mine"] == {"a": 3, "b": 2}
    assert document("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b}\n")["c"] == {"x": 1, "y": 2}
    assert document(text)["list"] == [{"a": 1, "b": 2}] * 2


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_depth_is_bounded_before_anything_recurses(brackets: str) -> None:
    opening = "[" if brackets == "[]" else "{a: "
    assert f"more than {DEPTH_MAX} deep" in _only("a: " + opening * 50_000).message


def test_the_expansion_of_yaml_aliases_is_bounded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "aliases followed" in _only("\n".join(lines)).message


def test_an_alias_to_itself_is_refused() -> None:
    assert "inside what it stands for" in _only("a: &a [1, *a]\n").message


def test_a_document_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_module, "TEXT_CHARS_MAX", 10)
    assert document("a: 1") == {"a": 1}
    assert "larger than" in _only("a: 1234567890").message


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.text(alphabet="abc: -[]{}&*!|>'\"\n\t#?,%@<0.~=\x00é", max_size=40))
def test_no_text_raises_anything_else(text: str) -> None:
    found: tuple[Problem, ...] = ()
    data = None
    try:
        data = document(text)
    except TopologyError as error:
        found = error.problems
    assert isinstance(data, dict) or found
