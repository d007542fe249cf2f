"""`farhop explain`: a request that is not sent, shown only to whom the law lets read it; a decision of the past."""

import json

import pytest

BODY = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def request_file(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODY))
    return str(path)


@pytest.fixture
def answering(world, made):
    for name in ("virginia", "frankfurt", "tokyo"):
        reasons = made.regions("tokyo", [made.candidate("tokyo")])
        world.explained[name, "global_admin"] = {"reasons": reasons}
        fields = {"region": name, "unlawful": None, "reasons": made.replicas(f"{name}-1")}
        world.explained[name, "regional_admin"] = fields
    return world


async def test_explain_asks_the_entry_and_the_region_that_it_would_choose(answering, cli, request_file):
    result = await cli.in_thread("explain", request_file, "--from", "Paris", "--allow", "jp,eu")
    assert result.exit_code == 0
    assert "as frankfurt would decide now for anywhere" in result.stdout
    assert "tokyo-1" in result.stdout
    assert [(region, role) for region, role, _ in answering.questions] == [
        ("frankfurt", "global_admin"), ("tokyo", "regional_admin"),
    ]  # fmt: skip
    question = answering.questions[0][2]
    assert question == {"body": BODY, "tenant": "anywhere", "path": "/v1/chat/completions", "allow": ["jp", "eu"]}
    assert not answering.requests


async def test_explain_asks_where_it_would_go_if_a_region_were_drained(answering, cli, made, request_file):
    reasons = made.regions("tokyo", [made.candidate("tokyo")])
    for name in ("virginia", "frankfurt", "tokyo"):
        answering.explained[name, "global_admin"] = {"reasons": reasons, "drained": "virginia"}
    result = await cli.in_thread("explain", request_file, "--drained", "virginia")
    assert (result.exit_code, "if virginia were drained" in " ".join(result.stdout.split())) == (0, True)
    assert answering.questions[0][2]["drained"] == "virginia"
    older = await cli.in_thread("explain", request_file, "--drained", "frankfurt")
    assert "older build" in cli.failed(older, 2)
    assert '"mars" is no region' in cli.failed(await cli.in_thread("explain", request_file, "--drained", "mars"), 2)


async def test_where_a_past_decision_would_have_gone_if_a_region_had_been_drained(world, cli, made):
    candidates = [made.candidate("tokyo"), made.candidate("virginia")]
    world.records["virginia", "global_admin"] = made.record(made.regions("tokyo", candidates))
    for region, says in {"tokyo": "if tokyo had been drained: to virginia", "virginia": "to tokyo, too"}.items():
        result = await cli.in_thread("explain", made.decision, "--drained", region)
        assert says in " ".join(result.stdout.split())
    output = json.loads((await cli.in_thread("explain", made.decision, "--drained", "tokyo", "--json")).stdout)
    assert (output["what_if"]["virginia"]["moved"], output["what_if"]["virginia"]["chosen"]) == (True, "virginia")


async def test_prompt_is_not_sent_to_an_entry_that_may_not_read_it(answering, cli, request_file):
    result = await cli.in_thread("explain", request_file, "--tenant", "japan-only", "--from", "virginia")
    assert result.exit_code == 0
    assert {region for region, _, _ in answering.questions} == {"tokyo"}
    assert "virginia may not read this request (tenant japan-only: entry allows only jp)" in result.stderr


async def test_a_completion_from_standard_input_as_json(answering, cli):
    result = await cli.in_thread("explain", "-", "--json", stdin='{"model":"m","prompt":"hello"}')
    output = json.loads(result.stdout)
    assert (output["entry_region"], output["chosen"]) == ("virginia", "tokyo")
    assert output["regional"]["reasons"]["chosen"] == "tokyo-1"
    assert answering.questions[0][2]["path"] == "/v1/completions"


async def test_a_refusal_is_code_1_with_its_reasons(answering, cli, made, request_file):
    reasons = made.regions(None, [], unlawful={"tokyo": "model m: processing denies jp"})
    answering.explained["virginia", "global_admin"] = {"reasons": reasons}
    result = await cli.in_thread("explain", request_file)
    assert result.exit_code == 1
    assert "law: model m: processing denies jp" in result.stdout
    assert "would be refused" in result.stdout


@pytest.mark.parametrize(("message", "says", "code"), [
    ({"unlawful": "a clause", "reasons": None}, "would refuse it: a clause", 0),
    ({"unlawful": None, "reasons": None}, "no replica for this model", 0),
    ({"error": "gone"}, "did not say", 3),
])  # fmt: skip
async def test_a_region_that_would_not_take_it(answering, cli, request_file, message, says, code):
    answering.explained["tokyo", "regional_admin"] = message
    result = await cli.in_thread("explain", request_file)
    assert result.exit_code == code
    assert says in result.stdout


async def test_the_next_entry_is_asked_where_one_is_silent(answering, cli, request_file):
    answering.silent.add(("virginia", "global_admin"))
    result = await cli.in_thread("explain", request_file)
    assert result.exit_code == 0
    assert "as frankfurt would decide" in result.stdout
    answering.silent |= {("frankfurt", "global_admin"), ("tokyo", "global_admin")}
    assert "no entry that may read it" in cli.failed(await cli.in_thread("explain", request_file), 2)


async def test_a_bad_question_is_shown_once(answering, cli, request_file):
    del answering.explained["virginia", "global_admin"]
    assert cli.failed(await cli.in_thread("explain", request_file), 2) == "farhop: a bad question\n"


@pytest.mark.parametrize(("text", "says"), [
    ("{", "JSON"), ("[]", "neither `messages` nor `prompt`"), ('{"model":"m"}', "neither"), ("\xff", "JSON"),
])  # fmt: skip
async def test_a_file_that_is_no_request_is_reported_and_nothing_is_asked(answering, cli, tmp_path, text, says):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    assert says in cli.failed(await cli.in_thread("explain", str(path)), 2)
    assert not answering.questions


@pytest.mark.parametrize(("arguments", "says"), [
    (("nowhere.json",), "decision id"),
    ((".",), "directory"),
])  # fmt: skip
async def test_explain_without_a_readable_request_file_is_reported(world, cli, arguments, says):
    assert says in cli.failed(await cli.in_thread("explain", *arguments), 2)


async def test_an_unknown_tenant(world, cli, request_file):
    assert "no tenant 'bob'" in cli.failed(await cli.in_thread("explain", request_file, "--tenant", "bob"), 2)


# -- decisions of the past


async def test_past_decision_is_found_at_any_balancer(world, cli, made):
    world.records["tokyo", "global_admin"] = made.record(made.regions("tokyo", [made.candidate("tokyo")]))
    world.records["frankfurt", "regional_admin"] = made.record(made.replicas("f-1"))
    result = await cli.in_thread("explain", made.decision)
    assert result.exit_code == 0
    assert "decided in tokyo" in result.stdout
    assert "decided in frankfurt" in result.stdout
    assert "global, tokyo: served, status 200" in result.stdout


async def test_a_record_kept_by_one_tier_alone(world, cli, made):
    world.records["frankfurt", "regional_admin"] = made.record(made.replicas("f-1"))
    result = await cli.in_thread("explain", made.decision)
    assert result.exit_code == 0
    assert "no global balancer kept a record" in result.stdout
    output = json.loads((await cli.in_thread("explain", made.decision, "--json")).stdout)
    assert (output["global"], list(output["regional"])) == ({}, ["frankfurt"])


async def test_an_unknown_decision_is_one_line_and_code_1(world, cli):
    explained = cli.failed(await cli.in_thread("explain", "0123456789abcdef"), 1)
    assert explained.count("\n") == 1
    assert "no balancer knows decision 0123456789abcdef: unknown, too long ago, or not kept (`logging`" in explained


async def test_a_balancer_that_could_not_be_asked_is_shown(world, cli):
    world.silent.add(("tokyo", "global_admin"))
    explained = cli.failed(await cli.in_thread("explain", "0123456789abcdef"), 3)
    assert "1 balancers could not be asked" in explained


async def test_whose_law_decided_is_shown(answering, cli, request_file):
    law = {"epoch": 4, "source": "etcd", "revision": 17, "author": "ann", "why": "audit"}
    answering.explained["virginia", "global_admin"]["law"] = law
    assert (
        "law of epoch 4, from etcd (revision 17), by ann: audit"
        in (await cli.in_thread("explain", request_file)).stdout
    )


async def test_the_law_in_force_decides_which_balancers_see_the_request(answering, cli, request_file):
    """The file lets `anywhere` be read in Virginia; the law that balancers go by does not."""
    tenant = {"name": "anywhere", "residency": {"processing": {"allow": ["world"]}, "entry": {"allow": ["jp", "de"]}}}
    answering.laws["frankfurt"] = {"epoch": 3, "models": {}, "tenants": [tenant], "author": "ann"}
    answering.laws["tokyo"] = {"epoch": 9, "models": {}, "tenants": [{"name": "broken"}]}
    result = await cli.in_thread("explain", request_file)
    assert "virginia may not read this request (tenant anywhere: entry allows only jp, de)" in result.stderr
    assert "as frankfurt would decide" in result.stdout
    assert ("virginia", "global_admin") not in [(region, role) for region, role, _ in answering.questions]


async def test_the_region_gets_the_model_behind_the_alias(answering, cli):
    answering.explained["virginia", "global_admin"]["model"] = "small"
    explained = await cli.in_thread("explain", "-", stdin='{"model":"auto","prompt":"hello"}')
    assert explained.exit_code == 0
    assert [question["body"]["model"] for _, _, question in answering.questions] == ["auto", "small"]
