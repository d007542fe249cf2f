"""Keys of identity providers, over real HTTP: rotated, gone, slow, huge, elsewhere, malformed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inprocess import until
from provider import NOW_S, Provider

from farhop.identity.jwt_tokens import TokenVerifier
from farhop.service.authentication import issuer_keys
from farhop.service.authentication.issuer_keys import IssuerKeys
from farhop.service.config.certificates import system_context
from farhop.service.config.process import IssuerConfig
from farhop.service.process.tasks import Tasks
from farhop_lab.world.certs import Authority


class Following:
    """One that follows a provider, by clocks that are set by hand."""

    def __init__(self, provider: Provider, **more: Any) -> None:
        self.wall_s, self.now_s, self.problems = NOW_S, 1000.0, list[str]()
        config = IssuerConfig.model_validate(provider.config(**more))
        self.tokens = TokenVerifier({"corp": config.made("corp")}, b"", lambda: self.wall_s)
        log: Any = SimpleNamespace(warning=self._warned, error=self._warned)
        self.keys = IssuerKeys(self.tokens, {"corp": (config, system_context)}, lambda: self.now_s, log)

    def _warned(self, _event: str, _key: str, **fields: Any) -> None:
        self.problems.append(fields["problem"])

    def knows(self, token: str) -> bool:
        header = b"Bearer " + token.encode()
        return getattr(self.tokens.identify(header, b""), "tenant", None) == "acme"

    @property
    def status(self) -> dict[str, Any]:
        return self.keys.status()["corp"]  # type: ignore[no-any-return]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with Provider().running() as running:
        yield running


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    made = Tasks()
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are by the clock that is set by hand; the loop looks at it often."""
    monkeypatch.setattr(issuer_keys, "LOOK_S", 0.01)


async def test_a_rotated_key_is_known_after_one_refusal_and_the_issuer_asked_at_most_so_often(
    provider: Provider, tasks: Tasks
) -> None:
    one = Following(provider)
    tasks.start(one.keys.keep(), "test")
    await one.keys.begun()
    assert one.knows(provider.token())
    provider.rotate()
    for _ in range(50):
        assert not one.knows(provider.token())
    await asyncio.sleep(0.05)
    assert provider.asked == 1  # REFETCH_S is not over
    one.now_s += 30
    await until(lambda: one.knows(provider.token()))
    assert provider.asked == 2
    provider.rotate(publish_old=False)
    one.now_s += 300
    await until(lambda: provider.asked == 3)
    await until(lambda: one.knows(provider.token()))
    assert len(one.status["keys"]) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("500", "status 500"), ("redirect", "status 302"), ("huge", "more than 262144 bytes"),
        ("slow", "did not answer within"), ("compressed", "compressed"), ("malformed", "is not JSON"),
        ("empty", "holds no key"), ("cut", "could not be asked"),
    ],
)  # fmt: skip
async def test_an_unusable_key_set_does_not_replace_the_last_good_one(
    provider: Provider, tasks: Tasks, monkeypatch: pytest.MonkeyPatch, answer: str, says: str
) -> None:
    monkeypatch.setattr(issuer_keys, "FETCH_S", 0.1 if answer == "slow" else 5.0)
    one = Following(provider)
    tasks.start(one.keys.keep(), "test")
    await one.keys.begun()
    provider.answer = answer
    one.now_s += 300
    await until(lambda: one.problems)
    assert says in one.problems[0]
    assert (one.knows(provider.token()), one.status["stale"], one.status["trouble"]) == (True, False, one.problems[0])
    provider.answer = "keys"
    one.now_s += 1
    await until(lambda: one.status["trouble"] is None)


async def test_an_untrusted_provider_certificate_names_the_field_that_helps(
    provider: Provider, tasks: Tasks, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = Authority(tmp_path).issue("idp")
    context.load_cert_chain(pair.cert_file, pair.key_file)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    provider.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks"
    one = Following(provider)
    tasks.start(one.keys.keep(), "test")
    await until(lambda: one.problems)
    server.close()
    assert "ca_file" in one.problems[0]


async def test_keys_that_grew_too_old_count_no_more_until_they_are_fetched(provider: Provider, tasks: Tasks) -> None:
    one = Following(provider, stale_s=600)
    tasks.start(one.keys.keep(), "test")
    await one.keys.begun()
    provider.answer = "500"
    one.now_s += 599
    await until(lambda: one.problems)
    assert one.knows(provider.token())
    one.now_s += 1
    await until(lambda: one.status["stale"])
    assert (one.knows(provider.token()), one.status["keys"]) == (False, [])
    provider.answer = "keys"
    one.now_s += 60
    await until(lambda: one.knows(provider.token()))


async def test_an_unreachable_provider_does_not_delay_the_start(tasks: Tasks) -> None:
    provider = Provider()
    provider.url = "http://127.0.0.1:1/keys"
    one = Following(provider)
    tasks.start(one.keys.keep(), "test")
    await one.keys.begun()
    await until(lambda: one.problems)
    assert not one.knows(provider.token())
    assert one.status == {"keys": [], "age_s": None, "stale": True, "trouble": one.problems[0]}
    one.now_s += 2
    assert one.keys.ages_s() == {"corp": 2}
