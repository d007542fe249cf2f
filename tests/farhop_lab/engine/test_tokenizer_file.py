"""What is written for emulated engines: each word is a token, and a chat is what the engine renders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from farhop.relay.formats.paths import Kind
from farhop.service.process.clock import wall
from farhop.service.tokenization.tokenizer import Files, ModelTokenizer, UnreadableError
from farhop_lab.engine.core.text import VOCABULARY
from farhop_lab.engine.formats.api import ChatBody, Message, Part, render_chat
from farhop_lab.engine.tokenizer_file import TEMPLATE, TOKENIZER, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made: Path = tmp_path_factory.mktemp("tokenizer") / "new"
    assert write(made) == 0
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelTokenizer:
    return ModelTokenizer("test", Files(str(folder / TOKENIZER), str(folder / TEMPLATE)), wall)


def test_each_word_is_one_token_and_every_text_comes_back(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    for word in VOCABULARY:
        assert len(tokenizer.encode(word.decode()).ids) == 1
    for text in ("the sea and far", "Zürich 東京\n\t\0", "".join(map(chr, range(300)))):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


_content = st.text(st.characters(codec="utf-8"), max_size=30)


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), _content, st.booleans()), min_size=1, max_size=4
    )
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_balancer_renders_what_the_engine_does(model: ModelTokenizer, turns) -> None:
    messages = [
        Message(role, [Part("text", text), Part("text", "more")] if parts else text) for role, text, parts in turns
    ]
    more = {"type": "text", "text": "more"}
    asked = [{"role": r, "content": [{"type": "text", "text": text}, more] if p else text} for r, text, p in turns]
    assert model._chat({"messages": asked}).encode() == render_chat(ChatBody(messages=messages))


def test_tools_are_refused(model: ModelTokenizer) -> None:
    body = (
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}'
    )
    with pytest.raises(UnreadableError, match="template"):
        model.read(Kind.CHAT, body)
