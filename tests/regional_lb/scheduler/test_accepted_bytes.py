"""What reports acknowledge: bounded, whatever names senders give themselves."""

from regional_lb.scheduler.accepted_bytes import ISSUERS_CHARS_MAX, ISSUERS_MAX, AcceptedBytes


def test_bytes_are_counted_by_sender_and_recent_senders_are_kept() -> None:
    accepted = AcceptedBytes()
    for n in range(ISSUERS_MAX):
        accepted.add(f"g{n}", 100)
    accepted.add("g0", 50)
    accepted.add("new", 7)
    assert (len(accepted), accepted["g0"], accepted["new"], "g1" in accepted) == (ISSUERS_MAX, 150.0, 7.0, False)


def test_fewer_senders_are_kept_if_their_names_are_long() -> None:
    accepted = AcceptedBytes()
    for n in range(100):
        accepted.add(f"{n:03}" + "x" * 1000, 1)
    assert 60 < len(accepted) <= ISSUERS_CHARS_MAX // 1003
