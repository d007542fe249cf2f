"""Bodies are read for what routing needs: the same prompt spells the same text, another one never does."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.balance import outcome
from farhop.balance.estimate.estimates import BYTES_PER_TOKEN, OUTPUT_TOKENS, Estimates
from farhop.balance.machine import Usage
from farhop.relay.formats import bodies, openai, shape
from farhop.relay.formats.paths import Kind
from farhop.relay.formats.prompt import FIELD, ITEM, NO_OUTPUT, BodyError, Prompt
from tests.conftest import played

RUN = settings(max_examples=300, deadline=None, derandomize=True)


def chat(messages: Any, **more: Any) -> Prompt:
    return bodies.read(Kind.CHAT, json.dumps({"model": "m", "messages": messages, **more}).encode())


def completion(prompt: Any, **more: Any) -> Prompt:
    return bodies.read(Kind.COMPLETION, json.dumps({"model": "m", "prompt": prompt, **more}).encode())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_body_is_read_as_far_as_routing_needs() -> None:
    prompt = chat(
        [user("hi")], stream=True, stream_options={"include_usage": True}, max_tokens=9, max_completion_tokens=7,
        cache_salt="s", temperature=0.5,
    )  # fmt: skip
    assert (prompt.model, prompt.stream, prompt.hide_usage) == ("m", True, False)
    assert (prompt.max_tokens, prompt.cache_salt, prompt.opaque_bytes) == (9, "s", 0)
    plain = completion("x", stream=None, max_tokens=None, cache_salt=None, stream_options={})
    assert (plain.stream, plain.hide_usage, plain.max_tokens, plain.cache_salt) == (False, False, None, "")
    assert plain.canonical == b"x"


@pytest.mark.parametrize(
    ("more", "answers"),
    [
        ({}, 1), ({"n": None}, 1), ({"n": 1}, 1), ({"n": 5}, 5), ({"n": "5"}, 5), ({"n": 5.0}, 5), ({"best_of": 4}, 4),
        ({"n": 2, "best_of": 4}, 4), ({"n": 0}, 1), ({"n": -3}, 1), ({"n": "many"}, 1), ({"n": [2]}, 1),
        ({"n": True}, 1), ({"n": 10**40}, (1 << 31) - 1),
    ],
)  # fmt: skip
def test_all_requested_answers_are_counted(more: dict[str, Any], answers: int) -> None:
    assert chat([user("hi")], **more).answers == answers
    assert completion(["a", "b", "c"], **more).answers == 3 * answers
    batch = {"model": "m", "messages": [[user("hi")], [user("ho")]], **more}
    assert bodies.read(Kind.CHAT_BATCH, json.dumps(batch).encode()).answers == 2 * answers


def test_spelling_does_not_matter() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}]
    whole = {
        "model": "m",
        "tools": tools,
        "messages": [user('gr\u00fc\u00df\n"dich"'), {"role": "assistant", "content": None}],
    }
    spelled = [
        json.dumps(whole),
        json.dumps(whole, ensure_ascii=False),
        json.dumps(whole, indent=3, sort_keys=True),
        json.dumps(dict(reversed(whole.items())), separators=(",", ":")),
        json.dumps(whole).replace("gr", "\\u0067\\u0072"),
    ]
    assert len({bodies.read(Kind.CHAT, text.encode()).canonical for text in spelled}) == 1


def test_one_text_part_is_the_string() -> None:
    assert chat([user([{"type": "text", "text": "hi"}])]).canonical == chat([user("hi")]).canonical
    assert completion(["hi"]).canonical == completion("hi").canonical
    assert completion([[1, 2]]).canonical == completion([1, 2]).canonical


TEXT = st.text(st.sampled_from('ab\x1e\x1f\x00\u00ff\u00fe\ufffd\U0001f600"\\ \n'), max_size=4)
PART = st.one_of(
    st.builds(lambda t: {"type": "text", "text": t}, TEXT),
    st.builds(lambda t: {"type": "image_url", "image_url": {"url": f"data:,{t}"}}, TEXT),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tools", "a"])},
    optional={
        "content": TEXT | st.lists(PART, max_size=3),
        "name": TEXT,
        "tool_call_id": TEXT,
        "tool_calls": st.lists(st.builds(lambda t: {"function": t}, TEXT), max_size=2),
    },
)
TOOLS = st.none() | st.lists(st.builds(lambda t: {"name": t}, TEXT), min_size=1, max_size=2)


def meaning(messages: list[dict[str, Any]], tools: Any) -> Any:
    """What two bodies must share to be one prompt."""

    def content(value: Any) -> Any:
        if value is None or value == []:
            return ["text", ""]
        if isinstance(value, str):
            return ["text", value]
        parts = [["text", p["text"]] if p["type"] == "text" else ["media", p] for p in value]
        return parts[0] if len(parts) == 1 else parts

    return [
        tools,
        [
            [
                m["role"],
                content(m.get("content")),
                m.get("name") or "",
                m.get("tool_call_id") or "",
                m.get("tool_calls") or [],
            ]
            for m in messages
        ],
    ]


LONG = st.builds(
    lambda text, times: text * times,
    TEXT | st.sampled_from(["plain", "gr\u00fc\u00df"]),
    st.sampled_from([0, 1, 10, 40]),
)
ANY_CHAT = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "long" * 20])},
                optional={
                    "content": LONG | st.none() | st.integers(0, 1) | st.lists(PART, max_size=2)
                    | st.lists(st.builds(lambda t: {"type": "image_url", "image_url": {"url": t}}, LONG), max_size=1)
                    | st.lists(st.builds(lambda t: {"type": "text", "text": t}, LONG), max_size=2)
                    | st.sampled_from(["\x01", "\x010", "\x011", "\x01" * 20]),
                    "name": LONG,
                    "tool_calls": st.lists(st.builds(lambda t: {"function": t}, LONG), max_size=2),
                    "more": LONG,
                },
            ),
            max_size=3,
        )
    },
    optional={
        "model": st.sampled_from(["m", "m" * 40, 7]),
        "tools": st.lists(st.builds(lambda t: {"name": t}, LONG), max_size=2),
        "max_tokens": st.sampled_from([5, 0, "5", None, "x" * 40]),
        "cache_salt": LONG,
        "user": LONG,
        "continue_final_message": st.booleans(),
    },
)  # fmt: skip
SPOILED = st.tuples(
    st.integers(0, 10_000),
    st.sampled_from(
        [b"", b"\x01", b"\n", b"\x7f", b"\xff", b"\xc3", b"\\", b'"', b"\\ud800", b"\\q", b"\\u0001", b" "]
    ),
)


@pytest.mark.hypothesis
def test_a_large_chat_is_read_the_same_with_its_long_texts_split_off_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever else stands in it, wherever, and whatever a byte of it is changed to."""
    monkeypatch.setattr(shape, "_LONG_BYTES", 24)
    apart, counts = openai.chat_of, Counter[bool]()

    def whole(*_: object) -> None:
        return None

    def counted(*given: Any) -> Prompt | None:
        made = apart(*given)
        counts[made is not None] += 1
        return made

    def outcome_of(body: bytes, chat_of: Any) -> Any:
        monkeypatch.setattr(openai, "chat_of", chat_of)
        try:
            return bodies.read(Kind.CHAT, body, default_model=lambda: "only")
        except BodyError as error:
            return error.outcome, error.detail, error.param

    @settings(max_examples=played(600), deadline=None, derandomize=True)
    @given(
        ANY_CHAT, st.sampled_from([None, 1]), st.booleans(), st.none() | SPOILED, st.sampled_from(["x", "\u00fc", "\n"])
    )
    def check(document: Any, indent: int | None, escaped: bool, spoiled: Any, pad: str) -> None:
        document["messages"].insert(0, {"role": "user", "content": pad * 9000})
        separators = None if indent else (",", ":")
        body = json.dumps(document, indent=indent, separators=separators, ensure_ascii=escaped).encode()
        if spoiled is not None:
            at = len(body) - 1 - spoiled[0] % min(len(body), 400)
            body = body[:at] + spoiled[1] + body[at + 1 :]
        assert outcome_of(body, counted) == outcome_of(body, whole)

    check()
    assert min(counts[True], counts[False]) > sum(counts.values()) / 20


def test_a_large_chat_is_not_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.READERS, Kind.CHAT, None)  # type: ignore[arg-type]
    for text in ("x" * 200_000, "gr\u00fc\u00df " * 20_000):
        body = json.dumps({"model": "m", "messages": [user("hi"), user(text)]}, ensure_ascii=False).encode()
        assert bodies.read(Kind.CHAT, body).canonical == chat_canonical("hi", text)


@pytest.mark.parametrize("bad", [b"\n", b"\x00", b"\x1f", b"\xff", b"\xed\xa0\x80", b"\xc3", b"\\x", b"\\ud800", b"\\"])
@pytest.mark.parametrize("at", [0, 5_000, 9_999])
def test_a_fault_in_a_long_text_is_one_of_the_body(bad: bytes, at: int) -> None:
    text = b"x" * at + bad + b"x" * (10_000 - at)
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % text
    with pytest.raises(BodyError) as error:
        bodies.read(Kind.CHAT, body)
    assert error.value.outcome is outcome.INVALID_JSON
    assert bodies.read(Kind.CHAT, body.replace(bad, b"\x7f")).canonical == b"user" + FIELD + text.replace(bad, b"\x7f")


def chat_canonical(*texts: str) -> bytes:
    return ITEM.join(b"user" + FIELD + text.encode() for text in texts)


@given(st.lists(MESSAGE, min_size=1, max_size=3), TOOLS, st.lists(MESSAGE, min_size=1, max_size=3), TOOLS)
@RUN
def test_different_chats_never_collide(a: list[Any], tools_a: Any, b: list[Any], tools_b: Any) -> None:
    same = meaning(a, tools_a) == meaning(b, tools_b)
    assert (chat(a, tools=tools_a).canonical == chat(b, tools=tools_b).canonical) is same


IDS = st.lists(st.integers(0, 2**31 - 1) | st.sampled_from([0x61626364, 0, 0x7FFFFFFF]), min_size=1, max_size=3)
PROMPT = TEXT.filter(bool) | IDS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(IDS, min_size=1, max_size=3)


def listed(prompt: Any) -> list[Any]:
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


@given(PROMPT, PROMPT)
@RUN
def test_different_prompts_never_collide(a: Any, b: Any) -> None:
    same = listed(a) == listed(b)
    assert (completion(a).canonical == completion(b).canonical) is same


def test_text_token_ids_and_chats_have_distinct_canonical_forms() -> None:
    spelled = {completion([0x61626364]).canonical, completion("abcd").canonical, chat([user("abcd")]).canonical}
    assert len(spelled) == 3
    assert completion(["a", "b"]).canonical != completion(["ab"]).canonical
    tools = [{"name": "f"}]
    assert (
        chat([user("x")], tools=tools).canonical
        != chat([{"role": "tools", "content": json.dumps(tools)}, user("x")]).canonical
    )


@given(st.lists(MESSAGE, min_size=1, max_size=3), st.lists(MESSAGE, min_size=1, max_size=2), TOOLS)
@RUN
def test_the_next_turn_extends_the_text(first: list[Any], more: list[Any], tools: Any) -> None:
    assert chat([*first, *more], tools=tools).canonical.startswith(chat(first, tools=tools).canonical)


@given(IDS, IDS)
@RUN
def test_more_tokens_extend_the_text(first: list[int], more: list[int]) -> None:
    assert completion([*first, *more]).canonical.startswith(completion(first).canonical)


def test_media_are_hashed_and_counted() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "B" * 5000}}
    text = {"type": "text", "text": "what is this?"}
    prompt = chat([user([text, image])])
    assert prompt.opaque_bytes > 5000
    assert len(prompt.canonical) < 100
    assert b"what is this?" in prompt.canonical
    assert prompt.canonical != chat([user([text, other])]).canonical
    turned = {"image_url": {"url": image["image_url"]["url"]}, "type": "image_url"}
    assert prompt.canonical == chat([user([text, turned])]).canonical


def test_a_part_that_has_text_beside_its_media_is_not_text() -> None:
    odd = {"type": "image_url", "image_url": "data:,x", "text": "hi"}
    assert chat([user([odd])]).canonical != chat([user("hi")]).canonical


CHAT = {"model": "m", "messages": [user("x")]}
BAD: list[tuple[Kind, Any, str | None]] = [
    (Kind.CHAT, {**CHAT, "model": 5}, "model"),
    (Kind.CHAT, {"messages": [user("x")]}, "model"),
    (Kind.CHAT, {"model": "m"}, "messages"),
    (Kind.CHAT, {**CHAT, "messages": []}, "messages"),
    (Kind.CHAT, {**CHAT, "messages": "x"}, "messages"),
    (Kind.CHAT, {**CHAT, "messages": [{"content": "x"}]}, "messages[0].role"),
    (Kind.CHAT, {**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (Kind.CHAT, {**CHAT, "messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (Kind.CHAT, {**CHAT, "stream": "maybe"}, "stream"),
    (Kind.CHAT, {**CHAT, "stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
    (Kind.CHAT, {**CHAT, "max_tokens": -2}, "max_tokens"),
    (Kind.CHAT, {**CHAT, "max_tokens": 1.5}, "max_tokens"),
    (Kind.CHAT, {**CHAT, "max_completion_tokens": -2}, "max_completion_tokens"),
    (Kind.CHAT, {**CHAT, "tools": "x"}, "tools"),
    (Kind.CHAT, {**CHAT, "cache_salt": 7}, "cache_salt"),
    (Kind.CHAT, [], None),
    (Kind.COMPLETION, {"model": "m"}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": ""}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": []}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": 7}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": [1, "a"]}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": [-1]}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": [2**31]}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": [True]}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": ["a", None]}, "prompt"),
    (Kind.COMPLETION, {"model": "m", "prompt": [[1], 2]}, "prompt"),
]


@pytest.mark.parametrize(("kind", "body", "param"), BAD)
def test_a_bad_field_is_named(kind: Kind, body: Any, param: str | None) -> None:
    with pytest.raises(BodyError) as caught:
        bodies.read(kind, json.dumps(body).encode())
    assert caught.value.outcome is outcome.INVALID_FIELD
    assert caught.value.param == param
    if param:
        assert param.split(".")[-1].rstrip("[0]") in caught.value.detail


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model":"m","messages":[{"role":"user"}]} x',
        b"\xef\xbb\xbf{}",
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b'{"model":"m","tools":' + b"[" * 5000,
        b'{"model":"m","tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        bodies.read(Kind.CHAT, body)
    assert caught.value.outcome is outcome.INVALID_JSON
    assert caught.value.param is None


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@RUN
def test_no_body_breaks_the_reader(body: bytes) -> None:
    for kind in (Kind.CHAT, Kind.COMPLETION):
        with pytest.raises(BodyError):
            bodies.read(kind, body)


def sent_on(body: bytes, salt: str = "") -> bytes:
    """A completion's body as it is sent on."""
    return openai.change(body, bodies.read(Kind.COMPLETION, body), salt).of(body)


@pytest.mark.parametrize("salt", ["", "s1"])
@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("", {"include_usage": True}),
        (' , "x" : {"stream_options":1, "cache_salt":2}', {"include_usage": True}),
        (',"stream_options":null', {"include_usage": True}),
        (',"stream_options":{"include_usage":false,"x":[1]}', {"include_usage": True, "x": [1]}),
        (',"stream\\u005foptions":{"x":1}', {"include_usage": True, "x": 1}),
        (',"cache_salt":null', {"include_usage": True}),
        (',"cache_salt":"theirs"', {"include_usage": True}),
        (',"cache\\u005fsalt":"theirs","stream_options":{}', {"include_usage": True}),
    ],
)
@pytest.mark.parametrize("begin", [" { ", "{"])
def test_usage_and_salt_are_set_and_nothing_else_is_changed(
    begin: str, more: str, options: dict[str, Any], salt: str
) -> None:
    body = begin + '"model":"m","prompt":"\\u0041 \\"cache_salt\\"","stream":true' + more + "}"
    before = json.loads(body)
    after = json.loads(sent_on(body.encode(), salt), object_pairs_hook=_once)
    assert after.pop("stream_options") == options
    if salt:
        assert after.pop("cache_salt") == salt
        before.pop("cache_salt", None)
    before.pop("stream_options", None)
    assert after == before


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(members)) == len(members), members
    return dict(members)


def test_a_body_that_needs_no_change_is_not_copied() -> None:
    for body in (
        b'{"model":"m","prompt":"x"}',
        b'{"model":"m","prompt":"x","stream":true,"stream_options":{"include_usage":true}}',
    ):
        assert sent_on(body) is body


@pytest.mark.parametrize("null", ["", ',"model":null', ',"mod\\u0065l":null'])
def test_a_model_that_is_not_named_is_named_once(null: str) -> None:
    body = ('{"prompt":"x"' + null + "}").encode()
    prompt = bodies.read(Kind.COMPLETION, body, default_model=lambda: "m")
    onward = openai.change(body, prompt, "").of(body)
    assert json.loads(onward, object_pairs_hook=_once) == {"prompt": "x", "model": "m"}


def test_numbers_stay_as_they_were_written() -> None:
    body = (
        b'{"model":"m","prompt":"x","stream":true,"seed":123456789012345678901234567890,"temperature":0.10,'
        b'"stream_options":{}}'
    )
    assert b'"seed":123456789012345678901234567890,"temperature":0.10' in sent_on(body)


@pytest.mark.parametrize(
    ("document", "usage"),
    [
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}', Usage(3, 4, None)),
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":null}}', Usage(3, 0, None)),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}', Usage(3, 0, 2)),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}', Usage(3, 0, None)),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}', Usage(3, 0, None)),
        (b'{"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}', Usage(3, 0, None)),
        (b'{"usage":{"total_tokens":3}}', Usage(3, 0, None)),
        (b'{"usage":{"total_tokens":3,"completion_tokens":1}}', Usage(2, 1, None)),
        (b'{"usage":{"total_tokens":3,"completion_tokens":4}}', None),
        (b'{"usage":{"type":"tokens","input_tokens":5,"output_tokens":6,"total_tokens":11}}', Usage(5, 6, None)),
        (b'{"usage":{"type":"duration","seconds":9}}', None),
        (b'{"usage":{"prompt_tokens":-1}}', None),
        (b'{"usage":{"prompt_tokens":99999999999999}}', None),
        (b'{"usage":{"prompt_tokens":1,"completion_tokens":-1}}', None),
        (b'{"usage":{"prompt_tokens":"x"}}', None),
        (b'{"usage":null}', None),
        (b"{}", None),
        (b"[DONE]", None),
        (b"\xff", None),
    ],
)
def test_only_plausible_usage_counts(document: bytes, usage: Usage | None) -> None:
    assert openai.usage_of(document) == usage


def embeddings(**fields: Any) -> Prompt:
    return bodies.read(Kind.EMBEDDINGS, json.dumps({"model": "m", **fields}).encode())


def test_an_embeddings_input_is_spelled_as_the_prompt_it_is() -> None:
    for prompt in ("abc", ["a", "b"], [1, 2], [[1], [2, 3]]):
        assert embeddings(input=prompt).canonical == completion(prompt).canonical
    assert embeddings(messages=[user("hi")]).canonical == chat([user("hi")]).canonical
    assert embeddings(messages=[user("hi")], input=None).canonical == chat([user("hi")]).canonical
    with pytest.raises(BodyError, match="`input` and `messages`"):  # of both, engines read the one or the other
        embeddings(messages=[user("hi")], input="a long text")
    made = embeddings(input="x", stream=True, max_tokens=7, cache_salt="s")
    assert (made.stream, made.hide_usage, made.max_tokens, made.cache_salt) == (False, False, NO_OUTPUT, "s")


def test_embeddings_do_not_change_the_estimate_of_output_tokens() -> None:
    usage = openai.usage_of(b'{"usage":{"prompt_tokens":100,"total_tokens":100,"completion_tokens":0}}')
    assert usage is not None
    estimates = Estimates()
    estimates.learn("t", "m", 300, usage)
    assert estimates.output_tokens("t", "m", None) == OUTPUT_TOKENS
    assert estimates.bytes_per_token("m") < BYTES_PER_TOKEN
    assert estimates.output_tokens("t", "m", embeddings(input="x").max_tokens) == 1.0, "the least an estimate can be"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [None]}, "input"),
        ({"input": {}}, "input"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"input": "x", "model": 5}, "model"),
    ],
)
def test_a_bad_field_of_embeddings_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BodyError) as caught:
        embeddings(**fields)
    assert caught.value.param == param
    assert param.split(".")[-1] in caught.value.detail


@pytest.mark.parametrize(
    ("prompt", "more", "divisible"),
    [
        ("x", {}, True),
        ([1, 2], {}, True),
        (["x"], {"n": 1}, True),
        ([[1, 2]], {"n": None}, True),
        (["x", "y"], {}, False),
        ([[1], [2]], {}, False),
        ("x", {"n": 2}, False),
        ("x", {"n": "2"}, False),  # the engine decides that, and its answer is passed on
        ("x", {"echo": False}, True),
        ("x", {"prompt_logprobs": 0}, False),  # the tier that computes the prompt reports its tokens
    ],
)
def test_one_prompt_and_one_answer_can_be_divided(prompt: Any, more: dict[str, Any], divisible: bool) -> None:
    assert completion(prompt, **more).divisible is divisible
    assert chat([user("hi")], **more).divisible is (more.get("n") in (None, 1) and "prompt_logprobs" not in more)
    assert not completion(prompt, **{**more, "echo": True}).divisible


@given(st.lists(MESSAGE, min_size=1, max_size=3), TEXT, st.lists(MESSAGE, max_size=2), st.data())
@RUN
def test_next_turn_of_a_chat_extends_prompt_and_answer(
    messages: list[Any], answer: str, more: list[Any], data: Any
) -> None:
    """Whether the answer is a message of its own or the end of the last one, and whatever it has beside its text."""
    goes_on = data.draw(st.booleans())
    asked = chat(messages, continue_final_message=goes_on, add_generation_prompt=not goes_on)
    if asked.answer is None:
        assert goes_on
        return
    if goes_on:
        found = [{**messages[-1], "content": messages[-1]["content"] + answer}]
        turn = [*messages[:-1], *found, *more]
    else:
        calls = data.draw(st.sampled_from([{}, {"tool_calls": [{"id": "1"}]}, {"name": "n"}]))
        turn = [*messages, {"role": "assistant", "content": answer, **calls}, *more]
    assert asked.answer.key == "content"
    assert chat(turn).canonical.startswith(asked.canonical + asked.answer.opening + answer.encode())


@given(TEXT.filter(bool), TEXT, TEXT)
@RUN
def test_next_turn_of_a_completion_extends_prompt_and_answer(prompt: str, answer: str, more: str) -> None:
    for asked in (completion(prompt), completion([prompt])):
        assert asked.answer == openai.AnswerText("text", b"")
        assert completion(prompt + answer + more).canonical.startswith(asked.canonical + answer.encode())


def test_requests_whose_answer_cannot_extend_the_prefix_are_not_recorded() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    for one in (chat([user("a")]), chat([user("a")], n=1), chat([parts]), completion("a")):
        assert one.answer is not None
    for unheard in (
        chat([user("a")], n=2),
        chat([user("a")], prompt_logprobs=1),
        chat([parts], continue_final_message=True),
        chat([{"role": "assistant", "content": "a", "name": "b"}], continue_final_message=True),
        completion("a", echo=True),
        completion(["a", "b"]),
        completion([1, 2]),
        completion([[1, 2]]),
        bodies.read(Kind.EMBEDDINGS, b'{"model":"m","input":"a"}'),
    ):
        assert unheard.answer is None
