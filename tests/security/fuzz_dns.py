"""Questions with bytes changed, cut and added, by the million: none may crash the responder, none that is malformed
gets more bytes than it sent. `python tests/security/fuzz_dns.py --rounds 1000000 --seed 7`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random

import dns.edns
import dns.message

sys.path.insert(0, str(Path(__file__).parents[2]))

from entry_dns.answers.cookies import Cookies
from entry_dns.answers.responder import COUNTERS, Responder
from tests.entry_dns.conftest import served

MALFORMED = (1, 4)  # FORMERR, NOTIMP
COOKIES, NOW = Cookies([bytes(16)]), 1_800_000_000


def seeds() -> list[bytes]:
    """Good questions to begin with."""
    ecs = [dns.edns.ECSOption("203.0.113.0", 24), dns.edns.ECSOption("2001:db8:aaaa::", 48)]
    proven = COOKIES.verify(b"clientco", bytes((192, 0, 2, 0)), NOW)[0]
    more = [dns.edns.GenericOption(10, bytes(8)), dns.edns.GenericOption(3, b"")]
    known = [dns.edns.GenericOption(10, proven)]
    alone = dns.message.Message()
    alone.use_edns(0, options=more[:1])
    return [alone.to_wire()] + [
        dns.message.make_query(name, kind, use_edns=0 if options else None, options=options).to_wire()
        for name in ("api.entry.example", "eu.entry.example", "nobody.entry.example")
        for kind in ("A", "HTTPS", "ANY", "TXT")
        for options in (None, ecs[:1], ecs[1:], more, [*ecs[:1], *more], [*ecs[:1], *known], [*known, *ecs[1:]])
    ]


def mutated(data: bytes, rng: Random) -> bytes:
    """Some bytes changed, maybe cut, maybe with more behind."""
    made = bytearray(data)
    for _ in range(rng.randrange(5)):
        made[rng.randrange(len(made))] = rng.choice((0, 1, 3, 8, 12, 41, 63, 64, 192, 255, rng.randrange(256)))
    if rng.random() < 0.2:
        del made[rng.randrange(len(made)) :]
    if rng.random() < 0.1:
        made += rng.randbytes(rng.randrange(40))
    return bytes(made)


def run(rounds: int, seed: int) -> dict[str, int]:
    """Ask; what was counted. AssertionError with the bytes of the question that broke a rule."""
    rng, good = Random(seed), seeds()
    responder = served(Responder(COOKIES, nsid=b"x"))
    for number in range(rounds):
        data = mutated(rng.choice(good), rng)
        try:
            answer = responder.answer(data, f"192.0.2.{number & 3}", number % 7 != 0)
        except Exception as error:
            raise AssertionError(f"{data.hex()}: {error!r}") from error
        if answer is not None:
            assert answer[:2] == data[:2], data.hex()
            assert answer[2] & 0x80, data.hex()
            assert len(answer) <= len(data) or answer[3] & 15 not in MALFORMED, data.hex()
    return dict(zip(COUNTERS, responder.counts, strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    print(f"{given.rounds} questions, seed {given.seed}: {run(given.rounds, given.seed)}")
