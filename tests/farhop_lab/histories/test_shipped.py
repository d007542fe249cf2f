"""The catalogue: every kept file can be recorded anew, and recording twice gives the same bytes."""

from __future__ import annotations

import msgspec

from farhop_lab.histories import shipped


def test_every_kept_file_is_in_the_catalogue() -> None:
    kept = {path.stem for path in shipped.KEPT.glob(f"*{shipped.SUFFIX}")}
    assert {name for name in kept if not name.startswith(shipped.LIVE)} == set(shipped.catalogue())


def test_a_recording_is_the_same_twice() -> None:
    record = shipped.catalogue()["chaos-dead-green-1145"]
    first, again = ([recorder.packed() for recorder in record()] for _ in range(2))
    assert msgspec.msgpack.encode(first) == msgspec.msgpack.encode(again)
