"""DNS cookies (RFC 7873, RFC 9018): a server cookie of version 1 proves its bearer's address.

All servers of an anycast address share their secrets, so that each accepts the others' cookies: the first secret makes
cookies, every secret is accepted. Never reads a clock: `now` is seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence

PAST_S, FUTURE_S, RENEW_S = 3600, 300, 1800  # RFC 9018, 4.3
_MASK = (1 << 64) - 1


def siphash24(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 of `data` under a key of 16 bytes: 8 bytes, little-endian (Aumasson and Bernstein, 2012)."""
    k0, k1 = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]
    whole = len(data) - len(data) % 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
    for word in words:
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xFF
    _rounds(v, 4)
    return (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


def _rounds(v: list[int], rounds: int) -> None:
    v0, v1, v2, v3 = v
    for _ in range(rounds):
        v0 = (v0 + v1) & _MASK
        v1 = ((v1 << 13) & _MASK | v1 >> 51) ^ v0
        v0 = (v0 << 32) & _MASK | v0 >> 32
        v2 = (v2 + v3) & _MASK
        v3 = ((v3 << 16) & _MASK | v3 >> 48) ^ v2
        v0 = (v0 + v3) & _MASK
        v3 = ((v3 << 21) & _MASK | v3 >> 43) ^ v0
        v2 = (v2 + v1) & _MASK
        v1 = ((v1 << 17) & _MASK | v1 >> 47) ^ v2
        v2 = (v2 << 32) & _MASK | v2 >> 32
    v[0], v[1], v[2], v[3] = v0, v1, v2, v3


class Cookies:
    """Makes and verifies server cookies. `secrets`: at least one, of 16 bytes each; the first one makes cookies."""

    __slots__ = ("_secrets",)

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = tuple(secrets)

    def verify(self, cookie: bytes, address: bytes, now: int) -> tuple[bytes, bool]:
        """The cookie for the answer (client and server part, 24 bytes), and whether the query's cookie is valid.

        `cookie`: the option's bytes as received. It is valid if one of the secrets made it for this client `address`
        (4 or 16 bytes) and it is not too old; a valid cookie is answered with itself until RENEW_S.
        """
        client, server = cookie[:8], cookie[8:]
        if len(server) == 16 and server[0] == 1:
            head, stamp = server[:8], int.from_bytes(server[4:8], "big")
            age = (now - stamp + (1 << 31)) % (1 << 32) - (1 << 31)  # RFC 1982
            if -FUTURE_S <= age <= PAST_S and any(
                siphash24(secret, client + head + address) == server[8:] for secret in self._secrets
            ):
                return (cookie if age <= RENEW_S else self._made(client, address, now)), True
        return self._made(client, address, now), False

    def _made(self, client: bytes, address: bytes, now: int) -> bytes:
        head = b"\x01\0\0\0" + (now & 0xFFFFFFFF).to_bytes(4, "big")
        return client + head + siphash24(self._secrets[0], client + head + address)
