"""The release is the distribution's."""

from importlib.metadata import version

from farhop.telemetry.release import UNKNOWN, release


def test_the_release_is_that_of_the_installed_distribution(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    try:
        wanted = version("farhop")
    except ImportError:
        wanted = UNKNOWN
    assert release() == wanted
