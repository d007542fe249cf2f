"""The weights of a region's splits, changed within the document that holds them (`farhop split`, the console).

Only `weights` are written: a model's rules and stickiness, and the other models, stay as they are. Never says whether a
version is served.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from farhop.loose_json import as_dict
from farhop.store.documents import authored
from farhop.store.documents.document import DocumentError
from topology.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farhop.store.documents.authored import Authorship

VERSIONS_MAX = 16
WEIGHT_MAX = 1e6
VERSION = r"^[A-Za-z0-9._-]{1,64}$"
_VERSION, _MODEL = re.compile(VERSION), re.compile(r"[!-~]{1,256}")


def weights_of(text: str) -> dict[str, float]:
    """The weights in `v1=95,v2=5`. Raises DocumentError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        version, _, number = part.strip().partition("=")
        try:
            weight = float(number)
        except ValueError:
            message = f"{quoted(part.strip())} is no VERSION=WEIGHT; give one such as v1=95,v2=5"
            raise DocumentError("weights", message) from None
        if version in weights:
            raise DocumentError("weights", f"{quoted(version)} is named twice")
        weights[version] = weight
    return weights


def checked(weights: Mapping[str, float]) -> None:
    """Raise DocumentError if a balancer would refuse these weights."""
    if len(weights) > VERSIONS_MAX:
        raise DocumentError("weights", f"at most {VERSIONS_MAX} versions")
    for version, weight in weights.items():
        if not _VERSION.fullmatch(version):
            raise DocumentError("weights", f"{quoted(version)} is no version: use 1 to 64 of A-Z a-z 0-9 . _ -")
        if not math.isfinite(weight) or not 0 <= weight <= WEIGHT_MAX:
            raise DocumentError("weights", f"{version}: give a number, 0 to {WEIGHT_MAX:.0f}")
    if not any(weights.values()):
        raise DocumentError("weights", "all are 0: give some version more")


def of_region(document: bytes | None) -> dict[str, Any]:
    """The splits by model in a region's document; empty without one. Raises DocumentError."""
    if document is None:
        return {}
    try:
        return msgspec.json.decode(authored.split_authorship(document)[0], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise DocumentError("split", str(error)) from None


def with_weights(document: bytes | None, model: str, weights: Mapping[str, float], by: Authorship) -> bytes:
    """The region's document with these weights for a model. Raises DocumentError."""
    if not _MODEL.fullmatch(model):
        raise DocumentError("model", "give the model's name: 1 to 256 characters without spaces")
    checked(weights)
    splits = of_region(document)
    return authored.with_author({**splits, model: {**as_dict(splits.get(model)), "weights": dict(weights)}}, by)


def without(document: bytes | None, model: str, by: Authorship) -> bytes:
    """The region's document without a model's split. Raises DocumentError if there is none."""
    splits = of_region(document)
    if model not in splits:
        raise DocumentError("model", f"no split of {quoted(model)} is set")
    return authored.with_author({name: split for name, split in splits.items() if name != model}, by)
