"""A fuzz target: whatever a body says, it is read or refused, by an outcome, and what passes reads the same elsewhere.

Some thousand run with the tests; `make fuzz` runs a million, and as many heads (fuzz_night.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from farhop.relay.formats import bodies, openai, shape
from farhop.relay.formats.openai import change
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import BodyError
from farhop.relay.upstream import engine_faults, tap

sys.path.insert(0, str(Path(__file__).parents[1] / "farhop" / "relay"))

import fuzz as heads

PATH = b"/v2/models/m/infer"
FORM = b"content-type: multipart/form-data; boundary=b\r\n"
SEEDS: dict[Kind, tuple[bytes, ...]] = {
    Kind.CHAT: (
        b'{"model":"m","messages":[{"role":"user","content":"a\\nb"},{"role":"x","content":[{"type":"text","text":"y"}]}],'
        b'"stream":true,"stream_options":{"include_usage":false},"tools":[{"a":[1,{}]}],"max_tokens":5}',
        b'{"model": "m", "messages": [{"role":"u","content": [{"type":"image_url","image_url":{"url": "data:x"}}]}]}',
    ),
    Kind.COMPLETION: (b'{"model":"m","prompt":[1,2,33]}', b'{"model":"m","prompt":["a",[4,5]],"stream":true}'),
    Kind.EMBEDDINGS: (b'{"model":"m","input":"x"}', b'{"model":"m","input":[[1],[2]]}'),
    Kind.RERANK: (b'{"model":"m","query":"q","documents":["a",{"text":"b"}]}',),
    Kind.SCORE: (b'{"model":"m","text_1":"q","text_2":["a","b"]}',),
    Kind.DETOKENIZE: (b'{"model":"m","tokens":[1,2]}',),
    Kind.INFER: (b'{"inputs":[{"name":"a","datatype":"BYTES","shape":[1,1],"data":[["x"]]}]}',),
    Kind.GENERATE: (b'{"text_input":"x","parameters":{"max_tokens":3}}',),
    Kind.TRANSCRIPTION: (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc\r\n--b--\r\n',
    ),
}
PIECES = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'\\"', b"\\u003a", b"\\ud800", b"\\u0000", b"null", b"true",
    b"1e999", b"-", b"0", b"1.5", b"9" * 25, b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\0", b" ", b"\n", b'"model":"n",',
    b'"a":1,"a":2,', b'"\\u006dodel":"n",', b"[" * 300, b'{"a":' * 300,
    b'"kv_transfer_params":{},', b"\r\n--b", b"\r\n--b--\r\n",
    b'"stream\\u005foptions":null,', b",1" * 20,
)  # fmt: skip


def mutated(rng: Random) -> tuple[Kind, bytes]:
    """A kind of request, and a body bent."""
    kind = rng.choice(tuple(SEEDS))
    data = bytearray(rng.choice(SEEDS[kind]))
    for _ in range(rng.randint(0, 3)):
        at, how = rng.randrange(len(data) + 1), rng.random()
        if how < 0.55:
            data[at:at] = rng.choice(PIECES)
        elif how < 0.75:
            del data[at : at + rng.randint(1, 4)]
        elif how < 0.85:
            data[at : at + 1] = bytes((rng.randrange(256),))
        else:
            data[at:at] = data[at : at + rng.randint(1, 40)]
    if rng.random() < 0.05:
        data[-1:-1] = b',"pad":"' + b"x" * shape.SMALL_BYTES + b'"'
    return kind, bytes(data)


def once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as the strictest reader takes it."""
    assert len({name for name, _ in members}) == len(members), "a key stands twice in what passed"
    return dict(members)


def check(rng: Random) -> bool:
    """One round; whether the body passed. Any error but BodyError is a finding."""
    kind, body = mutated(rng)
    try:
        prompt = bodies.read(kind, body, PATH, FORM)
    except BodyError:
        return False
    if kind is Kind.TRANSCRIPTION:
        return True
    document = json.loads(body, object_pairs_hook=once)  # as an engine in Python reads it
    assert prompt.model == ("m" if kind in (Kind.INFER, Kind.GENERATE) else document["model"])
    if prompt.hide_usage:
        asked = json.loads(change(body, prompt, "salt").of(body), object_pairs_hook=once)
        assert asked["cache_salt"] == "salt"
        assert asked["stream_options"]["include_usage"] is True
        assert asked["model"] == prompt.model
    return True


def answered(rng: Random) -> None:
    """The same bytes as an engine's answer, in pieces: whatever they are, they pass as they came."""
    _, data = mutated(rng)
    data = b"data: " + data + b"\n\ndata: [DONE]\n\n"
    for listening in (tap.StreamTap(hide_usage=False), tap.BodyTap()):
        passed = b"".join(listening.feed(piece) for piece in heads.cut(data, rng) if piece) + listening.finish()
        assert passed == data
    failure = engine_faults.FaultTap()
    passed = b"".join(failure.feed(piece) for piece in heads.cut(data[6:-16], rng) if piece) + failure.finish()
    assert passed == (b"" if failure.unfit else data[6:-16])
    openai.answer_text(data[6:-2])
    openai.usage_of(data[6:-2])
