"""`farhop policy`: by which policy a region picks replicas, written to etcd, for all models or for one. Never picks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farhop.store.contract import pick_key
from farhop_cli import show
from farhop_cli.by_model import Document, checked
from farhop_cli.exits import fail
from regional_lb.config import PolicyConfig

if TYPE_CHECKING:
    from farhop_cli.by_model import Options
    from farhop_cli.fleet import Status


def run(options: Options, name: str | None) -> int:
    """Set, clear or show; the exit code."""
    if options.clear and name is not None:
        fail("give a policy's name or --clear, not both")
    document = Document("policies", pick_key, options)
    if options.clear:
        return document.clear()
    if name is None:
        return document.show(lambda _model, entry: _said(entry))
    checked(PolicyConfig, name, "NAME")
    whose = options.model or "every model without a policy of its own"

    def told(_entry: Any, _status: Status | None) -> None:
        show.line(f"{options.region} picks replicas for {whose} by {name}", "bold")
        show.line("requests under way are not disturbed; those that wait are placed by it")

    return document.set(options.model or "", lambda _before: name, told)


def _said(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    options = ", ".join(f"{field} {value}" for field, value in entry.items() if field != "name")
    return f"{entry.get('name', 'predictive')} {options}".strip()
