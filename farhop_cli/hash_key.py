"""`farhop hash-key`: the hash by which a topology holds an API key. Never shows a key except one it makes."""

from __future__ import annotations

import secrets
import sys

import typer

from farhop.identity.api_keys import KEY_BYTES_MAX, bearer, digest, mistyped
from farhop_cli import show
from farhop_cli.exits import fail

GENERATED_BYTES = 32  # 256 random bits: 43 characters


def run(key: str | None, generate: bool, as_json: bool) -> int:
    """Print the hash of a key given, read or made; the exit code."""
    if generate and key is not None:
        fail("give a KEY or --generate, not both")
    made = f"sk-{secrets.token_urlsafe(GENERATED_BYTES)}" if generate else None
    text = made or key or _read()
    if bearer(b"Bearer " + text.encode(errors="replace")) != text:
        fail(f"this cannot be an API key: use 1 to {KEY_BYTES_MAX} characters of A-Z a-z 0-9 - . _ ~ + /")
    if mistyped(text):
        fail("this begins like a key that `farhop key` makes, but its checksum is wrong: is a character mistyped?")
    if as_json:
        show.json({"sha256": digest(text)} | ({"key": made} if made else {}))
    elif made:
        typer.echo(f"key     {made}\nsha256  {digest(made)}")
    else:
        typer.echo(digest(text))
    return 0


def _read() -> str:
    """A key from standard input; not echoed on a terminal."""
    if sys.stdin.isatty():
        return str(typer.prompt("key", hide_input=True, err=True))
    try:
        return sys.stdin.read(KEY_BYTES_MAX + 2).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        fail("standard input is not text; give a key")
