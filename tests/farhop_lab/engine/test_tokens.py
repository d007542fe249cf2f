"""An emulated engine with a tokenizer counts, caches and answers by its tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel
from farhop_lab.engine.core.text import VOCABULARY, write_all
from farhop_lab.engine.main import TokenizerError, host
from farhop_lab.engine.settings import EngineSettings
from farhop_lab.engine.tokenizer_file import TOKENIZER, write
from farhop_lab.engine.tokens import EngineTokenizer

COMPLETION = "/v1/completions"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path / TOKENIZER


def test_text_is_unchanged_and_tokens_are_the_tokenizers(tokenizer: Path) -> None:
    made = EngineTokenizer(tokenizer)
    text = b"".join(VOCABULARY[:40])
    plain = EngineRequest(text, max_tokens=30, ignore_eos=True)
    sequence = Sequence("1", made.tokenized(plain), TextModel("m", 7), PROFILES["l4"])
    assert sequence.prompt_tokens == 40
    line = "".join(sequence.write_token() for _ in range(30))
    assert line.encode() == write_all(text, 7, 1e9, 30)
    # Its answer, sent back as a prompt, is the same tokens: so the next turn finds it cached.
    again = made.tokenized(EngineRequest(text + line.encode()))
    assert bytes(sequence.text) == again.ids
    assert sequence.total_tokens == 70


def test_token_ids_given_by_the_client_are_kept(tokenizer: Path) -> None:
    assert EngineTokenizer(tokenizer).tokenized(EngineRequest(b"x", ids=b"\0\0\0\7")).ids == b"\0\0\0\7"


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.json", "none.json"):
        with pytest.raises(ValueError, match=name):
            EngineTokenizer(tmp_path / name)


async def test_a_whole_engine(replica, tokenizer: Path) -> None:
    client = await replica(tokenizer=tokenizer)
    text = " sea air" * 40
    usage = [(await client.ask(COMPLETION, prompt=text, max_tokens=1))["usage"] for _ in range(2)]
    assert usage[0]["prompt_tokens"] == 80
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] == 64
    by_ids = await client.ask(COMPLETION, prompt=[7] * 80, max_tokens=1)
    assert by_ids["usage"]["prompt_tokens"] == 80
    async with client.post("/reset_prefix_cache") as response:
        assert response.status == 200
    after = await client.ask(COMPLETION, prompt=text, max_tokens=1)
    assert not (after["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")


async def test_missing_tokenizer_files_are_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, says in (({"tokenizer": tmp_path / "none.json"}, "none.json"), ({"tokenizer": tokenizer}, "extra")):
        with pytest.raises(TokenizerError, match=says):
            async with host(EngineSettings(ports=[0], **settings)):
                pass
        monkeypatch.setitem(sys.modules, "farhop_lab.engine.tokens", None)
