"""How a model reads prompts, as configured: its tokenizer and its chat template. Never opens either."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from farhop.shell.config import Part

FilePath = Annotated[str, Field(min_length=1, max_length=4096)]


class TokenizerFiles(Part):
    """A model's tokenizer.json, and its chat template; without, the one that stands beside (docs/kv.md)."""

    file: FilePath
    template: FilePath | None = None
