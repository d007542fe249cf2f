from __future__ import annotations

from entry_dns.links.view_file import load, write


def test_a_view_takes_the_place_of_the_one_before_which_lives_while_it_is_held(tmp_path) -> None:
    path = tmp_path / "view"
    write(path, b"one")
    before = load(path)
    write(path, b"another")
    assert bytes(before) == b"one"
    assert bytes(load(path)) == b"another"
    assert [one.name for one in tmp_path.iterdir()] == ["view"]
