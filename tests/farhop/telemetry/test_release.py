"""The release is the distribution's."""

from importlib.metadata import version

from farhop.telemetry.release import UNKNOWN, release


def test_it_is_what_the_distribution_says(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    try:
        wanted = version("farhop")
    except ImportError:
        wanted = UNKNOWN
    assert release() == wanted
