"""Request bodies as vLLM takes them, and the one form the engine needs: a rendered prompt and how the answer stops.

Pure. Never guesses: what this engine cannot do is refused by name; sampling fields without effect here
are accepted and ignored. Every refusal is a `RefusedError` that names the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash
from msgspec.structs import replace

from farhop_lab.engine.core.sequence import EngineRequest
from farhop_lab.engine.core.text import TOKEN_BYTES, bytes_of, text_of
from farhop_lab.engine.formats.logprobs import TOP_MAX
from farhop_lab.engine.formats.schema import Draws, SchemaError
from farhop_lab.engine.formats.schema import text_of as json_text
from farhop_lab.engine.formats.tools import Function, Tool
from farhop_lab.engine.formats.tools import calls as tool_calls
from farhop_lab.engine.formats.tools import script as tool_script

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE_TOKENS = 576  # what a 336-pixel image costs in LLaVA-1.5: 24 x 24 patches
STOPS_MAX = 16
ANSWERS_MAX = 64
STOP_CHARS_MAX = 256
COMPLETION_MAX_TOKENS = 16  # the API's default for /v1/completions; chat has none


class RefusedError(Exception):
    """A request that is answered with an error. `status` is HTTP's, `kind` is the body's `type`."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """The error in vLLM's format."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    """`stream_options` of the API."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class Transfer(msgspec.Struct, frozen=True):
    """`kv_transfer_params` of vLLM's NIXL connector: for a prefill, that it is one; for a decode, where its KV is."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_block_ids: list[int] | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None


class Bootstrap(msgspec.Struct, frozen=True):
    """`bootstrap_*` of SGLang: the room at a prefill's bootstrap port where two engines meet."""

    host: str
    port: int
    room: int


class JsonSchema(msgspec.Struct):
    """`json_schema` of `response_format`."""

    name: str
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format` of the API."""

    type: str
    json_schema: JsonSchema | None = None


class NamedTool(msgspec.Struct):
    """`tool_choice` that names a tool."""

    function: Function
    type: str = "function"


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # SGLang's name for the same
    n: int | None = 1
    response_format: ResponseFormat | None = None
    cache_salt: str | None = None
    kv_transfer_params: Transfer | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    return_token_ids: bool | None = None


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = msgspec.field(default_factory=list)
    tools: list[Any] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionBody(_Body):
    """POST /v1/completions. A prompt is a text, or a list of token ids; a list of prompts may hold one."""

    prompt: str | list[Any] = ""
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None


class Call(msgspec.Struct, frozen=True):
    """A parsed request. `role` is that of a chat's answer, None for a completion; `n` answers are wanted, each behind
    `echo`. `token_ids`: those of the prompt and of the answer are returned, too. `usage_each`: each token's chunk has
    the usage so far. `logprobs`: of so many tokens at each place of the answer; None: they are not wanted. `calls`:
    the answer calls the tool of this name ("": one of the model's choice); None: it is a text.

    `fetch`: where the prompt's KV may be fetched from; `bootstrap`: where it must be fetched from, in SGLang's
    disaggregation.
    """

    wanted: EngineRequest
    model: str | None
    stream: bool
    include_usage: bool
    role: str | None
    n: int = 1
    fetch: Transfer | None = None
    bootstrap: Bootstrap | None = None
    echo: str = ""
    token_ids: bool = False
    usage_each: bool = False
    logprobs: int | None = None
    calls: str | None = None


_T = TypeVar("_T")
_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


def parse_chat(body: bytes) -> Call:
    """A chat request, its template applied. RefusedError if it is malformed or not supported."""
    chat = decoded(_CHAT, body)
    if not chat.messages:
        raise refusal("messages", "it is missing or empty; give at least one message")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise refusal(
            "continue_final_message",
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        )
    role = "assistant" if chat.add_generation_prompt else chat.messages[-1].role
    asked = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    top = _top_logprobs(chat)
    call = replace(call_of(chat, prompt := render_chat(chat), asked, role), logprobs=top)
    return with_tools(call, chat, prompt)


def _top_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs is not None and not chat.logprobs:
        raise refusal("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")
    return _checked_top(chat.top_logprobs or 0, "top_logprobs") if chat.logprobs else None


def _checked_top(top: int, param: str) -> int:
    if not 0 <= top <= TOP_MAX:
        raise refusal(param, f"Requested sample {param} of {top}, which is not within 0 and the maximum: {TOP_MAX}")
    return top


def with_tools(call: Call, chat: ChatBody, prompt: bytes) -> Call:
    """The same, calling a tool where the request demands it or the model decides to."""
    choice = chat.tool_choice if chat.tool_choice is not None else "auto" if chat.tools else "none"
    if choice == "none":
        return call
    if not chat.tools:
        raise refusal("tool_choice", "When using `tool_choice`, `tools` must be set.")
    if choice not in ("auto", "required") and not isinstance(choice, NamedTool):
        raise refusal("tool_choice", 'Only named tools, "none", "auto" or "required" are supported.')
    tools = [_tool(one, at) for at, one in enumerate(chat.tools)]
    named = choice.function.name if isinstance(choice, NamedTool) else ""
    if named and named not in (tool.function.name for tool in tools):
        text = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise refusal("tool_choice", text)
    # After a tool's result the model, left to choose, answers: else an agent would never come to an end.
    if choice == "auto" and (chat.messages[-1].role == "tool" or not tool_calls(prompt)):
        return call
    script = tool_script(tools, prompt, named, parallel=chat.parallel_tool_calls is not False)
    return replace(call, wanted=replace(call.wanted, script=_tried(script, "tools")), calls=named)


def _tool(given: Any, at: int) -> Tool:
    try:
        return msgspec.convert(given, Tool)
    except msgspec.ValidationError as error:
        raise refusal("tools", f"tools[{at}]: {error}") from None


def _tried(script: Callable[[int], bytes], param: str) -> Callable[[int], bytes]:
    """The same, if its schema is one that a text can be written for: later it would be too late to refuse it."""
    try:
        script(0)
    except (SchemaError, TypeError, ValueError, AttributeError) as error:  # a schema of the wrong types, too
        raise refusal(param, f"the JSON schema cannot be used: {error}") from None
    return script


def _formatted(body: _Body, prompt: bytes) -> Callable[[int], bytes] | None:
    """The answer's text, if `response_format` binds it."""
    given = body.response_format
    if given is None or given.type == "text":
        return None
    if given.type not in ("json_object", "json_schema"):
        raise refusal("response_format", "this engine knows text, json_object and json_schema")
    if given.type == "json_schema" and (given.json_schema is None or given.json_schema.schema is None):
        raise refusal("response_format", "response_format.json_schema.schema: it is missing")
    schema = given.json_schema.schema if given.json_schema is not None and given.type == "json_schema" else None
    return _tried(lambda seed: json_text(schema, Draws(prompt, seed)).encode(), "response_format")


class ChatsBody(ChatBody):
    """POST /v1/chat/completions/batch."""

    messages: list[list[Message]] = msgspec.field(default_factory=list)  # type: ignore[assignment]


_CHATS = msgspec.json.Decoder(ChatsBody)


def parse_chats(body: bytes) -> list[Call]:
    """Chats of one body, each answered once. RefusedError as for one."""
    asked = decoded(_CHATS, body)
    if not asked.messages or asked.stream or asked.tools:
        raise refusal("messages", "give a list of chats, and neither tools nor stream")
    each = {name: getattr(asked, name) for name in ChatBody.__struct_fields__ if name != "messages"}
    return [parse_chat(msgspec.json.encode(ChatBody(messages=chat, **each))) for chat in asked.messages]


def parse_completion(body: bytes) -> Call:
    """A completion request. RefusedError if it is malformed or not supported."""
    completion = decoded(_COMPLETION, body)
    top = None if completion.logprobs is None else _checked_top(completion.logprobs, "logprobs")
    if completion.echo and top is not None:
        raise refusal("logprobs", "this engine has none of a prompt that it echoes; leave one of them out")
    if completion.echo and (completion.stream or _is_ids(completion.prompt)):
        raise refusal("echo", "this engine echoes texts, in answers of one piece; leave it out, or `stream`")
    if completion.suffix:
        raise refusal("suffix", "suffix is not currently supported")
    asked = COMPLETION_MAX_TOKENS if completion.max_tokens is None else completion.max_tokens
    scores = bool(completion.echo) and asked == 0  # one pass over the prompt, and no answer
    call = call_of(completion, prompt := prompt_bytes(completion.prompt), None if scores else asked, None)
    call = replace(call, logprobs=top)
    if completion.echo:
        call = replace(call, echo=prompt.decode("utf-8", "replace"))
    if scores:
        call = replace(call, wanted=replace(call.wanted, generates=False))
    if _is_ids(completion.prompt):
        call = replace(call, wanted=replace(call.wanted, ids=prompt))
    return call


def render_chat(chat: ChatBody) -> bytes:
    """The text the model sees: tools, then each message in its frame, then the frame of the answer, left open.

    With `continue_final_message` the last message's own frame is left open instead, so that the model continues it.
    """
    parts: list[str] = []
    if chat.tools:
        parts.append("<|tools|>\n")
        parts.extend(msgspec.json.encode(tool, order="sorted").decode() + "\n" for tool in chat.tools)
        parts.append("<|end|>\n")
    for at, message in enumerate(chat.messages):
        parts += (f"<|{message.role}|>\n", _content(message, at), "<|end|>\n")
    if chat.continue_final_message:
        parts.pop()
    elif chat.add_generation_prompt:
        parts.append("<|assistant|>\n")
    return "".join(parts).encode("utf-8", "surrogatepass")


def _content(message: Message, at: int) -> str:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(_part(part, f"messages[{at}].content") for part in content)
    if message.tool_calls:
        content += msgspec.json.encode(message.tool_calls, order="sorted").decode()
    return content


def _part(part: Part, field_path: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "image_url" and part.image_url is not None:
        # As many tokens as an image costs, named by its content: equal images share their KV.
        digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode(part.image_url, order="sorted"))
        return digest * (IMAGE_TOKENS * TOKEN_BYTES // len(digest))
    raise refusal(field_path, f"a part of type {part.type!r} is not supported or is empty; use text or image_url")


def prompt_bytes(prompt: str | list[Any], param: str = "prompt") -> bytes:
    """One prompt: a text or a list of token ids, or a list that contains one of these. RefusedError otherwise."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if not prompt or any(type(token) is not int or not 0 <= token < 2**32 for token in prompt):
        raise refusal(param, "give one text, one list of token ids, or a list holding one of these")
    return b"".join(token.to_bytes(TOKEN_BYTES, "big") for token in prompt)


def spelled(wanted: EngineRequest) -> EngineRequest:
    """The same by the bytes of its prompt's ids: for an engine without a tokenizer, whose tokens are bytes."""
    packed, ids = wanted.ids, range(0, len(wanted.ids), TOKEN_BYTES)
    bytes_ = b"".join(bytes_of(int.from_bytes(packed[at : at + TOKEN_BYTES], "big")) for at in ids)
    return replace(wanted, prompt=text_of(bytes_), ids=bytes_)


def _is_ids(prompt: str | list[Any]) -> bool:
    return isinstance(prompt, list) and not isinstance(prompt[0], str)


def call_of(body: _Body, prompt: bytes, max_tokens: int | None, role: str | None) -> Call:
    """The request of a body whose prompt is rendered; `role` as in Call. RefusedError."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= ANSWERS_MAX:
        raise refusal("n", f"n must be at least 1 and at most {ANSWERS_MAX}, got {n}.")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > STOPS_MAX or any(not 0 < len(text) <= STOP_CHARS_MAX for text in stop):
        raise refusal("stop", f"give at most {STOPS_MAX} texts of 1 to {STOP_CHARS_MAX} characters")
    if body.stream_options and not body.stream:
        raise refusal("stream_options", "Stream options can only be defined when `stream=True`.")
    if max_tokens is not None and max_tokens < 1:
        raise refusal("max_tokens", f"max_tokens must be at least 1, got {max_tokens}.")
    transfer = body.kv_transfer_params or Transfer()
    if transfer.do_remote_decode and n > 1:
        raise refusal("n", "n must be 1 where another engine decodes: one answer, one place for its KV")
    wanted = EngineRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop=tuple(stop),
        cache_salt=body.cache_salt or "",
        keeps=transfer.do_remote_decode,
        shows_stop=body.include_stop_str_in_output or body.no_stop_trim,
        script=_formatted(body, prompt),
    )
    options = body.stream_options or StreamOptions()
    usage, each = bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)
    fetch = transfer if transfer.do_remote_prefill else None
    ids = bool(body.return_token_ids)
    bootstrap = _bootstrap(body)
    return Call(wanted, body.model, bool(body.stream), usage, role, n, fetch, bootstrap, token_ids=ids, usage_each=each)


def _bootstrap(body: _Body) -> Bootstrap | None:
    host, port, room = body.bootstrap_host, body.bootstrap_port, body.bootstrap_room
    return Bootstrap(host, port, room) if host is not None and port is not None and room is not None else None


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """The body as its type. RefusedError naming the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _, _, path = str(error).partition("`$.")
        raise RefusedError(str(error), param=path.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"The request body is not valid JSON: {error}") from None


def refusal(param: str, why: str) -> RefusedError:
    """The refusal of a field that this engine does not support."""
    return RefusedError(why if param in why else f"{param}: {why}", param=param)
