"""A client of the anycast drills, run inside a namespace: opens streams, and tells a line of JSON of each event.

`anycast_client.py COUNT URL KEY MODEL TOKENS [FROM [again]]`. Redirects are followed, the credentials left behind, as
clients do. FROM: the address to connect from, "" for any. `again`: what broke is asked once more, from its beginning.
"""

import asyncio
import json
import sys
from urllib.parse import urlsplit


def tell(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def stream(n: int, url: str, key: str, body: bytes, of: str, hops: int = 0, **known_of: object) -> bool:
    """Whether it came whole."""
    parts, writer = urlsplit(url), None
    site, chunks, tail = "", 0, b""
    local = (of, 0) if of else None
    try:
        connecting = asyncio.open_connection(parts.hostname, parts.port, local_addr=local)
        reader, writer = await asyncio.wait_for(connecting, 60.0)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        head = f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        known = f"authorization: Bearer {key}\r\n" if hops == 0 else ""
        writer.write(f"{head}{known}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        found = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(found.split()[1])
        headers = dict(line.lower().split(": ", 1) for line in found.split("\r\n")[1:] if ": " in line)
        if status == 307 and hops < 3:
            location = next(
                line.split(": ", 1)[1] for line in found.split("\r\n") if line.lower().startswith("location: ")
            )
            tell(n=n, event="redirected", to=urlsplit(location).netloc)
            return await stream(n, location, key, body, of, hops + 1)
        site = headers.get("x-farhop-region", "")
        tell(n=n, event="begun", status=status, site=site)
        while piece := await reader.read(65536):
            chunks, tail = chunks + 1, (tail + piece)[-200:]
        whole = b"[DONE]" in tail and status == 200
        tell(n=n, event="ended", whole=whole, chunks=chunks, site=site, status=status, **known_of)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        tell(n=n, event="ended", whole=False, chunks=chunks, site=site, error=type(error).__name__, **known_of)
        whole = False
    finally:
        if writer is not None:
            writer.close()
    return whole


async def asked(n: int, url: str, key: str, body: bytes, of: str, again: bool) -> None:
    if not await stream(n, url, key, body, of) and again:
        await stream(n, url, key, body, of, again=True)


async def main() -> None:
    count, url, key, model, tokens, of, again = (*sys.argv[1:], "", "")[:7]
    prompt = [{"role": "user", "content": "count the waves"}]
    request = {
        "model": model,
        "messages": prompt,
        "max_tokens": int(tokens),
        "stream": int(tokens) > 8,
        "ignore_eos": True,
    }  # exactly that length, whatever the model draws
    body = json.dumps(request).encode()
    await asyncio.gather(*(asked(n, url, key, body, of, bool(again)) for n in range(int(count))))


asyncio.run(main())
