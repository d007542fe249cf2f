"""Which parts of a client's request may reach an engine: no field, part or header that names hosts, files, code,
devices or other requests' state.

Engines trust every client: a field may make one fetch from an address, unpickle a tensor, load a file or read another
request's cache. Such fields are refused by family and by name, in letters of either case, from any client; so is a name
that differs from a field that Farhop reads only in case, since an engine may read it as that field. Media by URL pass
only from hosts that the configuration names. Unknown fields pass, counted, or are refused if the configuration says so.
Headers towards engines are an allow-list; a query names no field. Never changes a body, never reads text.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import unquote_plus, urlsplit

import msgspec

from farhop.relay.formats.prompt import invalid, json_decoder
from farhop.relay.formats.shape import MEMBERS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farhop.relay.formats.prompt import BodyError, Prompt

_HOSTS = "names a host that an engine is to connect to"
_CODE = "has an engine run what a client wrote"
_FILES = "names files of an engine"
_TENSORS = "has an engine unpack tensors that a client wrote"
_DEVICES = "names a device or a worker"
_OTHERS = "names another request's state"
_CACHES = "names whose cache an engine shall look in (`cache_salt` keeps yours apart)"
_TURNS = "sets a priority at the engine (the law and `service_tier` do that)"
_ADAPTERS = "names an adapter beside the model that law and key are asked about (ask for it by its model's name)"
_MODELS = "names models beside the one that law and key are asked about (name that one as `model`)"
_PROMPTS = "says another prompt than the one that is counted here (say it in `messages`, `prompt` or `input`)"
_RUNS = "has an engine itself fetch or run something for a client"
_STORED = "names a stored response, and none is stored here (send the whole conversation as `input`)"

# By name, with the engine that knows it.
_FIELDS: dict[str, str] = {
    "kv_transfer_params": _HOSTS,  # vLLM: where to read KV from
    "ec_transfer_params": _HOSTS,  # vLLM: the same for encoders
    "bootstrap_room": _HOSTS,  # SGLang, with bootstrap_host and _port
    "disaggregated_params": _HOSTS,  # TensorRT-LLM
    "migration_request": _HOSTS,  # LMDeploy: whose KV to take over, and from where
    "custom_logit_processor": _CODE,  # SGLang: pickled
    "logits_processors": _CODE,  # vLLM: by qualified name
    "chat_template": _CODE,  # vLLM, TGI: Jinja
    "trust_remote_code": _CODE,
    "priority": _TURNS,  # vLLM, SGLang, Triton: if they use it, it would displace other requests
    "extra_key": _CACHES,  # SGLang: appended to the salt, or in its place if there is none
    "lora_path": _FILES,  # SGLang
    "tool_call_parser_plugin": _FILES,
    "request_id": _OTHERS,  # vLLM: with it, a client could abort the request
    "rid": _OTHERS,  # SGLang, the same
    "session_params": _OTHERS,  # SGLang: goes on from another request
    "previous_response_id": _STORED,
    "draft_model": _MODELS,  # LM Studio
    "models": _MODELS,  # OpenRouter: other models to ask; LiteLLM's are the `..._fallbacks` below
    "user_config": _MODELS,  # LiteLLM: models, and where they are
    "model_list": _MODELS,  # the same
    "custom_llm_provider": _HOSTS,  # LiteLLM: who serves the model
    "provider": _HOSTS,  # OpenRouter, the same
    "api_base": _HOSTS,  # LiteLLM
    "mcp_servers": _HOSTS,  # Anthropic's: servers whose tools to use
    "server_url": _HOSTS,  # of a tool in OpenAI's Responses
    "file_id": _OTHERS,
    "uuid": _OTHERS,  # vLLM: a medium that another request brought
    "content_hash": _OTHERS,  # SGLang, the same
    "ngram_corpus_id": _OTHERS,  # SGLang: by whose texts tokens are guessed ahead
    "backend": _HOSTS,  # LocalAI: which of its backends, which may be on other hosts
    "model_base_name": _FILES,  # LocalAI, and the next
    "tokenizer": _FILES,
    "web_search_options": _RUNS,  # OpenAI's, which LiteLLM carries out for others
    "strict_priority": _TURNS,  # Dynamo, as all that follow
    "latency_sensitivity": _TURNS,
    "session_control": _OTHERS,  # with a session's name, a client could end it
    "token_data": _PROMPTS,
    "input_ids": _PROMPTS,  # SGLang: of a chat, in place of its messages
    "previous_input_messages": _PROMPTS,  # vLLM: before those of `input`, in its Responses
    "routing_constraints": _DEVICES,
    "id_slot": _OTHERS,  # llama.cpp: for whose slot to wait, and whose cache to have
}
# By family: names that no engine has yet, too.
_FAMILIES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:.*_)?(?:hosts?|hostnames?|ports?|urls?|uris?|endpoints?|callbacks?|webhooks?)"), _HOSTS),
    # TGI, Triton, TensorRT-LLM; llama.cpp's `lora`, MLX's `adapters`
    (re.compile(r"loras?(?:_.*)?|(?:.*_)?adapters?|adapter_(?:id|name|source)s?"), _ADAPTERS),
    (re.compile(r"(?:.*_)?fallbacks|(?:.*_)?fallback_dict"), _MODELS),
    (re.compile(r".*_paths?|(?:.*_)?(?:filenames?|director(?:y|ies))"), _FILES),
    (re.compile(r"(?:.*_)?embeds|pickled?(?:_.*)?|(?:.*_)?embed(?:ding)?_overrides?(?:_.*)?"), _TENSORS),  # SGLang's
    (re.compile(r"(?:.*_)?(?:(?:dp|tp|pp|ep|parallel)_rank|devices?|device_ids?|gpu_ids?)"), _DEVICES),
    (re.compile(r"(?:.*_)?(?:worker|instance|engine|replica)_ids?"), _DEVICES),
    (re.compile(r"shared_memory(?:_.*)?|sequence_(?:id|start|end)"), _OTHERS),  # Triton
)
_END_CHARS = 32  # no family's word is as long
# Members whose own members an engine takes for its arguments.
_NESTED = frozenset((
    "vllm_xargs", "extra_args", "extra_body", "sampling_params", "nvext", "parameters", "mm_processor_kwargs",
    "media_io_kwargs",
))  # fmt: skip
_TOPMOST = frozenset(("inference_geo", "data_residency", "cache_salt"))  # bind the router, or are changed by it
# LiteLLM's proxy merges it over what it sends on: fields that were read from the body must not be in it again.
_OVER_ALL = "extra_body"
_READ = frozenset((
    "background", "best_of", "conversation", "documents", "input", "instructions", "max_completion_tokens",
    "max_output_tokens", "max_tokens", "messages", "model", "n", "n_cmpl", "n_predict", "prompt", "queries", "query",
    "service_tier", "store", "stream", "stream_options", "system", "tools", "user",
))  # fmt: skip
_ONCE = _TOPMOST | {"model", "file", "stream"}  # of a form
_METADATA = "metadata"
_DEEP = "nvext"  # Dynamo's, which nests: `nvext.agent_hints.priority`
# What whoever asked runs itself; of those without a schema of their own, by Anthropic's names.
_RUN_BY_CLIENTS = re.compile(r"function|custom|(?:bash|computer|memory|text_editor)_[0-9]+")
_TEMPLATE_ARGUMENTS = "chat_template_kwargs"
_TEMPLATE_REFUSED = frozenset(("chat_template", "tokenize", "return_tensors", "return_dict"))  # of transformers' call

# What OpenAI's API, vLLM, SGLang, TGI, TensorRT-LLM and Triton document, and is harmless.
KNOWN = frozenset(
    (
        "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "audio", "bad_words", "best_of",
        "apply_softmax", "background", "cache_salt", "chat_template_kwargs", "client_metadata", "container",
        "context_management", "conversation", "data_residency",
        "continue_final_message", "custom_params", "data_1", "data_2", "detokenize", "dimensions", "documents",
        "early_stopping", "echo", "embed_dtype", "encoding_format", "end_id", "extra_args", "extra_body",
        "file", "frequency_penalty", "function_call", "functions", "guided_choice",
        "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern",
        "id", "ignore_eos", "include", "include_reasoning", "include_stop_str_in_output", "inference_geo", "input",
        "input_type", "inputs", "instructions", "item_first", "items", "label_token_ids", "max_output_tokens",
        "max_tool_calls",
        "json_schema", "language", "length_penalty", "log_probs", "logit_bias", "logprob_token_ids", "logprobs",
        "max_completion_tokens", "max_num_results", "max_tokens", "max_tokens_per_doc",
        "media_io_kwargs", "messages", "metadata", "min_p", "min_tokens", "mm_processor_kwargs", "modalities",
        "model", "n", "n_cmpl", "n_predict", "no_repeat_ngram_size", "no_stop_trim", "normalize", "nvext",
        "output_config", "outputs", "pad_id",
        "parallel_tool_calls", "parameters", "presence_penalty", "prompt", "prompt_cache_key",
        "prompt_cache_retention", "prompt_ignore_length", "prompt_logprobs", "prompt_truncate_thresh",
        "queries", "query", "rank_fields", "reasoning", "reasoning_effort", "regex", "repetition_penalty",
        "response_format", "return_cached_tokens_details", "return_documents", "return_hidden_states",
        "return_token_ids", "return_token_strs", "return_tokens_as_token_ids", "safety_identifier", "seed",
        "separate_reasoning", "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "stop",
        "stop_regex", "stop_sequences", "stop_token_ids", "speed", "store", "stream",
        "stream_continuous_usage_stats",
        "stream_include_usage", "stream_options", "stream_reasoning", "structured_outputs", "suffix", "system",
        "temperature", "text", "text_1", "text_2", "text_input", "thinking", "timestamp_granularities",
        "timestamp_granularities[]",
        "to_language", "tokens", "tool_choice", "tools", "top_k", "top_logprobs", "top_n", "top_p", "truncate",
        "truncation",
        "truncate_prompt_tokens", "typical_p", "use_activation", "use_beam_search", "user", "verbosity",
        "vllm_xargs",
    )
)  # fmt: skip
PLAIN = KNOWN - _NESTED - {_TEMPLATE_ARGUMENTS, _METADATA}
"""Members of a JSON body that `Guard.fields` has nothing to say of."""

# How base64 of images, sound and films begins. Anything else in place of a medium that is no longer than a path may be
# one: SGLang opens a file of that name.
_BASE64 = (
    "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk0", "SUkq", "TU0AK", "T2dnU", "ZkxhQ", "SUQz", "AAAA", "GkXfo",
)  # fmt: skip
_MEDIA = frozenset(("url", "image", "image_url", "video", "video_url", "audio", "audio_url"))
_PATH_CHARS_MAX = 4095  # Linux' PATH_MAX, less the NUL
_EXEMPT = frozenset((
    "text", "type", "detail", "format", "role", "name", "title", "mime_type", "media_type", "filename",
))  # fmt: skip
_OF_MEDIA = _MEDIA | _EXEMPT | {"input_audio", "data"}  # as most parts have: of no family
_COUNTED_MAX = 256  # names; a client must not be able to make more
OTHER = "(other)"
_QUERY_FIELDS_MAX = 64  # some 4 us each, before the client is authenticated
_SEPARATORS = re.compile(rb"[&;]")
_NAME_CHARS = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")

# A client's headers that engines may see. Cookies, request ids, ranks and whatever else is for the balancers alone.
_HEADERS = frozenset(
    (
        b"accept", b"accept-language", b"anthropic-beta", b"anthropic-version", b"content-language", b"content-type",
        b"inference-header-content-length", b"user-agent",
    )
)  # fmt: skip


class Guard:
    """What the configuration allows beyond. `media_hosts` are `host` or `host:port`, in lower case; without, media come
    in the request alone. `unknown` counts unknown fields, by name; `pending` are those for `met`."""

    __slots__ = ("media_hosts", "pending", "refuses_unknown", "unknown")

    def __init__(self, media_hosts: Iterable[str] = (), *, refuse_unknown: bool = False) -> None:
        self.media_hosts, self.refuses_unknown = frozenset(media_hosts), refuse_unknown
        self.unknown: Counter[str] = Counter()
        self.pending: list[str] = []

    def adopt(self, other: Guard) -> None:
        """Allow what another guard allows, from now on."""
        self.media_hosts, self.refuses_unknown = other.media_hosts, other.refuses_unknown

    def fields(self, fields: Any) -> None:
        """A JSON body's own members, and those that are arguments, as read. Raises BodyError."""
        if not isinstance(fields, dict):
            return  # its reader says so
        for name in fields:
            if name not in PLAIN and (value := fields[name]) is not None and not _within(name, value):
                self._check_name(name)

    def form(self, names: Iterable[str]) -> None:
        """Check a form's fields. Raises BodyError."""
        for name in names:
            if name in KNOWN:
                continue
            base, bracket, _ = name.partition("[")  # of lists, servers take it off (LiteLLM's proxy)
            if bracket and base.casefold() in _ONCE:
                raise invalid(base, f"`{base}` is no list: write it without brackets")
            self._check_name(name if family_of(base) is None else base)

    def media(self, parts: Any, at: str) -> None:
        """The parts of a message's content, or of a passage's, as read. Raises BodyError."""
        if not isinstance(parts, list):
            return
        for part in parts:
            if isinstance(part, dict) and not (len(part) == 2 and part.get("type") in _TEXTS and "text" in part):
                self._medium(part, at)

    def _medium(self, value: dict[str, Any], at: str) -> None:
        kind = value.get("type")
        if isinstance(kind, str) and kind.casefold().endswith("_embeds"):  # vLLM's `prompt_embeds` has them in `data`
            raise _refused("type", _TENSORS, f"{at}.")
        for name, member in value.items():
            if name not in _OF_MEDIA:
                folded = name.casefold()
                family = _FIELDS.get(folded) or (_TENSORS if folded.endswith("_embeds") else None)
                if family is not None and member is not None:
                    raise _refused(name, family)
            if isinstance(member, str):
                if name not in _EXEMPT:
                    self._location(member, at, is_medium=name in _MEDIA)
            elif isinstance(member, dict):
                self._medium(member, at)
            elif isinstance(member, list):
                for one in member:
                    if isinstance(one, dict):
                        self._medium(one, at)
                    elif isinstance(one, str) and name not in _EXEMPT:
                        self._location(one, at, is_medium=name in _MEDIA)

    def _location(self, text: str, at: str, *, is_medium: bool) -> None:
        """Whether this is content, or a place that the configuration allows: base64 has neither colon nor dot, and that
        of a medium its beginning."""
        if text[:5].lower() == "data:":
            return
        plain = ":" not in text and "." not in text
        may_be_path = is_medium and 0 < len(text) <= _PATH_CHARS_MAX and not text.startswith(_BASE64)
        if plain and not may_be_path:
            return
        if self.media_hosts:
            try:
                url = urlsplit(text)
                place = url.hostname if url.port is None else f"{url.hostname}:{url.port}"
            except ValueError:
                place, url = None, urlsplit("")
            # What two parsers of URLs may read differently is no place at all.
            plain = url.username is None and "\\" not in text and "@" not in url.netloc and text.isprintable()
            if plain and " " not in text and url.scheme in ("http", "https") and place in self.media_hosts:
                return
            detail = f"media by URL pass from {', '.join(sorted(self.media_hosts))} only: send the data itself"
        else:
            detail = (
                "media by URL are not fetched: send the data itself, as a `data:` URL (in Anthropic's API as a "
                "source of type base64)"
            )
        raise invalid(at, f"`{at}`: {detail}")

    def _check_name(self, name: str) -> None:
        """Refuse a member that is not among the known ones, or note it as pending."""
        family = family_of(name)
        if family is not None:
            raise _refused(name, family)
        shown = name if _NAME_CHARS.fullmatch(name) else OTHER
        if (known := name.casefold()) in KNOWN and known != name:
            raise invalid(shown, f"`{shown}` differs from `{known}` by the case of its letters alone: write it so")
        if self.refuses_unknown:
            raise invalid(shown, f"`{shown}` is not a field that is known here: leave it out, or have it allowed")
        self.pending.append(shown)

    def met(self) -> list[str]:
        """The unknown fields met since the last call."""
        met, self.pending = self.pending, []
        return met

    def count(self, names: Iterable[str]) -> None:
        """Count unknown fields that were passed on. Their names are a client's words, so they are recorded only where
        the law allows it.
        """
        for name in names:
            self.unknown[name if name in self.unknown or len(self.unknown) < _COUNTED_MAX else OTHER] += 1


_TEXTS = ("text", "input_text")
DEFAULT = Guard()


# -- readers of bodies, which use it

# Body, path (without its query), the request's header lines ready to be sent on (farhop.relay.http.head), and what
# engines may be told. A reader raises BodyError, or msgspec's errors.
Reader: TypeAlias = "Callable[[bytes, bytes, bytes, Guard], Prompt]"


T = TypeVar("T", bound=msgspec.Struct)


def json_reader(shape: type[T], understand: Callable[[T, Guard], Prompt]) -> Reader:
    """The reader of a kind whose body is a JSON object. `shape`: the fields of it that are read."""
    decode = json_decoder(shape)

    def read(body: bytes, _path: bytes, _headers: bytes, guard: Guard) -> Prompt:
        return understand(decode(body), guard)

    return read


def _within(name: str, value: Any) -> bool:
    """Look at the members of a member that has some of its own; False where it is none of these. Raises BodyError."""
    if name in _NESTED:
        arguments(name, value)
    elif name == _TEMPLATE_ARGUMENTS:
        _template(value)
    elif name == _METADATA:
        _metadata(value)
    else:
        return False
    return True


def arguments(name: str, given: Any) -> None:
    """A member that an engine takes for arguments, as read. Raises BodyError."""
    if name == _DEEP:
        _deep_arguments(given)
    elif isinstance(given, dict):
        _arguments(name, given)


def _deep_arguments(given: Any) -> None:
    waiting, met = [given], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            met += len(one)
            if met > MEMBERS_MAX:
                raise invalid(_DEEP, f"`{_DEEP}` has too many members: at most {MEMBERS_MAX}")
            _arguments(_DEEP, one)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _arguments(name: str, given: dict[str, Any]) -> None:
    for inner, value in given.items():
        if value is None:
            continue
        family, folded = family_of(inner), inner.casefold()
        if family is not None:
            raise _refused(inner, family, f"{name}.")
        if folded in _TOPMOST or (name == _OVER_ALL and folded in _READ):
            raise invalid(inner, f"`{name}.{inner}` is not read there: it must be a member of the body itself")
        if name == _OVER_ALL:
            _within(folded, value)


def tools(types: Iterable[Any]) -> None:
    """Check the types of tools (None: no type is given). Raises BodyError."""
    for kind in types:
        if kind is not None and not (isinstance(kind, str) and _RUN_BY_CLIENTS.fullmatch(kind)):
            raise invalid(
                "tools", "`tools` that the client runs pass: what an engine itself would fetch or run does not"
            )


def _metadata(given: Any) -> None:
    """Check the metadata. It is the client's own, but LocalAI runs tools because of it."""
    if isinstance(given, dict):
        for inner, value in given.items():
            if value is not None and inner.casefold().startswith("mcp_"):
                raise _refused(inner, _RUNS, f"{_METADATA}.")


def _template(given: Any) -> None:
    if isinstance(given, dict):
        for inner in sorted(_TEMPLATE_REFUSED & given.keys()):
            raise _refused(inner, _CODE, f"{_TEMPLATE_ARGUMENTS}.")


def family_of(name: str) -> str | None:
    """What a field of this name would make an engine do that no client may ask for; None if it is harmless."""
    name = name.casefold()  # engines in Go (Ollama, LocalAI) take a member for another of the same letters
    if len(name) > 2 * _END_CHARS:  # a family shows at either end, and looking further takes long
        name = name[:_END_CHARS] + name[-_END_CHARS:]
    return _FIELDS.get(name) or next((rule for shape, rule in _FAMILIES if shape.fullmatch(name)), None)


def _refused(name: str, family: str, within: str = "") -> BodyError:
    return invalid(name, f"`{within}{name}` {family}: it is not for clients to set, leave it out")


def query(target: bytes) -> None:
    """A request's target: its query may name no field, since of two an engine may read this one (LiteLLM's `model`),
    while law and limits use the body's; nor a residency, which would not count there. Raises BodyError."""
    text = target.partition(b"?")[2]
    if text.count(b"&") + text.count(b";") >= _QUERY_FIELDS_MAX:
        raise invalid("query", f"the query has too many fields: at most {_QUERY_FIELDS_MAX}")
    for part in _SEPARATORS.split(text):
        name = unquote_plus(part.partition(b"=")[0].decode("latin-1")).partition("[")[0].casefold()
        if name in KNOWN or family_of(name) is not None:
            raise invalid(name, f"`{name}` is in the query: it must be a member of the body")
        if name.replace("_", "-") == "x-farhop-allow":
            raise invalid(name, f"`{name}` is in the query: it must be the header `x-farhop-allow`")


def engine_headers(lines: bytes) -> bytes:
    """Of header lines ready to be sent (names in lower case), those that engines may see."""
    passed = b""
    for line in lines.split(b"\r\n"):
        if line[: line.find(b":")] in _HEADERS:
            passed += line + b"\r\n"
    return passed
