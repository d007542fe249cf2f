"""Every configuration that the documents show is one: whoever copies it into the file that it is of is not refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from entry_anycast.app.config import AnycastConfig
from entry_dns.app.config import DnsConfig, ZoneConfig
from farhop.accounts.prices import price_book
from farhop_cli.context_document import Context
from farhop_drill import document as drill
from farhop_lab.scenarios import load as scenario
from farhop_lab.studies import routers
from global_lb.app.config import GlobalConfig
from regional_lb.app.config import RegionalConfig
from topology.schema import LawDoc, TopologyDoc

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
REPLICAS = [{"url": "http://127.0.0.1:8000", "models": ["a"]}]  # a field that a regional configuration requires
OTHERS = {("rules",), ("scrape_configs",)}  # of Kubernetes, of Prometheus


class Contexts(BaseModel):
    """The file that `farhop context` writes."""

    model_config = ConfigDict(extra="forbid")
    current: str
    contexts: dict[str, Context]


PARTS: tuple[type[BaseModel], ...] = (
    GlobalConfig, RegionalConfig, DnsConfig, ZoneConfig, AnycastConfig, TopologyDoc, LawDoc, Contexts,
)  # fmt: skip


def wholes(folder: Path) -> dict[str, Callable[[str], Any]]:
    """Readers of what a snippet shows whole, by the first key of such."""

    def prices(text: str) -> Any:
        (folder / "prices.yaml").write_text(text)
        return price_book(folder / "prices.yaml")

    return {
        "drill": lambda text: drill.read(text.encode(), "snippet"),
        "epochs": prices,
        "name": lambda text: scenario.parse(text, "snippet", folder, routers.names()),
    }


def snippets() -> list[Any]:
    return [
        pytest.param(text, id=f"{path.stem}-{before.count(chr(10)) + 1}")
        for path in sorted((ROOT / "docs").rglob("*.md"))
        for found in re.finditer(r"^```ya?ml\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        for before, text in [(path.read_text()[: found.start()], found[1])]
    ]


def problems(kind: type[BaseModel], document: dict[str, Any]) -> list[str] | None:
    """What is wrong with a part of a configuration, but for what of the rest is not here; None if it is no such."""
    if not document.keys() <= kind.model_fields.keys():
        return None
    whole = {"replicas": REPLICAS, **document} if kind is RegionalConfig else document
    try:
        kind.model_validate(whole, context=[])
    except ValidationError as error:
        wrong = [one for one in error.errors() if one["type"] != "missing" or len(one["loc"]) > 1]
        return [f"{kind.__name__}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in wrong]
    return []


@pytest.mark.parametrize("text", snippets())
def test_a_snippet_is_read_by_what_it_is_for(text: str, tmp_path: Path) -> None:
    text = text.replace('sha256: "…"', f'sha256: "{"0" * 64}"')
    document = yaml.safe_load(text)
    if tuple(document) in OTHERS:
        return
    if read := wholes(tmp_path).get(next(iter(document))):
        read(text)
        return
    found = [wrong for kind in PARTS if (wrong := problems(kind, document)) is not None]
    assert found, f"nothing has all of the fields {', '.join(document)}"
    assert [] in found, min(found, key=len)


def test_an_invalid_snippet_is_found() -> None:
    assert problems(GlobalConfig, {"rootes": []}) is None
    assert problems(GlobalConfig, {"routes": [{"polcy": "nearest"}]})
    assert len(snippets()) > 30
