"""A client of the anycast drills, run inside a namespace: opens streams, and tells a line of JSON of each event.

`anycast_client.py COUNT URL KEY MODEL TOKENS`. Redirects are followed, the credentials left behind, as clients do.
"""

import asyncio
import json
import sys
from urllib.parse import urlsplit


def tell(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def stream(n: int, url: str, key: str, body: bytes, hops: int = 0) -> None:
    parts, writer = urlsplit(url), None
    site, chunks, tail = "", 0, b""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), 10.0)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        head = f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        known = f"authorization: Bearer {key}\r\n" if hops == 0 else ""
        writer.write(f"{head}{known}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(said.split()[1])
        headers = dict(line.lower().split(": ", 1) for line in said.split("\r\n")[1:] if ": " in line)
        if status == 307 and hops < 3:
            where = next(line.split(": ", 1)[1] for line in said.split("\r\n") if line.lower().startswith("location: "))
            tell(n=n, event="redirected", to=urlsplit(where).netloc)
            await stream(n, where, key, body, hops + 1)
            return
        site = headers.get("x-farhop-region", "")
        tell(n=n, event="begun", status=status, site=site)
        while piece := await reader.read(65536):
            chunks, tail = chunks + 1, (tail + piece)[-200:]
        tell(n=n, event="ended", whole=b"[DONE]" in tail and status == 200, chunks=chunks, site=site, status=status)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        tell(n=n, event="ended", whole=False, chunks=chunks, site=site, error=type(error).__name__)
    finally:
        if writer is not None:
            writer.close()


async def main() -> None:
    count, url, key, model, tokens = sys.argv[1:6]
    prompt = [{"role": "user", "content": "count the waves"}]
    asked = {"model": model, "messages": prompt, "max_tokens": int(tokens), "stream": int(tokens) > 8}
    body = json.dumps(asked).encode()
    await asyncio.gather(*(stream(n, url, key, body) for n in range(int(count))))


asyncio.run(main())
