"""An identity provider over real HTTP: signs tokens, publishes keys and rotates them, and fails as it is told."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec

from farhop.service.authentication.issuer_keys import DOCUMENT_BYTES_MAX

AUD, NOW_S = "farhop", 1_800_000_000.0


class Provider:
    """An identity provider: it signs by the newest of its keys and publishes all; `answer` is what it does if asked."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.asked, self.answer, self.url = 0, "keys", ""
        self.rotate()

    def rotate(self, *, publish_old: bool = True) -> None:
        if not publish_old:
            self.keys.clear()
        self.keys[f"k{len(self.keys)}-{self.asked}"] = ec.generate_private_key(ec.SECP256R1())

    def token(self, now_s: float = NOW_S, **claims: Any) -> str:
        fields = {"iss": "https://idp.example/", "aud": AUD, "sub": "ann", "iat": now_s, "exp": now_s + 300, **claims}
        kid = list(self.keys)[-1]
        return jwt.encode(fields, self.keys[kid], "ES256", headers={"kid": kid})

    def document(self) -> dict[str, Any]:
        made = jwt.algorithms.ECAlgorithm.to_jwk
        return {"keys": [{**json.loads(made(key.public_key())), "kid": kid} for kid, key in self.keys.items()]}

    def config(self, **more: Any) -> dict[str, Any]:
        return {"issuer": "https://idp.example/", "audience": [AUD], "jwks_url": self.url, "algorithms": ["ES256"],
                "tenants": ["acme"], **more}  # fmt: skip

    async def _jwks(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        match self.answer:
            case "500":
                return web.Response(status=500)
            case "redirect":
                raise web.HTTPFound("/elsewhere")
            case "huge":
                return web.Response(body=b" " * (DOCUMENT_BYTES_MAX + 1))
            case "slow":
                await asyncio.sleep(60)
            case "compressed":
                body = gzip.compress(json.dumps(self.document()).encode())
                return web.Response(body=body, headers={"Content-Encoding": "gzip"})
            case "malformed":
                return web.Response(body=b"<html>maintenance</html>")
            case "empty":
                return web.json_response({"keys": []})
            case "cut":
                broken = web.StreamResponse(headers={"Content-Length": "1000"})
                await broken.prepare(request)
                await broken.write(b"{")
                assert request.transport is not None
                request.transport.abort()
                return broken
        return web.json_response(self.document())

    async def _elsewhere(self, _request: web.Request) -> web.Response:
        return web.json_response(self.document())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Provider]:
        app = web.Application()
        app.router.add_get("/keys", self._jwks)
        app.router.add_get("/elsewhere", self._elsewhere)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
        try:
            yield self
        finally:
            await runner.cleanup()
