"""What engines say of a model in their lists: how long a request may be, and where it comes from. Pure.

Never decides where a request goes: it is passed on to clients in `/v1/models`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class ModelFacts(msgspec.Struct, frozen=True):
    """`max_model_len`: tokens of prompt and answer together, 0 if unknown. `root`: what is served under the name,
    `parent`: what an adapter is based on; "" if unknown, or if engines disagree."""

    max_model_len: int = 0
    root: str = ""
    parent: str = ""


UNKNOWN_FACTS = ModelFacts()


def together(reported: Iterable[ModelFacts]) -> ModelFacts:
    """What holds wherever the model is served: the shortest length, and a name if all that report one agree."""
    known = [facts for facts in reported if facts is not UNKNOWN_FACTS]
    if not known:
        return UNKNOWN_FACTS
    roots, parents = {f.root for f in known if f.root}, {f.parent for f in known if f.parent}
    return ModelFacts(
        min((f.max_model_len for f in known if f.max_model_len), default=0),
        roots.pop() if len(roots) == 1 else "",
        parents.pop() if len(parents) == 1 else "",
    )
