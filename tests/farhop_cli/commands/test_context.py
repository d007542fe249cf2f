"""Contexts are named, used, shown and taken away."""


def test_context_has_these_verbs(wired):
    assert set(wired("context").commands) == {"list", "use", "show", "set", "unset"}


def test_context_use_without_a_name_is_bad_usage(cli):
    result = cli.run("context", "use")
    assert (result.exit_code, result.stdout) == (2, "")
