"""What an engine tells of its cache is what is in it, whatever happens to it."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.engine.core.kv_log import KvLog, batch
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.core.sequence import EngineRequest, Sequence, TextModel

VOICE = TextModel("m")
PROFILE = PROFILES["l4"].__class__(**{
    **{f: getattr(PROFILES["l4"], f) for f in PROFILES["l4"].__dataclass_fields__}, "kv_blocks": 12, "block_tokens": 2,
})  # fmt: skip


class Engine:
    def __init__(self) -> None:
        self.log = KvLog(PROFILE.block_tokens)
        self.core = EngineCore(PROFILE, log=self.log)
        self.serial = 0

    def ask(self, text: str, **more: Any) -> None:
        self.serial += 1
        wanted = EngineRequest(text.encode(), max_tokens=2, ignore_eos=True, **more)
        self.core.submit(Sequence(str(self.serial), wanted, VOICE, PROFILE), 0.0)

    def run(self) -> None:
        while self.core.has_work:
            self.core.step(0.0)
        self.core.end_step()


def test_a_prompt_is_reported_block_by_block() -> None:
    engine = Engine()
    engine.ask("abcdefghijklmnop" + "xyz")
    engine.run()
    first = engine.log.take()[0]
    assert (first["type"], first["parent_block_hash"], first["block_size"]) == ("BlockStored", None, 2)
    assert struct.pack(">4I", *first["token_ids"]) == b"abcdefghijklmnop"
    assert len(first["block_hashes"]) == 2
    assert engine.log.take() == []
    engine.ask("abcdefghijklmnop" + "qrstuvwxyz")
    engine.run()
    (again, *_) = engine.log.take()
    assert again["parent_block_hash"] == first["block_hashes"][-1]  # blocks already held are not announced again


def test_a_salt_is_in_the_first_block() -> None:
    engine = Engine()
    engine.ask("abcdefghijklmnopq", cache_salt="pepper")
    engine.run()
    assert engine.log.take()[0]["extra_keys"] == [["pepper"], None]


def test_a_reset_clears_unless_something_runs() -> None:
    engine = Engine()
    engine.ask("abcdefghijklmnop")
    engine.core.step(0.0)
    assert not engine.core.kv.reset()
    engine.run()
    engine.log.take()
    assert engine.core.kv.reset()
    assert engine.log.take() == [{"type": "AllBlocksCleared"}]
    engine.core.kv.check()
    assert engine.core.kv.cached == 0


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=40), st.integers(0, 9)), max_size=12))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_follower_of_all_events_knows_the_held_blocks(asked) -> None:
    engine, held = Engine(), set[int]()
    for text, n in asked:
        if len(text) // 4 + 3 > PROFILE.context_tokens:
            continue
        engine.ask(text)
        if n > 2:
            engine.run()
        if n == 9:
            engine.core.kv.reset()
        for event in engine.log.take():
            if event["type"] == "BlockStored":
                assert event["parent_block_hash"] is None or event["parent_block_hash"] in held
                assert not held & set(event["block_hashes"])
                held.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                held.difference_update(event["block_hashes"])
            else:
                held.clear()
        assert held == engine.core.kv.names


@pytest.mark.parametrize("schema", ["map", "array"])
def test_old_and_new_event_encodings_are_written(schema: str) -> None:
    engine = Engine()
    engine.ask("abcdefghijklmnop")
    engine.run()
    at, events, rank = msgspec.msgpack.decode(batch([*engine.log.take(), {"type": "AllBlocksCleared"}], 1.5, schema))
    assert (at, rank) == (1.5, 0)
    if schema == "map":
        assert [event["type"] for event in events] == ["BlockStored", "AllBlocksCleared"]
    else:
        assert [event[0] for event in events] == ["BlockStored", "AllBlocksCleared"]
        assert (events[0][2], events[0][4], events[0][6]) == (None, 2, "GPU")


def test_an_adapter_is_logged_with_its_blocks() -> None:
    engine = Engine()
    for adapter, salt in (("", ""), ("sql", "pepper"), ("de", ""), ("sql", "")):
        engine.ask("abcdefghijklmnopq", adapter=adapter, cache_salt=salt)
        engine.run()
    found = [(e["lora_name"], e["lora_id"], e["extra_keys"]) for e in engine.log.take() if not e["parent_block_hash"]]
    assert found == [
        (None, None, None),
        ("sql", 1, [["sql", "pepper"], ["sql"]]),
        ("de", 2, [["de"], ["de"]]),
        ("sql", 1, [["sql"], ["sql"]]),
    ]
