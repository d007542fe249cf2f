"""Parses a topology file's YAML text strictly into plain Python data; it does not interpret the data.

It never builds objects from tags, never accepts a key twice in one mapping, and bounds size, depth and the expansion of
aliases, so that no text can take the process down. Every fault is a Problem with its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml

from topology.problems import Problem, TopologyError, path_of, quoted

TEXT_CHARS_MAX = 4 * 1024 * 1024
DEPTH_MAX = 32
NODES_MAX = 1_000_000

# libyaml is some ten times faster. It recurses in C without a guard, so depth is checked on its flat events first.
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"


def document(text: str, source: str = "topology") -> dict[str, Any]:
    """The mapping a YAML text holds, unvalidated: change it and dump it with `yaml.safe_dump` to make a new topology.

    TopologyError if it is not YAML, names a key twice, holds no mapping, or is too large or deep.
    """
    data, doubles = read(text, source)
    if doubles:
        raise TopologyError(source, doubles)
    return data


def read(
    text: str, source: str, what: str = "topology", example: str = "topology/regions/three-regions.yaml"
) -> tuple[dict[str, Any], list[Problem]]:
    """As `document`, but hands back keys named twice as problems, so that they can be told along with all others.
    `what` the text should be, and a shipped `example` of it, are for the complaint about a text that is no mapping."""
    if len(text) > TEXT_CHARS_MAX:
        raise TopologyError(source, [_too_large()])
    try:
        data, doubles = _loaded(text)
    except yaml.MarkedYAMLError as error:
        raise TopologyError(source, [_syntax(error)]) from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a plain scalar that looks like a date or number and is none, such as 2026-13-45.
        fault = Problem("", f"not YAML: {_one_line(error)}", "correct or quote that value")
        raise TopologyError(source, [fault]) from None
    except _Refused as refused:
        raise TopologyError(source, [refused.problem]) from None
    if not isinstance(data, dict):
        remedy = f"start from a shipped one, such as {example}"
        raise TopologyError(source, [Problem("", f"a {what} is a mapping, and this holds {_kind(data)}", remedy)])
    return data, doubles


class _Refused(Exception):  # noqa: N818 - carries a problem, is not one
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def _kind(data: object) -> str:
    if data is None:
        return "nothing"
    return "a list" if isinstance(data, list) else "a single value"


def _loaded(text: str) -> tuple[Any, list[Problem]]:
    _check_depth(text)
    loader = _LOADER(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        if node is None:
            return None, []
        _expanded(node, {})
        # Before construction, which writes merged keys (<<) into the nodes, where overriding one is no double.
        doubles = list(_doubles(node, (), set()))
        return loader.construct_document(node), doubles
    finally:
        loader.dispose()


def _check_depth(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEPTH_MAX:
                position = _place(event.start_mark)
                raise _Refused(
                    Problem(position, f"nested more than {DEPTH_MAX} deep", "a topology needs 6 levels; flatten it")
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many nodes this one stands for with its aliases followed. 0 marks a node still open: an alias to itself."""
    known = sizes.get(id(node))
    if known == 0:
        raise _Refused(Problem(_place(node.start_mark), "an alias inside what it stands for", "write the value out"))
    if known is not None:
        return known
    sizes[id(node)] = 0
    size = 1 + sum(_expanded(child, sizes) for child in _children(node))
    if size > NODES_MAX:
        raise _Refused(_too_large())
    sizes[id(node)] = size
    return size


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _doubles(node: yaml.Node, path: tuple[str | int, ...], seen: set[int]) -> Iterator[Problem]:
    """Keys a mapping names twice, of which YAML would silently keep the last. An aliased node is looked at once."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _doubles(child, (*path, index), seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in lines and key.tag != _MERGE:
                message = f"{quoted(name)} is given twice, in lines {lines[name]} and {line}"
                yield Problem(path_of(*path, name), message, "keep one")
            lines[name] = line
            yield from _doubles(value, (*path, name), seen)


def _syntax(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    what = error.problem or error.context or "malformed"
    return Problem(_place(mark), f"not YAML: {_one_line(what)}", "correct that line (spaces, not tabs; quote odd text)")


def _place(mark: Any) -> str:
    # libyaml's marks and PyYAML's are two classes without a common base.
    return f"{mark.line + 1}:{mark.column + 1}" if mark is not None else ""


def _one_line(what: object) -> str:
    return " ".join(str(what).split())[:200]


def _too_large() -> Problem:
    message = f"larger than {TEXT_CHARS_MAX} characters or {NODES_MAX} values with aliases followed"
    return Problem("", message, "split the world or drop tenants")
