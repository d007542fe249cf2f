"""How a process is reached and reaches others: what cannot work is named, with its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from farhop.config import problems_of
from farhop.service.config.endpoints import Signing

OPS = "O2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik="


def test_keys_that_sign_are_read_from_the_file_or_beside_it(tmp_path: Path) -> None:
    (tmp_path / "ops.pub").write_text(OPS)
    for public in (OPS, f"file:{tmp_path / 'ops.pub'}"):
        made = Signing.model_validate({"keys": {"ops": {"public": public, "may": ["law", "drain/tokyo"]}}}).made()
        assert made.asks("/farhop/v1/policy/law")
        assert made.asks("/farhop/v1/override/paris")
        assert not made.asks("/farhop/v1/split/tokyo")
    assert Signing().made().asks("/farhop/v1/policy/law") is False


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"public": "AAAA"}, "give an Ed25519 public key"),
        ({"public": OPS, "may": ["laws"]}, "is no kind of document"),
        ({"public": OPS, "may": []}, "at least 1"),
    ],
)
def test_a_key_that_cannot_be_one_is_named_with_its_path(key: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Signing.model_validate({"keys": {"ops": key}})
    [line] = problems_of(caught.value)
    assert line.startswith("keys.ops")
    assert message in line
