"""The nouns are wired alike: the same verbs in one order, the same options."""

import pytest

from farhop_cli.commands import wiring

NOUNS = ("law", "route", "split", "policy", "bias", "pin", "drain", "limit")
VERBS = ["get", "set", "unset", "diff", "history"]


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_has_all_five_verbs_with_the_same_options(wired, options, noun):
    group = wired(noun)
    assert group.list_commands(None)[:5] == VERBS
    for verb in VERBS:
        has = options(group.commands[verb])
        assert has >= {"--config", "--etcd", "--world", "--json"}
        assert ("--dry-run" in has) is (verb in ("set", "unset"))
    assert options(group.commands["set"]) >= {"--why", "--by"}


def test_every_noun_of_the_table_is_wired():
    assert [wiring.noun(name).name for name in NOUNS[1:]] == list(NOUNS[1:])
