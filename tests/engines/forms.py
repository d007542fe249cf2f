"""Bodies in forms that an API does not have, and some reader takes all the same: byte for byte, by name.

Each is a chat or a completion that would be plain but for one thing. LIMIT bounds what has no limit of its own.
"""

from __future__ import annotations

import json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_USER = '[{"role":"user","content":"hello there"}]'
_HEAD = '"model":"tiny","temperature":0.0,"seed":1'
_STOPS = '"stop":["a","e","i","o","u","n","r","s","t"," "]'  # for engines whose answer would have no end


def chat(more: str, messages: str = _USER, head: str = _HEAD) -> tuple[str, bytes]:
    """A chat with this beside its messages."""
    return CHAT, ("{" + ",".join(part for part in (head, f'"messages":{messages}', more) if part) + "}").encode()


def text(more: str) -> tuple[str, bytes]:
    """A completion that says no more than this."""
    return TEXT, ("{" + ",".join((_HEAD, more)) + "}").encode()


_FOUR = '"max_tokens":4'
_COUNTS = ["6.0", '"6"', '"6.0"', '" 6 "', "true", "false", "6.5", '"6.5"', '"six"', "[]", "{}", "null", "1e1"]
_COUNTS += ["-2", "-1", "0", "1" + "0" * 30]
_TRUTHS = ["1", "0", "1.0", '"true"', '"false"', '"on"', '"TRUE"', '"x"', "2", "[]", "null"]
_SURROGATE = '"\\ud800"'

FORMS: dict[str, tuple[str, bytes]] = {
    **{f"max_tokens {one}": chat(f'"max_tokens":{one},{_STOPS}') for one in _COUNTS},
    **{
        f"max_completion_tokens {one}": chat(f'"max_completion_tokens":{one},{_STOPS}')
        for one in ("6.0", '"6"', "-1", "0")
    },
    **{f"both limits {one}": chat(f'"max_completion_tokens":{one},"max_tokens":3') for one in ("null", "6", '"6"')},
    **{f"stream {one}": chat(f'"stream":{one},{_FOUR}') for one in _TRUTHS},
    **{
        f"include_usage {one}": chat(f'"stream":true,"stream_options":{{"include_usage":{one}}},{_FOUR}')
        for one in _TRUTHS
    },
    **{
        f"stream_options {one}": chat(f'"stream":true,"stream_options":{one},{_FOUR}')
        for one in ("{}", "null", "[]", "1")
    },
    "options without a stream": chat(f'"stream_options":{{"include_usage":true}},{_FOUR}'),
    **{f"n {one}": chat(f'"n":{one},{_FOUR}') for one in ('"2"', "2.0", "true", "0", "null", "2.5", "[]", "-1")},
    **{
        f"n_predict {one}": chat(f'"n_predict":{one},"max_tokens":4,{_STOPS}')
        for one in ("2", "6", '"2"', "2.0", "0", "null")
    },
    **{f"n_cmpl {one}": chat(f'"n_cmpl":{one},{_FOUR}') for one in ("2", '"2"', "null")},
    **{
        f"temperature {one}": chat(f'"temperature":{one},{_FOUR}', head='"model":"tiny","seed":1')
        for one in ('"0"', "false", "NaN", "-Infinity", "1e400", "-0.0")
    },
    **{f"top_p {one}": chat(f'"top_p":{one},{_FOUR}') for one in ('"1"', "true", "null", "1")},
    **{
        f"stop {one}": chat(f'"stop":{one},{_FOUR}')
        for one in ('""', "[]", '[""]', "null", "5", '["zz",null]', _SURROGATE)
    },
    **{
        f"seed {one}": chat(f'"seed":{one},{_FOUR}', head='"model":"tiny","temperature":0.0')
        for one in ("-1", '"1"', "1.0", "9223372036854775808", "1" + "0" * 30, "true")
    },
    "max_tokens twice": chat('"max_tokens":2,"max_tokens":4'),
    "a key twice in a message": chat(_FOUR, '[{"role":"user","content":"x","content":"hello there"}]'),
    "an escaped key": chat('"max_token\\u0073":3'),
    "a mark of UTF-8 before": (CHAT, b"\xef\xbb\xbf" + chat(_FOUR)[1]),
    "UTF-16": (CHAT, chat(_FOUR)[1].decode().encode("utf-16")),
    "blanks around": (CHAT, b" \t\r\n" + chat(_FOUR)[1] + b" \r\n"),
    "a zero byte behind": (CHAT, chat(_FOUR)[1] + b"\0"),
    "more behind": (CHAT, chat(_FOUR)[1] + b"{}"),
    "a comma too many": (CHAT, chat(_FOUR)[1].replace(b"}", b",}")),
    "a comment": (CHAT, b"/* */" + chat(_FOUR)[1]),
    "bytes that are no UTF-8": (CHAT, chat(_FOUR)[1].replace(b"hello", b"hel\xfflo")),
    "a control character": (CHAT, chat(_FOUR)[1].replace(b"hello", b"hel\x01lo")),
    "half a surrogate pair": chat(_FOUR, f'[{{"role":"user","content":{_SURROGATE}}}]'),
    "half a pair in what nobody reads": chat(f'"metadata":{{"a":{_SURROGATE}}},{_FOUR}'),
    **{
        f"nested {deep} deep": chat(f'"metadata":{{"a":{"[" * deep}{"]" * deep}}},{_FOUR}') for deep in (100, 900, 3000)
    },
    **{
        f"content {one}": chat(_FOUR, f'[{{"role":"user","content":{one}}}]')
        for one in (
            "null",
            "[]",
            '""',
            "5",
            '["hello"]',
            '[{"type":"text"}]',
            '[{"type":"text","text":null}]',
            "{}",
            '[{"text":"hello"}]',
            '[["hello"]]',
            '[{"type":"input_text","text":"hello"}]',
            "[null]",
        )
    },
    "no content": chat(_FOUR, '[{"role":"user"}]'),
    "no role": chat(_FOUR, '[{"content":"hello"}]'),
    "role 5": chat(_FOUR, '[{"role":5,"content":"hello"}]'),
    "a name that is null": chat(_FOUR, '[{"role":"user","content":"hello","name":null}]'),
    "a name that is 5": chat(_FOUR, '[{"role":"user","content":"hello","name":5}]'),
    "calls that are null": chat(
        _FOUR, '[{"role":"user","content":"a"},{"role":"assistant","content":"b","tool_calls":null}]'
    ),
    **{f"messages {one}": chat(_FOUR, one) for one in ("[]", "null", "{}", '"hello"', "[null]", '["hello"]')},
    **{f"model {one}": chat(_FOUR, head=f'"model":{one},"temperature":0.0') for one in ("null", '""', "5")},
    "no model": chat(_FOUR, head='"temperature":0.0'),
    **{f"tools {one}": chat(f'"tools":{one},{_FOUR}') for one in ("null", "{}", "[]")},
    **{f"echo {one}": chat(f'"echo":{one},{_FOUR}') for one in ('"false"', "0", '"x"', "null")},
    **{
        f"continue_final_message {one}": chat(f'"continue_final_message":{one},{_FOUR}')
        for one in ('"false"', "0", "null")
    },
    **{f"user {one}": chat(f'"user":{one},{_FOUR}') for one in ("null", "5")},
    **{f"cache_salt {one}": chat(f'"cache_salt":{one},{_FOUR}') for one in ("null", '""', "5", '"a"')},
    **{
        f"prompt {one}": text(f'"prompt":{one},{_FOUR}')
        for one in (
            '""',
            "[]",
            '[""]',
            "null",
            "5",
            '["a",5]',
            "[[]]",
            "[-1]",
            "[1.0]",
            '["11"]',
            "[[11,12],[13]]",
            '["a",[11]]',
            "[11,12]",
            "true",
        )
    },
    **{
        f"completion, max_tokens {one}": text(f'"prompt":"hello","max_tokens":{one},{_STOPS}')
        for one in ('"6"', "6.0", "0", "-1", "null")
    },
    "completion without a limit": text(f'"prompt":"hello",{_STOPS}'),
    **{
        f"completion, echo {one}": text(f'"prompt":"hello","echo":{one},{_FOUR}')
        for one in ('"true"', "1", '"false"', '"x"')
    },
    **{
        f"completion, echo {one}, no output": text(f'"prompt":"hello","echo":{one},"max_tokens":0')
        for one in ("true", '"true"', "1")
    },
    **{f"completion, stream {one}": text(f'"prompt":"hello","stream":{one},{_FOUR}') for one in ("1", '"true"', "0")},
    "a list": (CHAT, b"[]"),
    "a text": (CHAT, b'"hello"'),
    "nothing": (CHAT, b""),
    "a number as text": (CHAT, json.dumps("5").encode()),
}
