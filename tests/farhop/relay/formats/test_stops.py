"""Stop strings of a stream that breaks anywhere, compared with the unbroken stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop.relay.formats.stops import Stops, named


def stop_in(message: str, new: int, texts: tuple[str, ...]) -> tuple[str, int] | None:
    """vLLM's check_stop_strings: the stop string and where its end is."""
    for text in texts if new else ():
        at = message.find(text, max(0, len(message) - new + 1 - len(text)))
        if at >= 0:
            return text, at + len(text)
    return None


def event(text: str, ends: str | None, by: str | None, *, chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
    choice |= {"logprobs": None, "finish_reason": ends}
    if ends is not None or not chat:
        choice["stop_reason"] = by
    return b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n"


class Engine:
    """Knows what it said itself, and nothing of what came before."""

    def __init__(self, texts: tuple[str, ...], least: int) -> None:
        self._texts, self._least, self._text = texts, least, ""

    def says(self, piece: str, at: int, last: int) -> tuple[str, str | None, str | None]:
        """Its text for a token, why it ends, and by which stop string."""
        before, self._text = len(self._text), self._text + piece
        found = stop_in(self._text, len(piece), self._texts) if at + 1 > self._least else None
        if found is not None:
            return self._text[before : found[1]], "stop", found[0]
        return piece, "length" if at == last else None, None


def client(
    tokens: list[str], texts: tuple[str, ...], seams: set[int], least: int, *, hides: bool, chat: bool
) -> tuple[str, str | None, str | None]:
    """What a client has in the end of a stream that broke before these tokens: text, end, stop string."""
    stops, engine, found = Stops(texts, hides=hides), Engine(texts, least), ""
    for at, piece in enumerate(tokens):
        if at in seams:
            stops.break_off(may_stop=at > least)
            engine = Engine(texts, least)
        result = event(*engine.says(piece, at, len(tokens) - 1), chat=chat)
        passed = stops.visible(stops.apply(result, may_stop=at + 1 > least))
        choice = msgspec.json.decode(passed[6:])["choices"][0]
        found += choice["delta"]["content"] if chat else choice["text"]
        if choice["finish_reason"] is not None:
            assert not stops.ended or stops.apply(result, may_stop=True) == b"", "behind its end there is nothing"
            return found, choice["finish_reason"], choice.get("stop_reason")
    raise AssertionError("it did not end")


WORDS = st.sampled_from(("a", "b", "ab", "", "🌊", "é", '"', "\\", "e\u0301", "ba🌊", "\n"))
TEXTS = st.text(alphabet='ab🌊é"\\', min_size=1, max_size=5)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(WORDS, min_size=1, max_size=14), st.lists(TEXTS, min_size=1, max_size=3), st.sets(st.integers(1, 13)),
    st.integers(0, 6), st.booleans(), st.booleans(),
)  # fmt: skip
def test_wherever_it_breaks_a_client_has_what_a_whole_stream_gives(
    tokens: list[str], texts: list[str], seams: set[int], least: int, hides: bool, chat: bool
) -> None:
    engine, whole, ends = Engine(tuple(texts), least), "", (None, None)
    for at, piece in enumerate(tokens):
        text, *end = engine.says(piece, at, len(tokens) - 1)
        whole, ends = whole + text, (end[0], end[1])
        if ends[0] is not None:
            break
    if hides and ends[1] is not None:
        whole = whole.removesuffix(ends[1])
    assert client(tokens, tuple(texts), seams, least, hides=hides, chat=chat) == (whole, *ends)


def test_text_that_could_begin_a_stop_string_is_held_back_until_it_is_certain() -> None:
    stops = Stops(("abcd",), hides=True)
    shown = [
        msgspec.json.decode(stops.visible(event(piece, None, None, chat=False))[6:]) for piece in ("xab", "c", "e")
    ]
    assert [one["choices"][0]["text"] for one in shown] == ["", "x", "a"]


def test_held_back_text_is_sent_with_an_end_event_without_text() -> None:
    stops = Stops(("abcd",), hides=True)
    stops.visible(event("xab", None, None, chat=True))
    mute = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":null}]}\n\n'
    assert msgspec.json.decode(stops.visible(mute)[6:])["choices"][0]["delta"] == {"content": "xab"}


NULLS = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}


def shown_before(end: dict[str, Any], pieces: tuple[str, ...], texts: tuple[str, ...], why: str, by: str | None) -> str:
    """What a client has of these pieces from an engine whose end is an event of its own, with this delta or text, as
    SGLang's."""
    stops, found = Stops(texts, hides=True), ""
    choices = [{"delta": NULLS | {"content": piece}, "finish_reason": None} for piece in pieces]
    if "text" in end:
        choices = [{"text": piece, "finish_reason": None} for piece in pieces]
    for choice in (*choices, {**end, "finish_reason": why, "matched_stop": by}):
        made = b"data: " + msgspec.json.encode({"id": "x", "choices": [{"index": 0, **choice}]}) + b"\n\n"
        passed = msgspec.json.decode(stops.visible(stops.apply(made, may_stop=True))[6:])["choices"][0]
        found += passed.get("delta", passed).get("content" if "delta" in passed else "text") or ""
    return found


MUTE = pytest.mark.parametrize(
    "end", [{"delta": NULLS}, {"delta": {}}, {"delta": {"role": "assistant"}}, {"text": ""}, {"text": None}]
)


@MUTE
@pytest.mark.parametrize("why", ["stop", "length"])
def test_no_text_is_lost_where_an_engines_end_is_an_event_of_its_own(end: dict[str, Any], why: str) -> None:
    assert shown_before(end, ("hello", " wor", "ld"), ("END", "###"), why, None) == "hello world"


@MUTE
@pytest.mark.parametrize("last", ["END", "END.", "ND", "END\n\nEN"])
def test_a_stop_string_stays_hidden_where_an_engines_end_is_an_event_of_its_own(end: dict[str, Any], last: str) -> None:
    """Older SGLangs do not cut off what a token has behind it."""
    pieces = ("hello", " E", last) if last == "ND" else ("hello ", last)
    assert shown_before(end, pieces, ("###", "END"), "stop", "END") == "hello "


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(WORDS, min_size=1, max_size=14), st.lists(TEXTS, min_size=1, max_size=3), st.sets(st.integers(1, 14)),
    st.integers(0, 6), st.booleans(),
)  # fmt: skip
def test_wherever_it_breaks_before_an_end_of_its_own_nothing_is_lost_or_shown(
    tokens: list[str], texts: list[str], seams: set[int], least: int, hides: bool
) -> None:
    """A stream may break between the text of a stop string and the event that says so."""
    engine, whole, by = Engine(tuple(texts), least), "", None
    for at, token in enumerate(tokens):
        text, _, by = engine.says(token, at, len(tokens))
        whole += text
        if by is not None:
            break
    if hides and by is not None:
        whole = whole.removesuffix(by)
    stops, engine, sent = Stops(tuple(texts), hides=hides), Engine(tuple(texts), least), list[bytes]()
    for at, token in enumerate([*tokens, " more"]):
        if at in seams:
            stops.break_off(may_stop=at > least)
            engine = Engine(tuple(texts), least)
        text, why, ended_by = engine.says(token, at, len(tokens) + 1)
        sent.append(stops.visible(stops.apply(event(text, None, None, chat=True), may_stop=at + 1 > least)))
        if stops.ended:
            break
        if at == len(tokens) or (at + 1 not in seams and (why is not None or at + 1 == len(tokens))):
            end = event("", why or "length", ended_by, chat=True).replace(b'{"content":""}', b'{"content":null}')
            sent.append(stops.visible(stops.apply(end, may_stop=True)))
            break
    found = "".join(msgspec.json.decode(one[6:])["choices"][0]["delta"]["content"] or "" for one in sent)
    assert found == whole or (by is None and found == whole + " more")


def test_an_end_that_broke_off_is_told_by_whatever_comes_next() -> None:
    """Its engine had ended by the stop string; only the event that says so is missing, and the next engine starts anew.
    Another seam, before any text, changes nothing."""
    for comes, breaks in (("", 1), (" more", 1), (" more", 2)):
        stops = Stops(("END",), hides=True)
        passed = [stops.visible(stops.apply(event("an END", None, None, chat=True), may_stop=True))]
        for _ in range(breaks):
            stops.break_off(may_stop=True)
            passed.append(stops.visible(stops.apply(event("", None, None, chat=True), may_stop=True)))
        last = event(comes, "length", None, chat=True)
        last = last if comes else last.replace(b'{"content":""}', b'{"content":null}')
        passed.append(stops.visible(stops.apply(last, may_stop=True)))
        choices = [msgspec.json.decode(one[6:])["choices"][0] for one in passed]
        assert "".join(choice["delta"]["content"] or "" for choice in choices) == "an "
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "END")


def test_an_engine_that_went_on_behind_a_stop_string_had_not_ended_by_it() -> None:
    stops = Stops(("END",), hides=True)
    shown = [stops.visible(stops.apply(event(text, None, None, chat=True), may_stop=True)) for text in ("an END", "")]
    stops.break_off(may_stop=True)
    shown.append(stops.visible(stops.apply(event(" and more", "length", None, chat=True), may_stop=True)))
    choices = [msgspec.json.decode(one[6:])["choices"][0] for one in shown]
    assert ("".join(choice["delta"]["content"] for choice in choices), choices[-1]["finish_reason"]) == (
        "an END and more", "length",
    )  # fmt: skip


def test_a_stop_string_that_ended_nothing_is_shown() -> None:
    """Of fewer tokens than the client wants at least."""
    end = {"delta": NULLS}
    assert shown_before(end, ("an END", "", " and", " END"), ("END",), "stop", "END") == "an END and "
    assert shown_before(end, ("an END", " and", " so on"), ("END",), "length", None) == "an END and so on"
    assert shown_before(end, ("a", "a", "a"), ("a",), "stop", "a") == "aa"


def test_stop_may_be_a_string_a_list_or_absent() -> None:
    assert [named(text) for text in (b'"a"', b'["a","b"]', b"[]", b"null", b'""')] == [
        ("a",), ("a", "b"), (), (), (),
    ]  # fmt: skip
