"""Prompts as tokens: what an engine with the same files would compute, and what cannot be read, by reason."""

from __future__ import annotations

import asyncio
import struct
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farhop.config import ConfigError
from farhop.relay.formats.paths import Kind
from farhop.service.tokenization import tokenizer
from farhop.service.tokenization.tokenizer import Files, ModelTokenizer, Tokenizers, UnreadableError

AT = datetime(2026, 11, 21, tzinfo=UTC)
PLAIN = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }};{% endfor %}"
OPEN = PLAIN + "{% if add_generation_prompt %}>{% endif %}"


def write(folder: Path, **settings: Any) -> Path:
    """A tokenizer of single characters, whose <s> (id 1) begins a text."""
    vocabulary = {"<unk>": 0, "<s>": 1} | {chr(n): n for n in range(32, 127)}
    document = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
        "padding": None, "normalizer": None, "decoder": None,
        "added_tokens": [{"id": 1, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    file = folder / "tokenizer.json"
    file.write_bytes(msgspec.json.encode(document))
    if settings:
        (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    return file


def model(folder: Path, template: str = OPEN, **settings: Any) -> ModelTokenizer:
    file = write(folder, **settings)
    (folder / "t.jinja").write_text(template)
    return ModelTokenizer("tokenizers.m", Files(str(file), str(folder / "t.jinja") if template else ""), lambda: AT)


def read(made: ModelTokenizer, kind: Kind = Kind.CHAT, **asked: Any) -> str:
    """What was read, as text; <s> as ^."""
    packed = made.read(kind, msgspec.json.encode({"model": "m", **asked})).ids
    ids = struct.unpack(f"<{len(packed) // 4}I", packed)
    return "".join("^" if i == 1 else chr(i) for i in ids)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def test_a_chat_goes_through_the_template_and_gets_no_special_tokens(tmp_path: Path) -> None:
    made = model(tmp_path)
    assert read(made, messages=[user("hello there, longer than five")]) == "user:hello there, longer than five;>"
    assert read(made, messages=[user("a")], add_generation_prompt=False) == "user:a;"
    assert read(made, messages=[user("a")], add_special_tokens=True) == "^user:a;>"
    assert read(made, messages=[user([{"type": "text", "text": "a"}, "b"])]) == "user:a\0b;>"  # a line feed is unknown
    assert read(made, messages=[user(None)]) == "user:;>"


def test_a_completion_gets_the_tokenizers_own(tmp_path: Path) -> None:
    made = model(tmp_path)
    assert read(made, Kind.COMPLETION, prompt="hello") == "^hello"
    assert read(made, Kind.COMPLETION, prompt=["hello"], add_special_tokens=False) == "hello"
    assert read(made, Kind.COMPLETION, prompt=[104, 105]) == read(made, Kind.COMPLETION, prompt=[[104, 105]]) == "hi"


@pytest.mark.parametrize("special", [True, False])
def test_a_long_prompts_beginning_is_read_by_itself(tmp_path: Path, special: bool) -> None:
    made, text = model(tmp_path), "a prompt of words " * 500
    for kind, asked in ((Kind.COMPLETION, {"prompt": text}), (Kind.CHAT, {"messages": [user(text)]})):
        body = msgspec.json.encode({"model": "m", "add_special_tokens": special, **asked})
        begun = made.read(kind, body, whole=False)
        whole = made.read(kind, body)
        assert (begun.whole, whole.whole, begun.shape) == (False, True, whole.shape)
        assert whole.ids.startswith(begun.ids)
        assert 800 < len(begun.ids) // 4 <= 1024
    short = msgspec.json.encode({"model": "m", "prompt": "hello", "add_special_tokens": special})
    assert made.read(Kind.COMPLETION, short, whole=False) == made.read(Kind.COMPLETION, short)
    known = Tokenizers({"m": Files(str(tmp_path / "tokenizer.json"))}, lambda: AT)
    for unread in (b"{}", b" " * (tokenizer.BEGINNING_BYTES_MAX + 1)):
        assert known.beginning(Kind.COMPLETION, "m", unread, "") is None
    assert not known.unread
    known.close()


def test_files_beside_the_tokenizer_count(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ bos_token }}|" + PLAIN, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    assert read(model(tmp_path, "", **settings), messages=[user("a")]) == "^|user:a;"


def test_the_template_is_where_a_model_has_it(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]
    assert read(model(tmp_path, "", chat_template=several), messages=[user("a")]) == "user:a;"
    (tmp_path / "chat_template.jinja").write_text("by itself")
    assert read(model(tmp_path, "", chat_template=several), messages=[user("a")]) == "by itself"
    assert read(model(tmp_path, OPEN, chat_template=several), messages=[user("a")]) == "user:a;>"


def test_what_templates_may_use(tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%d %b') }} {% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{% generation %}{{ tools | tojson }}{%- endgeneration %} {{ extra }}"
    )
    asked = {"messages": [user("a")], "tools": [{"function": {"name": "ü"}}], "chat_template_kwargs": {"extra": "more"}}
    function = '{"name": "\0", "description": null, "parameters": null}'
    assert read(model(tmp_path, template), **asked) == f'21 Nov [{{"type": "function", "function": {function}}}] more'


def test_a_template_that_goes_through_parts_gets_parts(tmp_path: Path) -> None:
    template = "{% for message in messages %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    made = model(tmp_path, template)
    assert read(made, messages=[user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]) == "[a][b]"
    assert read(made, messages=[user("a"), user(None)]) == "[a]"


def test_tool_calls_are_what_they_spell(tmp_path: Path) -> None:
    made = model(tmp_path, "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}")
    call = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    assert read(made, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]) == "Bern"


def test_a_final_message_is_continued_where_it_ends(tmp_path: Path) -> None:
    made = model(tmp_path)
    asked = {"continue_final_message": True, "add_generation_prompt": False}
    assert read(made, messages=[user("q"), {"role": "assistant", "content": "It is "}], **asked).endswith(
        "assistant:It is "
    )
    with pytest.raises(UnreadableError, match="template"):
        read(made, messages=[user(" ")], **asked)


@pytest.mark.parametrize(
    ("kind", "asked", "reason"),
    [
        (Kind.CHAT, {"messages": [user([{"type": "image_url", "image_url": {}}])]}, "media"),
        (Kind.CHAT, {"messages": [user("a")], "chat_template": "{{ 1 }}"}, "option"),
        (Kind.CHAT, {"messages": [user("boom")]}, "template"),
        (Kind.CHAT, {"messages": [user("x" * tokenizer.BODY_BYTES_MAX)]}, "length"),
        (Kind.COMPLETION, {"prompt": ["a", "b"]}, "several"),
        (Kind.COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 3}, "option"),
        (Kind.COMPLETION, {"prompt": [1, -1]}, "ids"),
        (Kind.CHAT, {"messages": 7}, "shape"),
        (Kind.CHAT, {"messages": [user("a")], "tools": [{"name": "f"}]}, "shape"),
    ],
)
def test_prompts_that_cannot_be_tokenized_are_counted_by_reason(tmp_path: Path, kind, asked, reason) -> None:
    template = "{% for m in messages %}{% if m.content == 'boom' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    made = Tokenizers({"m": Files(str(write(tmp_path)), str(tmp_path / "t.jinja"))}, lambda: AT)
    assert made.now(kind, "m", msgspec.json.encode({"model": "m", **asked}), "") is None
    assert (made.unread, made.prompts) == ({reason: 1}, 0)
    made.close()


def test_a_panic_of_the_library_is_an_unread_prompt(tmp_path: Path) -> None:
    """Here of one whose normalizer leaves nothing of a token to look for. A panic is no Exception in Python."""
    file = write(tmp_path)
    document = msgspec.json.decode(file.read_bytes())
    empty = {"id": 200, "content": "\n", "normalized": True, "special": True}
    document["added_tokens"].append({"single_word": False, "lstrip": False, "rstrip": False, **empty})
    document["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    file.write_bytes(msgspec.json.encode(document))
    made = Tokenizers({"m": Files(str(file))}, lambda: AT)
    assert made.now(Kind.COMPLETION, "m", msgspec.json.encode({"prompt": "é"}), "") is None
    assert made.unread == {"tokenizer": 1}
    assert made.beginning(Kind.COMPLETION, "m", msgspec.json.encode({"prompt": "é"}), "") is None
    made.close()


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    made = model(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}")
    with pytest.raises(UnreadableError, match="template"):
        read(made, messages=[user("a")])


async def test_long_ones_are_read_in_a_thread(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "t.jinja").write_text(OPEN)
    made = Tokenizers({"m": Files(str(write(tmp_path)), str(tmp_path / "t.jinja"))}, lambda: AT)
    assert made.reads(Kind.CHAT, "m")
    assert not made.reads(Kind.CHAT, "other")
    assert not made.reads(Kind.EMBEDDINGS, "m")
    good = msgspec.json.encode({"messages": [user("a")]})
    for body, tokens in ((good, made.now(Kind.CHAT, "m", good, "salt")), (b"{", None)):
        future = made.later(Kind.CHAT, "m", body, "salt")
        assert future is not None
        assert (await future, made.waiting) == (tokens, 0)
    assert (made.unread, made.prompts) == ({"shape": 1}, 2)
    monkeypatch.setattr(tokenizer, "WAITING_MAX", 0)
    assert made.later(Kind.CHAT, "m", good, "") is None
    assert made.unread["busy"] == 1
    made.close()


@pytest.mark.parametrize("given_up", [False, True])
async def test_what_waits_for_a_thread_is_let_go_when_given_up_and_when_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    made, holding = Tokenizers({"m": Files(str(write(tmp_path)))}, lambda: AT), threading.Event()
    monkeypatch.setattr(ModelTokenizer, "read", lambda *_: holding.wait(60.0))
    *begun, last = [made.later(Kind.COMPLETION, "m", b"", "") for _ in range(tokenizer.THREADS + 1)]
    assert last is not None
    assert made.waiting == tokenizer.THREADS + 1
    if given_up:
        last.cancel()
    else:
        made.close()
    async with asyncio.timeout(60.0):
        await asyncio.wait([last])
        while made.waiting > tokenizer.THREADS:
            await asyncio.sleep(0)
    assert last.cancelled()
    assert not any(one.done() for one in begun if one is not None)
    holding.set()
    made.close()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (Files("none.json"), "file: .*none.json: not a tokenizer.json"),
        (Files("tokenizer.json", "none.jinja"), "template: .*none.jinja: cannot be read"),
        (Files("tokenizer.json", "bad.jinja"), "template: is not a Jinja template"),
    ],
)
def test_files_of_no_use_are_named(tmp_path: Path, files: Files, says: str) -> None:
    write(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% if %}")
    there = Files(str(tmp_path / files.file), str(tmp_path / files.template) if files.template else "")
    with pytest.raises(ConfigError, match=f"tokenizers.m: {says}"):
        Tokenizers({"m": there}, lambda: AT)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json, beside it, cannot be read"):
        ModelTokenizer("tokenizers.m", Files(str(tmp_path / "tokenizer.json")), lambda: AT)


def test_without_a_template_only_completions_are_read(tmp_path: Path) -> None:
    made = model(tmp_path, "")
    with pytest.raises(UnreadableError, match="template"):
        read(made, messages=[user("a")])
    assert read(made, Kind.COMPLETION, prompt="a") == "^a"


@pytest.mark.parametrize("missing", ["tokenizers", "jinja2"])
def test_without_the_extra_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"tokenizers.m: needs the extra .* 'farhop\[tokenizer\]'"):
        model(tmp_path)
