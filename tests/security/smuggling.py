"""A corpus of request smuggling: what two servers in a row might take for one request and for two.

Each case is the bytes of one connection, and the requests that a strict reader finds in them (RFC 9112), by the marks
in their bodies. Of nearly all that is none: what is not exactly HTTP/1.1 is refused and nothing behind it is read.
Marks are of one length for all cases, so that they do not change what lengths say. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tests.farhop.relay.http.test_connection import MALFORMED

PATH = b"/v1/chat/completions"
MARK = b"#000#"
OUTER, INNER = "outer", "inner"
EVIL = b"evil"  # the value of every header that no engine must receive
_KEY = b"Authorization: Bearer sk-farhop-anywhere\r\n"


class Case(NamedTuple):
    """`reads`: the requests that reach an engine, in order. Every other one of the connection is smuggled.

    `surely` False: they may be refused as well, by who is asked and what else they say.
    """

    name: str
    wire: bytes
    reads: tuple[str, ...] = ()
    surely: bool = True

    def marked(self, number: int) -> bytes:
        """The wire, with the case's number in every mark."""
        return self.wire.replace(MARK, b"#%03d#" % number)


def _body(who: str) -> bytes:
    message = {"role": "user", "content": who + MARK.decode()}
    return msgspec.json.encode({"model": "llama-3.1-8b", "messages": [message], "max_tokens": 1})


def _head(framing: bytes = b"", line: bytes = b"POST " + PATH + b" HTTP/1.1", host: bytes = b"Host: a\r\n") -> bytes:
    return line + b"\r\n" + host + _KEY + b"Content-Type: application/json\r\n" + framing + b"\r\n"


def _post(who: str, more: bytes = b"", **head: bytes) -> bytes:
    body = _body(who)
    return _head(b"Content-Length: %d\r\n" % len(body) + more, **head) + body


_HIDDEN = _post(INNER)
_TAIL = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_body(OUTER)), _body(OUTER))

_CODINGS = (
    b"Transfer-Encoding: chunked", b"transfer-encoding: CHUNKED", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\tchunked", b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding:\x0cchunked",
    b"Transfer-Encoding:\xa0chunked", b" Transfer-Encoding: chunked", b"Transfer-Encoding\t: chunked",
    b"X: x\nTransfer-Encoding: chunked", b"X: x\rTransfer-Encoding: chunked", b"\rTransfer-Encoding: chunked",
    b"\nTransfer-Encoding: chunked", b"Transfer-Encoding:\r\n chunked", b"Transfer-Encoding\r\n : chunked",
    b"Transfer-Encoding: xchunked", b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x", b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked;q=1", b'Transfer-Encoding: "chunked"',
    b"Transfer-Encoding: chunked,", b"Transfer-Encoding: ,chunked", b"Transfer-Encoding:", b"Transfer-Encoding: cow",
    b"Transfer-Encoding: chunked\x00", b"Transfer\x00-Encoding: chunked", b"Transfer-Encoding: chun\xffked",
    b"Transfer-Encoding: chunked\r\n\tx", b"Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked",
)  # fmt: skip
_LENGTHS = (
    b"Content-Length: +%d", b"Content-Length: -%d", b"Content-Length: 0x%x", b"Content-Length: %d, %d",
    b"Content-Length: %d\r\nContent-Length: %d", b"Content-Length: 0\r\nContent-Length: %d",
    b"Content-Length: %d\r\nContent-Length: 0", b"Content-Length: %d 0", b"Content-Length: %d,",
    b"Content-Length: %d.0", b"Content-Length: %de0", b"Content-Length: '%d'", b"Content-Length: 1_%d",
    b"Content-Length: %d;",
    b"Content-Length:",
    b"Content-Length : %d", b"Content-Length\x00: %d", b"Content-Length:\x0b%d", b"Content-Length:\r\n %d",
    b" Content-Length: %d", b"X: x\nContent-Length: %d", b"Content-Length: 1844674407370955161600%d",
    b"Content-Length: \xb2%d", b"Content-Length: %d\r\n 0",
)  # fmt: skip
_SIZES = (
    b"0x%x", b"+%x", b"-%x", b" %x", b"%x ", b"%x\t", b"%xg", b"1_%x", b"FFFFFFFFFFFFFFFF0%x", b"%x\x00", b"",
    b"%x;a\nb", b"%x;a\rb", b'%x;a="\nb"', b"%x\n", b"\n%x", b"\r%x", b"%x,1",
)  # fmt: skip
_LINES = (
    b"POST " + PATH + b"  HTTP/1.1", b"POST\t" + PATH + b"\tHTTP/1.1", b" POST " + PATH + b" HTTP/1.1",
    b"POST " + PATH + b" HTTP/1.1 ", b"POST " + PATH + b" HTTP/1.1 x", b"POST " + PATH + b" HTTP/01.1",
    b"POST " + PATH + b" http/1.1", b"POST " + PATH + b" HTTP/1.1\r", b"POST " + PATH + b"\x0bHTTP/1.1",
    b"POST " + PATH, b"\nPOST " + PATH + b" HTTP/1.1", b"PO ST " + PATH + b" HTTP/1.1",
    b"POST\x00 " + PATH + b" HTTP/1.1",
    b"POST " + PATH + b" HTTP/1.1\nX: x", b"POST " + PATH + b" HTTP/2.0", b"POST " + PATH + b" HTTP/0.9",
)  # fmt: skip
_TARGETS = (
    b"http://a@b" + PATH, b"http://b#" + PATH, b"http://b\\" + PATH, b"http:" + PATH, b"http://a/http://a" + PATH,
    b"//b" + PATH, b"a:80", b"*", PATH + b"#x",
    PATH + b"/../../metrics", b"/x/.." + PATH, b"/%2e" + PATH, PATH + b"%00", PATH + b"%0d%0aX:%20x", PATH + b"/",
    PATH + b"\\", PATH + b";x", b"/\\" + PATH, b"/v1//chat/completions", b"/V1/chat/completions", PATH + b"\xe4",
    PATH + b"%20HTTP/1.1%0d%0aHost:%20b",
)  # fmt: skip
# In the form for proxies, which every server must accept; only its path is forwarded.
_ABSOLUTE = (b"http://a" + PATH, b"https://a" + PATH, b"HTTP://evil:80" + PATH, b"http://[::1]:80" + PATH)
_HOSTS = (
    b"", b"Host:\r\n", b"Host: a\r\nHost: b\r\n", b"Host: a, b\r\n", b"Host: a b\r\n", b"Host: a@b\r\n",
    b"Host: a/b\r\n",
    b"Host : a\r\n", b"Host: a\r\n b\r\n", b"Host: a:80:80\r\n", b"Host: a:x\r\n", b"Host: [::1\r\n",
    b"Host: a\x00b\r\n",
    b"Host: a?b\r\n", b"Host: a#b\r\n",
)  # fmt: skip
# Served, and nothing of them reaches an engine; or refused.
_HEADERS = (
    b"X-Forwarded-For: evil\r\nX-Forwarded-Host: evil\r\nX-Forwarded-Proto: evil\r\nForwarded: for=evil\r\n",
    b"Via: evil\r\n",
    b"X-Farhop-Tenant: evil\r\nX-Farhop-Request: evil\r\nX-Farhop-Outcome: evil\r\nx-farhop-: evil\r\n",
    b"Connection: authorization, x-a\r\nX-A: evil\r\n", b"Connection: content-length, x-a\r\nX-A: evil\r\n",
    b"Connection: host, keep-alive, x-a\r\nX-A: evil\r\nKeep-Alive: evil\r\nProxy-Connection: evil\r\n",
    b"TE: evil\r\nTrailer: evil\r\nUpgrade: evil\r\nConnection: upgrade, te\r\n",
    b"Upgrade: h2c\r\nHTTP2-Settings: evil\r\nConnection: Upgrade, HTTP2-Settings\r\n",
    b"Proxy-Authorization: evil\r\nTraceparent: evil\r\nTracestate: evil\r\n",
)  # fmt: skip
_TOKENS = (
    b"x-farhop-hop: evil\r\n", b"x-farhop-hop: v1.k1.evil.evil\r\n", b"x-farhop-pass: evil\r\n",
    b"X-Farhop-Hop: evil\r\nx-farhop-hop: evil\r\n", b"x-farhop-hop : evil\r\n", b"x-farhop-allow: evil\r\n",
    b"X: x\nx-farhop-hop: evil\r\n", b"X: x\rx-farhop-hop: evil\r\n",
    b"Connection: x-farhop-hop\r\nx-farhop-hop: evil\r\n",
    b"x\x00-farhop-hop: evil\r\n", b"x-farhop-hop:\r\n evil\r\n", b"x_farhop_hop: \x00evil\r\n",
)  # fmt: skip


def _two_ways() -> list[Case]:
    """A length and a coding, in both orders: one of the two ends the body where another request is hidden."""
    found: list[Case] = []
    for coding in _CODINGS:
        # By the length one request; by the chunks it ends at 0, and another follows.
        longer = _CHUNKS + _HIDDEN
        # By the chunks one request; by the length it ends within, and another follows.
        first = b"%x\r\n" % len(_HIDDEN)
        shorter = first + _HIDDEN + b"\r\n0\r\n\r\n"
        for name, length, body in (("CL.TE", len(longer), longer), ("TE.CL", len(first), shorter)):
            result = b"Content-Length: %d\r\n" % length
            found += (
                Case(f"{name} {coding!r}", _head(result + coding + b"\r\n") + body),
                Case(f"{name} {coding!r} first", _head(coding + b"\r\n" + result) + body),
            )
        if coding not in (*_CODINGS[:2], b"Transfer-Encoding:\tchunked", _CODINGS[-1]):  # those are chunked
            found.append(Case(f"TE.TE {coding!r}", _head(coding + b"\r\n") + longer))
            both = b"Transfer-Encoding: chunked\r\n" + coding + b"\r\n"
            found.append(Case(f"TE.TE {coding!r} again", _head(both) + longer))
    return found


def _lengths() -> list[Case]:
    body, found = _body(OUTER), list[Case]()
    for text in _LENGTHS:
        count = text.count(b"%d") + text.count(b"%x")
        whole, none = (_head(text % ((size,) * count) + b"\r\n") for size in (len(body), 0))
        found += (Case(f"length {text!r}", whole + body + _HIDDEN), Case(f"length {text!r} of 0", none + _HIDDEN))
    return found


def _chunks() -> list[Case]:
    body, head = _body(OUTER), _head(b"Transfer-Encoding: chunked\r\n")
    size, end = b"%x\r\n" % len(body), b"0\r\n\r\n"
    found = []
    for text in _SIZES:
        line = text % ((len(body),) if b"%x" in text else ())
        found.append(Case(f"chunk size {text!r}", head + line + b"\r\n" + body + b"\r\n" + end + _HIDDEN))
    odd = {
        "LF behind a size": size.replace(b"\r", b"") + body + b"\r\n" + end,
        "CR behind a size": size.replace(b"\n", b"") + body + b"\r\n" + end,
        "LF behind a chunk": size + body + b"\n" + end,
        "nothing behind a chunk": size + body + end,
        "two bytes behind a chunk": size + body + b"xx" + end,
        "a chunk longer than it says": b"1\r\n" + body + b"\r\n" + end,
        "a request behind a chunk": size + body + _HIDDEN,
        "LF at the end": size + body + b"\r\n0\n\n",
        "LF behind the last": size + body + b"\r\n0\r\n\n",
        "CR at the end": size + body + b"\r\n0\r\r",
        "a last chunk with a sign": size + body + b"\r\n-0\r\n\r\n",
        "a folded trailer": size + body + b"\r\n0\r\nX: x\r\n y\r\n\r\n",
        "a length as a trailer": size + body + b"\r\n0\r\nContent-Length: 5\r\n\r\n",
        "a coding as a trailer": size + body + b"\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "a host as a trailer": size + body + b"\r\n0\r\nHost: b\r\n\r\n",
        "a request as a trailer": size + body + b"\r\n0\r\n",
        "LF in a trailer": size + body + b"\r\n0\r\nX: x\n\r\n",
        "a trailer without a colon": size + body + b"\r\n0\r\nX\r\n\r\n",
    }
    found += [Case(f"chunks: {name}", head + wire + _HIDDEN) for name, wire in odd.items()]
    plain = {
        "an extension": b"%x;a=b\r\n" % len(body) + body + b"\r\n" + end,
        "an extension that ends like a chunk": b'%x;a="0\\r\\n\\r\\n"\r\n' % len(body) + body + b"\r\n" + end,
        "zeros": b"0000%x\r\n" % len(body) + body + b"\r\n00000\r\n\r\n",
        "a last chunk with an extension": size + body + b"\r\n0;a\r\n\r\n",
        "a trailer": size + body + b"\r\n0\r\nX-A: evil\r\nAuthorization: evil\r\nx-farhop-hop: evil\r\n\r\n",
    }
    found += [Case(f"chunks: {name}", head + wire + _HIDDEN, (OUTER, INNER)) for name, wire in plain.items()]
    return found


def _heads() -> list[Case]:
    # A refused body may be read and dropped: the bytes after it are the next request, and are not hidden in it.
    found = [Case(f"line {line!r}", _post(OUTER, line=line) + _HIDDEN) for line in _LINES]
    for target in _TARGETS:
        wire = _post(OUTER, line=b"POST " + target + b" HTTP/1.1")
        found.append(Case(f"target {target!r}", wire))
    for target in _ABSOLUTE:
        found.append(Case(f"target {target!r}", _post(OUTER, line=b"POST " + target + b" HTTP/1.1"), (OUTER,)))
        found.append(
            Case(
                f"target {target!r} without a host",
                _post(OUTER, line=b"POST " + target + b" HTTP/1.1", host=b"") + _HIDDEN,
            )
        )
    found += [Case(f"host {host!r}", _post(OUTER, host=host) + _HIDDEN) for host in _HOSTS]
    found += [Case(f"header {text!r}", _post(OUTER, text), (OUTER,)) for text in _HEADERS]
    found += [Case(f"token {text!r}", _post(OUTER, text), (OUTER,), surely=False) for text in _TOKENS]
    whole = _post(OUTER)
    found += [
        Case("bare LF", whole.replace(b"\r\n", b"\n") + _HIDDEN),
        Case("bare CR", whole.replace(b"\r\n", b"\r") + _HIDDEN),
        Case("LF at the end of the head", whole.replace(b"\r\n\r\n", b"\r\n\n") + _HIDDEN),
        Case("LF LF at the end of the head", whole.replace(b"\r\n\r\n", b"\n\n") + _HIDDEN),
        Case("a folded header", _post(OUTER, b"X: x\r\n y\r\n") + _HIDDEN),
        Case("a header folded into a length", _post(OUTER, b"X:\r\n Content-Length: 0\r\n") + _HIDDEN),
        Case("a request in a header", _post(OUTER, b"X: x\n\n" + _HIDDEN + b"\r\n")),
        Case("a first header that is folded", _head(b"").replace(b"\r\n", b"\r\n ", 1) + _HIDDEN),
        Case("a line without a colon", _post(OUTER, b"X\r\n") + _HIDDEN),
        Case("a blank name", _post(OUTER, b": x\r\n") + _HIDDEN),
    ]
    return found


def _in_turn() -> list[Case]:
    """Requests in a row, and what is dropped between them."""
    body = _body(OUTER)
    get = b"GET /v1/models HTTP/1.1"
    return [
        Case("one", _post(OUTER), (OUTER,)),
        Case("two in a row", _post(OUTER) + _HIDDEN, (OUTER, INNER)),
        Case("blank lines between", _post(OUTER) + b"\r\n\r\n" + _HIDDEN, (OUTER, INNER)),
        Case("junk between", _post(OUTER) + b"x" + _HIDDEN, (OUTER,)),
        Case("more behind the last", _post(OUTER, b"Connection: close\r\n") + _HIDDEN, (OUTER,)),
        Case("GET with a body that is a request", _head(b"Content-Length: %d\r\n" % len(_HIDDEN), line=get) + _HIDDEN),
        Case("GET with chunks that are a request", _head(b"Transfer-Encoding: chunked\r\n", line=get)
             + b"%x\r\n" % len(_HIDDEN) + _HIDDEN + b"\r\n0\r\n\r\n"),
        Case("a refused path with a request as its body",
             _head(b"Content-Length: %d\r\n" % len(_HIDDEN), line=b"POST /x HTTP/1.1") + _HIDDEN),
        Case("a request as a body", _head(b"Content-Length: %d\r\n" % len(_HIDDEN)) + _HIDDEN),
        Case("an expectation that is refused", _head(
            b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(_HIDDEN), line=b"POST /x HTTP/1.1") + _HIDDEN),
        Case("an upgrade, and a request behind it", _post(
            OUTER, b"Upgrade: websocket\r\nConnection: Upgrade\r\n") + _HIDDEN, (OUTER, INNER)),
        Case("CONNECT, and a request behind it", _head(line=b"CONNECT a:80 HTTP/1.1") + _HIDDEN),
        Case("HTTP/2, and a request behind it", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HIDDEN),
        Case("HTTP/1.0 with chunks", _head(
            b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n", line=b"POST " + PATH + b" HTTP/1.0")
            + _CHUNKS + _HIDDEN),
        Case("HTTP/1.0 without a length", _head(
            b"Connection: keep-alive\r\n", line=b"POST " + PATH + b" HTTP/1.0") + body),
        Case("a method by header", _post(OUTER, b"X-HTTP-Method-Override: GET\r\n"), (OUTER,)),
    ]  # fmt: skip


def _known() -> list[Case]:
    """What the connection's own tests have malformed, at a path that engines serve, with a key."""
    found = []
    for name, wire in MALFORMED.items():
        keyed = wire.replace(b"GET /here", b"POST " + PATH).replace(b"Host: a\r\n", b"Host: a\r\n" + _KEY, 1)
        found.append(Case(f"malformed: {name}", keyed + _HIDDEN))
    return found


def cases() -> list[Case]:
    """All of them. Behind each follows one that ends the connection, so that nothing waits for more."""
    found = _two_ways() + _lengths() + _chunks() + _heads() + _in_turn() + _known()
    return [case._replace(wire=case.wire + _TAIL) for case in found]
