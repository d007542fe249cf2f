"""What is kept on disk: whole or not at all, for one fleet, and refused with a reason if it is not what was written."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farhop.store import state
from farhop.store.state import SavedDocument, StateDir, StateError


@pytest.fixture
def kept(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path, "fleet-1", "frankfurt-a")


def test_an_empty_state_folder_holds_nothing(kept: StateDir) -> None:
    assert kept.load("law") is None


def test_the_last_saved_value_is_loaded(kept: StateDir) -> None:
    kept.save("law", b"one\ntwo")
    kept.save("law", b"three\n\x00")
    kept.save("view", b"")
    law, view = kept.load("law"), kept.load("view")
    assert isinstance(law, SavedDocument)
    assert isinstance(view, SavedDocument)
    assert (law.document, view.document) == (b"three\n\x00", b"")
    assert law.written_at == kept.path("law").stat().st_mtime


def test_only_the_owner_may_read_it_and_nothing_is_left_beside(kept: StateDir) -> None:
    kept.save("law", b"hash of a key")
    assert kept.path("law").stat().st_mode & 0o077 == 0
    assert kept.path("law").parent.stat().st_mode & 0o077 == 0
    assert [path.name for path in kept.path("law").parent.iterdir()] == ["law"]


def test_fleets_and_owners_do_not_see_each_other(tmp_path: Path) -> None:
    StateDir(tmp_path, "fleet-1", "a").save("law", b"mine")
    assert StateDir(tmp_path, "fleet-2", "a").load("law") is None
    assert StateDir(tmp_path, "fleet-1", "b").load("law") is None


def test_a_document_carried_to_another_fleet_is_refused(tmp_path: Path) -> None:
    mine, other = StateDir(tmp_path, "fleet-1", "a"), StateDir(tmp_path, "fleet-2", "a")
    mine.save("law", b"mine")
    other.save("law", b"theirs")
    mine.path("law").replace(other.path("law"))
    with pytest.raises(StateError, match="another fleet"):
        other.load("law")


@given(at=st.integers(0, 200), bit=st.integers(0, 7))
def test_a_document_with_a_flipped_bit_is_refused(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    kept = StateDir(tmp_path_factory.getbasetemp() / "flipped", "fleet-1", "a")
    kept.save("law", b'{"epoch": 7, "tenants": {}}')
    written = bytearray(kept.path("law").read_bytes())
    written[at % len(written)] ^= 1 << bit
    kept.path("law").write_bytes(written)
    with pytest.raises(StateError, match="it is not used"):
        kept.load("law")


@given(length=st.integers(0, 120))
def test_a_truncated_document_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    kept = StateDir(tmp_path_factory.getbasetemp() / "cut", "fleet-1", "a")
    kept.save("law", b"x" * 60)
    written = kept.path("law").read_bytes()
    kept.path("law").write_bytes(written[: min(length, len(written) - 1)])
    with pytest.raises(StateError, match="it is not used"):
        kept.load("law")


def test_another_versions_document_is_refused_by_name(kept: StateDir) -> None:
    kept.save("law", b"x")
    written = kept.path("law").read_bytes()
    kept.path("law").write_bytes(written.replace(b"farhop-state 1", b"farhop-state 2"))
    with pytest.raises(StateError, match="another version"):
        kept.load("law")


@pytest.mark.parametrize("interrupted", ["write_whole", "_flush_folder"])
def test_a_write_that_fails_leaves_the_one_before_or_the_new_one_whole(
    kept: StateDir, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    kept.save("law", b"before")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, interrupted, full)
    with pytest.raises(StateError, match="No space left"):
        kept.save("law", b"after")
    found = kept.load("law")
    assert found is not None
    assert found.document in (b"before", b"after")
    assert [path.name for path in kept.path("law").parent.iterdir()] == ["law"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="may write to"):
        StateDir(tmp_path / "file", "fleet", "a").save("law", b"x")


def test_a_state_path_that_is_no_file_is_refused(kept: StateDir) -> None:
    kept.path("law").mkdir(parents=True)
    with pytest.raises(StateError, match="law: cannot be read"):
        kept.load("law")


def test_a_value_that_is_too_large_is_neither_written_nor_read(kept: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "DOCUMENT_BYTES_MAX", 10)
    with pytest.raises(StateError, match="11 bytes"):
        kept.save("law", b"x" * 11)
    kept.path("law").parent.mkdir(parents=True)
    kept.path("law").write_bytes(b"x" * 2000)
    with pytest.raises(StateError, match="at most 10"):
        kept.load("law")


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a\x00", "x" * 129])
def test_names_are_one_path_component(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        StateDir(tmp_path, name, "a")
    with pytest.raises(ValueError, match="is not a name"):
        StateDir(tmp_path, "fleet", "a").save(name, b"")


def test_a_half_written_file_of_a_dead_process_is_overwritten(kept: StateDir) -> None:
    kept.save("law", b"before")
    kept.path("law").with_name(".law.new").write_bytes(b"half of a very long docum")
    kept.save("law", b"after")
    found = kept.load("law")
    assert found is not None
    assert found.document == b"after"
    assert [path.name for path in kept.path("law").parent.iterdir()] == ["law"]


def test_two_threads_do_not_write_at_once_and_the_later_value_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, write = StateDir(tmp_path, "fleet", "a"), state.write_whole
    entered, go_on, under_way = threading.Event(), threading.Event(), list[bytes]()

    def slowly(path: Path, data: bytes) -> None:
        under_way.append(data)
        assert len(under_way) == 1
        entered.set()
        assert go_on.wait(30.0)
        write(path, data)
        under_way.clear()

    monkeypatch.setattr(state, "write_whole", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(here.save, "law", b"law 7")
        assert entered.wait(30.0)
        second = threads.submit(here.save, "law", b"law 8")
        wait([second], 0.05)
        go_on.set()
        first.result()
        second.result()
    kept = here.load("law")
    assert kept is not None
    assert kept.document == b"law 8"
