"""Tokenizes prompts with their model's tokenizer, if one is configured; chats are rendered by the model's template
first.

A prompt that cannot be tokenized (a picture, a template's error, too long, too many at once) is counted by reason and
routed by its byte chain instead. Invariants: nothing is fetched: tokenizer and template are local files; the ids are
those that an engine computes from the same files (vLLM's defaults: a chat is rendered as in `chat_form`
and gets no special tokens but its template's; a completion gets the tokenizer's); a template runs in Jinja's sandbox.
Never changes a body. Needs the extra `tokenizer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farhop.balance.machine import Tokens
from farhop.config import ConfigError
from farhop.relay.formats import messages
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import any_json
from farhop.service.tokenization.chat_form import ChatForm, MediaError
from farhop.service.tokenization.pieces import LOOK_CHARS, Pieces, head, safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from jinja2 import Template

INLINE_BYTES_MAX = 2048  # a longer body is read in a thread: 32 KB take some 10 ms
BEGINNING_BYTES_MAX = 256 * 1024  # to parse and render a longer one takes more than a millisecond
BODY_BYTES_MAX = 1024 * 1024  # what is longer would hold a thread for half a second
WAITING_MAX = 64
THREADS = 2
_NICE = 19
_EXTRA = "needs the extra `tokenizer`: pip install 'farhop[tokenizer]'"
_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(?:\.content|\[['\"]content['\"]\])")
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # marks of training, without a meaning here
_OPTIONS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "reasoning_effort",
)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Files(NamedTuple):
    """Of one model: its tokenizer.json, and its chat template.

    "": the chat_template.jinja beside, or what the tokenizer_config.json beside says.
    """

    file: str
    template: str = ""


class TokenizedPrompt(NamedTuple):
    """A prompt's ids, four bytes each, and its shape: what decides how an engine renders it, in a few fixed words.
    `whole`: they are all."""

    ids: bytes
    shape: str
    whole: bool


class UnreadableError(Exception):
    """A prompt that cannot be tokenized. `reason` is a fixed word to count by."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ModelTokenizer:
    """One model's. `wall` is for templates that show the date. ConfigError if a file is unusable."""

    def __init__(self, field_path: str, files: Files, wall: Callable[[], datetime]) -> None:
        # One prompt at a time is no work for a pool of the library's own, whose threads would only wake one another.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(field_path, [_EXTRA]) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(files.file)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exceptions
            raise ConfigError(
                field_path, [f"file: {files.file}: not a tokenizer.json that can be read: {error}"]
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._adds_tokens = self._tokenizer.num_special_tokens_to_add(False) > 0
        self._pieces = Pieces(self._tokenizer, lambda texts: self._encoded(texts, special=False))
        beside = _beside(field_path, Path(files.file))
        self.special = {name: _text(beside[name]) for name in _SPECIAL if name in beside}
        source = _source(field_path, files.template or _named(Path(files.file))) or _default(
            beside.get("chat_template")
        )
        self.template = _compiled(field_path, source, wall) if source else None
        self._form = ChatForm(source, in_parts=_PARTS.search(source) is not None)

    def read(self, kind: Kind, body: bytes, *, whole: bool = True) -> TokenizedPrompt:
        """The ids of a body's prompt; unless `whole`, those of its beginning may do. Raises UnreadableError."""
        if len(body) > BODY_BYTES_MAX:
            raise UnreadableError("length")
        asked = any_json(body)
        if kind is Kind.COMPLETION:
            return self._completion(asked, whole=whole)
        if kind is Kind.MESSAGES:  # an engine makes a chat of it first
            asked = messages.as_chat(asked)
        text = self._chat(asked)
        special = asked.get("add_special_tokens") is True
        return self._as_prompt(text, _shape(kind, asked), special=special, whole=whole)

    def _completion(self, asked: dict[str, Any], *, whole: bool) -> TokenizedPrompt:
        prompt = asked["prompt"]
        if asked.get("truncate_prompt_tokens") is not None or asked.get("prompt_embeds") is not None:
            raise UnreadableError("option")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise UnreadableError("several")
            prompt = prompt[0]
        if isinstance(prompt, str):
            special = asked.get("add_special_tokens") is not False
            return self._as_prompt(prompt, Kind.COMPLETION, special=special, whole=whole)
        return TokenizedPrompt(_packed(prompt), Kind.COMPLETION, whole=True)

    def _as_prompt(self, text: str, shape: str, *, special: bool, whole: bool) -> TokenizedPrompt:
        if not (special and self._adds_tokens):
            ids, whole = (self._pieces.ids(text), True) if whole else self._pieces.beginning(text)
            return TokenizedPrompt(ids, shape, whole)
        if whole or len(text) <= LOOK_CHARS:
            return TokenizedPrompt(self._encoded([text], special=True)[0], shape, whole=True)
        return TokenizedPrompt(safe(self._encoded([head(text, LOOK_CHARS)], special=True)[0]), shape, whole=False)

    def _encoded(self, texts: list[str], *, special: bool) -> list[bytes]:
        # Not `encode`: that keeps the interpreter's lock, and the loop would wait for it.
        try:
            return [_packed(one.ids) for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)]
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of the library's Rust: no Exception, and it names no class
                raise UnreadableError("tokenizer") from None
            raise

    # -- chats

    def _chat(self, asked: dict[str, Any]) -> str:
        if self.template is None or asked.get("chat_template") or asked.get("truncate_prompt_tokens") is not None:
            raise UnreadableError("option" if self.template else "template")
        try:
            arguments = self._form.arguments(asked)
        except MediaError:
            raise UnreadableError("media") from None
        try:
            goes_on = arguments.pop("continue_final_message")  # templates do not get it
            text = self.template.render(**(self.special | arguments))
        except Exception:  # noqa: BLE001 - a template may raise anything; the request goes on without
            raise UnreadableError("template") from None
        return _cut(text, arguments["messages"][-1]["content"]) if goes_on else text


def _shape(kind: Kind, asked: dict[str, Any]) -> str:
    """Of a chat: whether tools, calls of tools, several texts or options take part in how it is rendered."""
    parts = [str(kind)]
    if asked.get("tools"):
        parts.append("tools")
    if any(message.get("tool_calls") for message in asked["messages"]):
        parts.append("calls")
    if any(isinstance(message.get("content"), list) for message in asked["messages"]):
        parts.append("parts")
    if any(asked.get(option) is not None for option in _OPTIONS):
        parts.append("options")
    return "+".join(parts)


def _beside(field_path: str, file: Path) -> dict[str, Any]:
    """The contents of the model's tokenizer_config.json, if there is one."""
    config = file.with_name("tokenizer_config.json")
    try:
        found = msgspec.json.decode(config.read_bytes()) if config.exists() else {}
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(field_path, [f"file: {config}, beside it, cannot be read: {error}"]) from None
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _named(file: Path) -> str:
    """Where Hugging Face keeps a template by itself; "" if there is none."""
    template = file.with_name("chat_template.jinja")
    return str(template) if template.exists() else ""


def _default(given: Any) -> str:
    """The template in a tokenizer_config.json: one text, or several by name."""
    if isinstance(given, list):
        given = next((t.get("template") for t in given if isinstance(t, dict) and t.get("name") == "default"), None)
    return given if isinstance(given, str) else ""


def _source(field_path: str, template: str) -> str:
    if not template:
        return ""
    try:
        return Path(template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field_path, [f"template: {template}: cannot be read: {error}"]) from None


def _compiled(field_path: str, source: str, wall: Callable[[], datetime]) -> Template:
    """The template in the environment that chat templates are written for (Hugging Face transformers)."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(field_path, [_EXTRA]) from None

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return wall().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(_GENERATION.sub("", source))
    except TemplateError as error:
        raise ConfigError(field_path, [f"template: is not a Jinja template: {error}"]) from None


def _cut(text: str, last: str | list[dict[str, str]]) -> str:
    """Cut the closing frame off a rendered chat whose last message will be continued."""
    ending = last if isinstance(last, str) else (last[-1]["text"] if last else "")
    at = text.rfind(ending.strip())
    if not ending.strip() or at < 0:
        raise UnreadableError("template")
    kept = ending.lstrip() if text.startswith(ending.lstrip(), at) else ending.strip()
    return text[: at + len(kept)]


def _packed(ids: list[int]) -> bytes:
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        raise UnreadableError("ids") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


_READ = frozenset((Kind.CHAT, Kind.COMPLETION, Kind.MESSAGES))


def _give_way() -> None:
    """Lower this thread's priority: on Linux each thread has its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _no_bases(_model: str) -> Iterable[str]:
    return ()


class Tokenizers:
    """Those of all models that have one. `unread` counts, by reason, prompts that were routed without tokens.
    `bases_of` gives what a model is an adapter of, as engines report."""

    def __init__(self, files: Mapping[str, Files], wall: Callable[[], datetime]) -> None:
        known: dict[Files, ModelTokenizer] = {}
        self.by_model: dict[str, ModelTokenizer] = {}
        for model, named in files.items():
            if named not in known:
                known[named] = ModelTokenizer(f"tokenizers.{model}", named, wall)
            self.by_model[model] = known[named]
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")
        self._behind = ThreadPoolExecutor(1, "tokenizer-behind", _give_way)
        self.waiting = 0  # of `later`, those that are not read yet
        self.unread: Counter[str] = Counter()
        self.prompts = 0
        self.bases_of: Callable[[str], Iterable[str]] = _no_bases

    def reads(self, kind: Kind, model: str) -> bool:
        """Whether requests of this kind, for this model, are tokenized."""
        return kind in _READ and self._for(model) is not None

    def now(self, kind: Kind, model: str, body: bytes, cache_salt: str) -> Tokens | None:
        """The prompt's tokens, None where it cannot be read. Takes 0.2 to 0.5 ms for each KB of it."""
        try:
            return self._counted(self._reader(model).read(kind, body), cache_salt)
        except Exception as error:  # noqa: BLE001 - a prompt in an unforeseen shape must not fail its request
            self._unread(error)
            return None

    def beginning(self, kind: Kind, model: str, body: bytes, cache_salt: str) -> Tokens | None:
        """As many of the prompt's tokens as a fraction of a millisecond allows; None if it cannot be tokenized."""
        if len(body) > BEGINNING_BYTES_MAX:
            return None
        try:
            prompt = self._reader(model).read(kind, body, whole=False)
        except Exception:  # noqa: BLE001 - as in `now`; reading the whole counts the reason
            return None
        return self._counted(prompt, cache_salt)

    def later(
        self, kind: Kind, model: str, body: bytes, cache_salt: str, *, waits: bool = True
    ) -> asyncio.Future[Tokens | None] | None:
        """As `now`, in a thread; None: too many are waiting. Where no request `waits` for it, others' come first."""
        if self.waiting >= WAITING_MAX:
            self.unread["busy"] += 1
            return None
        self.waiting += 1
        loop, threads = asyncio.get_running_loop(), self._threads if waits else self._behind
        reading = loop.run_in_executor(threads, self._reader(model).read, kind, body)
        tokens: asyncio.Future[Tokens | None] = loop.create_future()

        def over(ended: asyncio.Future[TokenizedPrompt]) -> None:
            self.waiting -= 1
            if ended.cancelled():
                tokens.cancel()
                return
            error = ended.exception()
            if error is not None:
                self._unread(error)
            found = self._counted(ended.result(), cache_salt) if error is None else None
            if not tokens.done():
                tokens.set_result(found)

        reading.add_done_callback(over)
        tokens.add_done_callback(lambda _: reading.cancel())  # a caller that gave up needs no thread
        return tokens

    def _for(self, model: str) -> ModelTokenizer | None:
        """Its own; else that of the model which it is an adapter of: they read alike."""
        own = self.by_model.get(model)
        if own is not None or not self.by_model:
            return own
        return next((known for base in self.bases_of(model) if (known := self.by_model.get(base)) is not None), None)

    def _reader(self, model: str) -> ModelTokenizer:
        reader = self._for(model)
        assert reader is not None  # callers have called `reads` before
        return reader

    def close(self) -> None:
        """Stop tokenizing."""
        for threads in (self._threads, self._behind):
            threads.shutdown(wait=False, cancel_futures=True)

    def _counted(self, prompt: TokenizedPrompt, cache_salt: str) -> Tokens:
        self.prompts += prompt.whole
        return Tokens(prompt.ids, cache_salt, prompt.shape, prompt.whole)

    def _unread(self, error: BaseException) -> None:
        self.unread[error.reason if isinstance(error, UnreadableError) else "shape"] += 1
