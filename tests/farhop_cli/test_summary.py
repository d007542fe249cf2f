"""A fleet in ten lines, whatever its balancers say."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from farhop.store.documents.announce import AnnounceReport
from farhop_cli import summary


def balancer(region, **status):
    return SimpleNamespace(region=region, name=region, status=status or None)


def view(region, state="up", **more):
    offer = {"wait_ms": 12.0, "used_share": 0.25}
    return {"region": region, "state": state, "why": f"why {state}", "instances": [{"models": {"m": offer}}], **more}


def replicas(*states):
    return [{"replica": f"r{n}", "state": state, "why": "probe failed"} for n, state in enumerate(states)]


def summed(upper, lower=(), unreached=(), region="", announcers=()):
    return [text for text, _ in summary.lines(summary.of("prod", upper, lower, unreached, region, announcers))]


def announcer(region, **more):
    given = {"entry": f"{region}-1", "instance": "bgp-1", "prefixes": ("192.0.2.1/32",), "speaker": "exabgp"}
    return AnnounceReport(**{**given, "region": region, "wanted": "announced", "actual": "announced", **more})


def test_unannounced_entry_is_listed_as_wrong_with_its_reason():
    known = [
        announcer("tokyo", healthy=True),
        announcer("paris", wanted="withdrawn", actual="withdrawn", why="drained: new kernel (by ann)"),
        announcer("oslo", wanted="withdrawn", differs=True),
    ]
    found = [line for line in summed([], announcers=known) if line.startswith("wrong")]
    assert found == [
        "wrong: bgp-1 has entry paris-1 withdrawn: drained: new kernel (by ann)",
        "wrong: bgp-1 announces entry oslo-1 as announced, and should as withdrawn",
    ]
    assert "wrong: nothing" in summed([], announcers=known, region="tokyo")


def test_summary_of_a_healthy_fleet_shows_where_the_load_is():
    upper = [balancer("tokyo", law_epoch=7, regions=[view("tokyo"), view("paris")])]
    lower = [
        balancer("tokyo", law_epoch=7, under_way=90, queued_requests=4, replicas=replicas("up", "up")),
        balancer("paris", law_epoch=7, under_way=2, queued_requests=0, replicas=replicas("up")),
    ]
    assert summed(upper, lower) == [
        "prod: 2 regions (2 up), 3 of 3 balancers answered",
        "law: epoch 7 everywhere",
        "wrong: nothing",
        "load: 92 requests under way, 4 queued; most of its capacity used: tokyo",
        "  tokyo: up, 90 under way, 4 queued, 25% used, wait 12.0 ms, 2 of 2 replicas up",
        "  paris: up, 2 under way, 0 queued, 25% used, wait 12.0 ms, 1 of 1 replicas up",
    ]
    assert summed(upper, lower, region="paris")[-1].startswith("  paris")


def test_summary_of_entries_alone_notes_missing_regional_balancers():
    upper = [balancer("tokyo", law_epoch=7, regions=[view("tokyo"), view("paris")])]
    assert summed(upper, [])[3:] == [
        "load: as entries see it: no regional balancer answered (with --config none is asked; a context asks all)",
        "  paris: up, 25% used, wait 12.0 ms",
        "  tokyo: up, 25% used, wait 12.0 ms",
    ]


def test_balancer_without_etcd_write_permission_names_the_missing_right():
    denied = {"hub": "main", "trouble": "permission denied; grant"}
    upper = [balancer("tokyo", tier="global", published=[denied], hubs=[{"hub": "main", "trouble": "silent"}])]
    lower = [
        balancer("paris", tier="regional", hubs=[denied], replicas=replicas("up")),
        balancer("rome", limits={"root": {"lends": False, "trouble": "denied"}}, replicas=replicas("up")),
    ]
    assert [line for line in summed(upper, lower) if line.startswith("wrong")] == [
        "wrong: global tokyo is missing in hub main: permission denied; grant",
        "wrong: regional paris is missing in hub main: permission denied; grant",
        "wrong: rome cannot lend out limits (tenants with limits here may get 429): denied",
    ]


def test_documents_that_do_not_count_are_wrong_and_one_is_named():
    ignored = [{"hub": "main", "documents": 4, "such_as": {"/farhop/v1/key/k1": "key_unknown_key"}}]
    assert summed([balancer("tokyo", tier="global", ignored=ignored)])[2] == (
        "wrong: global tokyo ignores 4 documents in hub main, such as /farhop/v1/key/k1: key_unknown_key; "
        "sign them with a key that it knows (deploy/ROTATION.md)"
    )


def test_a_start_without_etcd_is_wrong_also_where_accounts_are_kept():
    kept = [{"hub": "main", "from_disk": True}]
    upper = [balancer("tokyo", accounts={"usage": {}}, kept=kept), balancer("oslo", accounts={"usage": 1})]
    assert "wrong: tokyo started from what was kept on disk: hub main is silent" in summed(upper)


def test_without_a_global_balancer_the_summary_does_not_pass_for_that_of_a_fleet_without_load():
    found = summed([], [balancer("paris", law_epoch=1, under_way=3, replicas=replicas("up"))])
    assert found[-1].startswith("load: unknown: no global balancer was found; does one run, and may it write ")


def test_problems_are_sorted_by_severity_and_bounded_in_number():
    drain = {"author": "ann", "why": "new racks"}
    views = [view("oslo", "down"), view("tokyo", "suspect")]
    views += [view("paris", override=drain), view("rome", admitted_share=0.0)]
    law = {"epoch": 8, "author": "bob", "why": "audit", "signed_by": "ops", "trouble": ["refused: unsigned"]}
    upper = [
        balancer("tokyo", law_epoch=8, law=law, store_trouble="silent for 9 s", regions=views),
        balancer("paris", law_epoch=7, regions=[view("tokyo", "up")]),
    ]
    lower = [balancer("tokyo", law_epoch=8, replicas=replicas("up", "down", "ejected"))]
    lines = summed(upper, lower, ["http://h:1 cannot be reached: refused"])
    assert lines[0] == "prod: 4 regions (1 down, 1 suspect, 2 up), 3 of 3 balancers answered"
    assert lines[1] == "law: epoch 8 at tokyo; epoch 7 at paris, set by bob (signed by ops): audit"
    assert [line for line in lines if line.startswith("wrong")] == [
        "wrong: not reached: http://h:1 cannot be reached: refused",
        "wrong: oslo is down: why down",
        "wrong: tokyo is suspect: why suspect",
        "wrong: and 6 more; see --wide",
    ]
    whole = summary.of("prod", upper, lower, [])
    assert "tokyo: 2 of 3 replicas not up, such as r1 (down: probe failed)" in whole.wrong
    lower[0].status["replicas"][1]["problems"] = ["http://r1:8000/health: unreachable"]
    whole = summary.of("prod", upper, lower, [])
    assert any(line.endswith("r1 (down: probe failed: http://r1:8000/health: unreachable)") for line in whole.wrong)
    assert "paris is drained by ann: new racks" in whole.wrong
    assert "rome is hot: new work goes elsewhere if it can" in whole.wrong
    assert "the law is not the same everywhere: paris behind epoch 8" in whole.wrong


FIELDS = (
    "law_epoch", "law", "regions", "region", "state", "why", "instances", "models", "m", "wait_ms", "used_share",
    "replicas", "replica", "under_way", "queued_requests", "store_trouble", "kept", "override", "trouble", "epoch",
    "from_disk", "author", "signed_by", "admitted_share",
)  # fmt: skip
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=25,
)


@given(statuses=st.lists(st.none() | st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=8), max_size=6))
def test_at_most_ten_lines_and_no_error_for_any_statuses(statuses):
    those = [SimpleNamespace(region="tokyo", name="tokyo", status=status) for status in statuses]
    lines = summed(those[::2], those[1::2], ["a", "b", "c", "d", "e"])
    assert 4 <= len(lines) <= summary.LINES_MAX


def test_a_region_that_refuses_hop_tokens_is_wrong_for_a_minute():
    def wrong(age_s):
        upper = [balancer("paris", regions=[{"region": "tokyo", "state": "up", "token_rejected_age_s": age_s}])]
        return [line for line in summed(upper, [], []) if line.startswith("wrong")]

    assert wrong(3.0) == ["wrong: tokyo refuses hop tokens of paris: give both the same key (`farhop check`)"]
    assert wrong(90.0) == wrong(None) == ["wrong: nothing"]


def test_what_answers_in_a_region_s_place_is_wrong_for_a_minute():
    def wrong(age_s):
        upper = [balancer("paris", regions=[{"region": "tokyo", "state": "up", "other_answered_age_s": age_s}])]
        return [line for line in summed(upper, [], []) if line.startswith("wrong")]

    assert wrong(3.0) == ["wrong: something else than tokyo answers paris at its tier address"]
    assert wrong(90.0) == wrong(None) == ["wrong: nothing"]


def test_region_without_a_ready_replica_is_not_reported_as_hot():
    def wrong(**ready):
        models = {model: {"replicas_ready": count} for model, count in ready.items()}
        one = {"region": "tokyo", "state": "up", "admitted_share": 0.0, "instances": [{"models": models}]}
        return [line for line in summed([balancer("paris", regions=[one])]) if line.startswith("wrong")]

    hot = "wrong: tokyo is hot: new work goes elsewhere if it can"
    assert wrong(m=0) == ["wrong: tokyo has no replica ready of m"]
    assert wrong(m=0, n=2) == ["wrong: tokyo has no replica ready of m", hot]
    assert wrong(m=1) == [hot]


def test_an_identity_provider_and_a_price_book_that_cannot_be_used_are_wrong():
    keys = {"issuers": {"corp": {"trouble": "jwks_url: status 500"}, "fine": {"trouble": None}}}
    accounts = {"usage": {"trouble": None, "prices": {"epoch": 1, "trouble": "epoch 1 is in force, and changed"}}}
    found = [line for line in summed([balancer("paris", keys=keys, accounts=accounts)]) if line.startswith("wrong")]
    assert found == [
        "wrong: paris cannot fetch the keys of issuer corp: jwks_url: status 500",
        "wrong: paris, price book passed over: epoch 1 is in force, and changed",
    ]
