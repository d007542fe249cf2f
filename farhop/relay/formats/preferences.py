"""Fields of a body, apart from its prompt, that affect routing: residency, the session's name, the service tier.

Only read here, never judged: which places there are is the law's to say, and what a tier is worth the tenant's policy.
A residency that cannot be read is an error and never left out, as it would widen what the client asked for.
"""

from __future__ import annotations

from typing import Any

from farhop.relay.formats.prompt import NO_PREFERENCES, Preferences, invalid

GEO = "inference_geo"  # Anthropic's: the answer's usage says it again
RESIDENCY = (GEO, "data_residency")  # OpenAI's is the second
PLACE_CHARS_MAX = 64
NAME_CHARS_MAX = 256
_TIER = "service_tier"
_USERS = ("user", "safety_identifier")  # OpenAI's newer name for it is the second
READ = frozenset((*RESIDENCY, "prompt_cache_key", *_USERS, _TIER))


def read(fields: Any) -> Preferences:
    """The preferences in the members of a body, or in the fields of a form. Raises BodyError."""
    if not isinstance(fields, dict) or READ.isdisjoint(fields):
        return NO_PREFERENCES
    residency = tuple((name, _place(name, text)) for name in RESIDENCY if (text := fields.get(name)) is not None)
    return Preferences(
        residency,
        next((place for name, place in residency if name == GEO), ""),
        _name(fields.get("prompt_cache_key")),
        next((name for field in _USERS if (name := _name(fields.get(field)))), ""),
        _name(fields.get(_TIER)),
    )


def _place(name: str, text: Any) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= PLACE_CHARS_MAX or not (text.isascii() and text.isprintable()):
        raise invalid(name, f"`{name}` must be the name of a place, such as eu, or global")
    return text.strip().lower()


def _name(text: Any) -> str:
    return text[:NAME_CHARS_MAX] if isinstance(text, str) else ""
