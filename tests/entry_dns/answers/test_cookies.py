from __future__ import annotations

from entry_dns.answers.cookies import FUTURE_S, PAST_S, RENEW_S, Cookies, siphash24

SECRET = bytes.fromhex("e5e973e5a6b2a43f48e7dc849e37bfcf")  # RFC 9018, appendix A
CLIENT = bytes.fromhex("2464c4abcf10c957")
ADDRESS = bytes((198, 51, 100, 100))


def test_siphash_is_that_of_its_authors() -> None:
    # The vectors of the reference implementation: key 00..0f, data 00..(n-1).
    assert siphash24(bytes(range(16)), b"").hex() == "310e0edd47db6f72"
    assert siphash24(bytes(range(16)), bytes(range(15))).hex() == "e545be4961ca29a1"


def test_the_first_example_of_rfc_9018() -> None:
    first, proven = Cookies([SECRET]).verify(CLIENT, ADDRESS, 1559731985)
    assert (first.hex(), proven) == ("2464c4abcf10c957010000005cf79f111f8130c3eee29480", False)


def test_a_cookie_for_ipv6_is_valid_until_its_rolled_secret_is_removed() -> None:
    address = bytes.fromhex("20010db80220000159ded0f4876982b8")
    old = Cookies([SECRET]).verify(CLIENT, address, 1_600_000_000)[0]
    both = Cookies([b"another secret!!", SECRET])
    assert both.verify(old, address, 1_600_000_100) == (old, True)
    assert not Cookies([b"another secret!!"]).verify(old, address, 1_600_000_100)[1]


def test_a_cookie_is_for_its_address_and_its_time() -> None:
    cookies, now = Cookies([SECRET]), 1_600_000_000
    made = cookies.verify(CLIENT, ADDRESS, now)[0]

    def at(then: int, address: bytes = ADDRESS) -> tuple[bytes, bool]:
        return cookies.verify(made, address, then)

    assert at(now + RENEW_S) == (made, True)
    again, proven = at(now + RENEW_S + 1)
    assert proven
    assert again != made
    assert not at(now + PAST_S + 1)[1]
    assert at(now - FUTURE_S)[1]
    assert not at(now - FUTURE_S - 1)[1]
    assert not at(now, bytes(4))[1]
    assert not cookies.verify(made[:-1] + b"x", ADDRESS, now)[1]
