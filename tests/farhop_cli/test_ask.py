"""`farhop ask`: the answer, the decision, the trace; redirects, detours, refusals, and records that the law forbids."""

import json
import re

import pytest

from farhop_cli import evidence
from farhop_cli.ask import gaps


@pytest.fixture
def recorded(world, made):
    reasons = made.regions("virginia", [made.candidate("virginia", ttft_ms=7.5), made.candidate("tokyo")])
    world.records["virginia", "global_admin"] = made.record(reasons)
    world.records["virginia", "regional_admin"] = made.record(made.replicas("v-1"))
    return world


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(evidence, "RECORD_S", 0.1)
    monkeypatch.setattr(evidence, "TRACE_S", 0.1)


async def test_answer_decision_and_trace(recorded, cli, made):
    result = await cli.in_thread("ask", "hello", "-w", "--max-tokens", "3")
    assert result.exit_code == 0
    assert not result.stderr
    assert result.stdout.startswith("the far hop\n")
    for text in (
        "which region: decided in virginia, policy predictive, law of epoch 7",
        "which replica: decided in virginia",
        f"decision {made.decision}",
        "(promised 7.5)",
        "9 prompt tokens (4 cached) + 3 written",
        "gaps between 3 pieces",
        "10 times as fast",
        "llm_request  1 ms",
    ):
        assert text in result.stdout


async def test_request_is_sent_as_expected(recorded, cli):
    await cli.in_thread("ask", "hello", "--tenant", "eu-only", "--from", "tokyo", "--allow", "eu", "--max-tokens", "3")
    ((region, headers, body),) = recorded.requests
    assert region == "tokyo"
    assert headers["authorization"] == "Bearer sk-farhop-eu-only"
    assert headers["x-farhop-allow"] == "eu"
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("llama-3.1-8b", 3, True)


async def test_a_completion_read_from_standard_input(recorded, cli):
    result = await cli.in_thread("ask", "-", "--completion", "--model", "m", stdin="once upon")
    assert result.stdout.startswith("the far hop\n")
    ((_, _, body),) = recorded.requests
    assert (body["prompt"], body["model"]) == ("once upon", "m")
    assert "messages" not in body


async def test_json_is_all_there_is(recorded, cli, made):
    result = await cli.in_thread("ask", "hello", "--json", "-w")
    output = json.loads(result.stdout)
    assert (output["text"], output["status"], output["error"]) == ("the far hop", 200, None)
    assert (output["region"], output["decision"], output["tenant"]) == ("virginia", made.decision, "anywhere")
    assert output["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}
    assert output["global"]["record"]["reasons"]["chosen"] == "virginia"
    assert output["regional"]["record"]["reasons"]["chosen"] == "v-1"
    assert len(output["trace"]["spans"]) == 3
    assert len(output["piece_ms"]) == 3


async def test_a_redirect_is_followed_with_the_key_and_shown(recorded, cli):
    recorded.redirects["virginia"] = recorded.file.regions["tokyo"].entry
    result = await cli.in_thread("ask", "hello", "--tenant", "japan-only")
    assert result.exit_code == 0
    assert re.search(r"virginia \(\S+\) may not read this request and sent us on to tokyo", result.stdout)
    assert [(region, headers["authorization"]) for region, headers, _ in recorded.requests] == [
        ("virginia", "Bearer sk-farhop-japan-only"), ("tokyo", "Bearer sk-farhop-japan-only"),
    ]  # fmt: skip


async def test_a_redirect_out_of_the_world_is_refused(recorded, cli, unused_tcp_port):
    recorded.redirects["virginia"] = f"http://127.0.0.1:{unused_tcp_port}"
    answer = cli.failed(await cli.in_thread("ask", "hello"), 1)
    assert "not trusted with the key" in answer


async def test_an_entry_that_is_gone_is_passed_over(recorded, cli):
    recorded.silent.add(("virginia", "entry"))
    result = await cli.in_thread("ask", "hello", "--from", "virginia")
    assert result.exit_code == 0
    assert "virginia (" in result.stdout
    assert "could not be asked" in result.stdout
    assert [region for region, _, _ in recorded.requests] == ["frankfurt"]


async def test_an_unreachable_entry_is_an_error(recorded, cli):
    recorded.silent |= {(name, "entry") for name in recorded.file.regions}
    assert "no entry could be reached" in cli.failed(await cli.in_thread("ask", "hello"), 2)


async def test_missing_record_is_explained_where_the_law_forbids_it(recorded, cli, made):
    """eu-only may enter in virginia, but be recorded in the EU alone: frankfurt's regional balancer knows."""
    recorded.served_by = "frankfurt"
    del recorded.records["virginia", "global_admin"]
    recorded.records["frankfurt", "regional_admin"] = made.record(made.replicas("f-1"))
    recorded.span_names = ("farhop.regional", "llm_request")
    result = await cli.in_thread("ask", "hello", "--tenant", "eu-only")
    assert result.exit_code == 0
    assert "the law lets no record be kept there: tenant eu-only: logging allows only eu" in result.stdout
    assert "which replica: decided in frankfurt" in result.stdout
    assert "not exported" not in result.stdout  # the entry's spans are not missed


async def test_a_record_kept_against_the_law_would_be_seen(recorded, cli):
    output = json.loads((await cli.in_thread("ask", "hello", "--tenant", "eu-only", "--json")).stdout)
    assert output["global"]["barred"] is True
    assert output["global"]["record"] is not None


async def test_a_refusal_shows_its_code_and_the_reasons_kept(recorded, cli, made):
    recorded.refusal = (503, "no_region_serving")
    reasons = made.regions(None, [], not_serving={"tokyo": "down: no recent report"})
    recorded.records["virginia", "global_admin"] = made.record(reasons, outcome="no_region_serving", attempts=[])
    result = await cli.in_thread("ask", "hello")
    assert cli.failed(result, 1) == "farhop: status 503 (no_region_serving): because of no_region_serving\n"
    assert "not serving: down: no recent report" in result.stdout


async def test_a_refusal_that_may_not_be_kept_is_explained_again(recorded, cli, made):
    recorded.refusal = (451, "no_lawful_region")
    del recorded.records["virginia", "global_admin"]
    reasons = made.regions(None, [], unlawful={"tokyo": "request asked to stay within cn"})
    recorded.explained["virginia", "global_admin"] = {"reasons": reasons}
    result = await cli.in_thread("ask", "hello", "--allow", "cn")
    cli.failed(result, 1)
    assert "law: request asked to stay within cn" in result.stdout
    ((_, _, question),) = recorded.questions
    assert (question["tenant"], question["allow"]) == ("anywhere", ["cn"])


async def test_spans_that_do_not_come_are_named(recorded, cli):
    recorded.span_names = ("farhop.global",)
    result = await cli.in_thread("ask", "hello")
    assert result.exit_code == 0
    assert "not exported within 0.1 s: farhop.regional, llm_request" in result.stdout


async def test_an_entry_outside_any_world(world, cli, tmp_path):
    url = world.file.regions["virginia"].entry
    outside = ("--world", str(tmp_path / "none.json"), "--url", url)
    result = await cli.in_thread("ask", "hello", *outside, "--key", "sk-x", "--model", "m")
    assert result.exit_code == 0
    assert result.stdout.startswith("the far hop\n")
    assert "served by virginia" in result.stdout
    assert "needs --key and --model" in cli.failed(await cli.in_thread("ask", "hello", *outside), 2)


async def test_an_entry_named_in_a_running_world(recorded, cli):
    await cli.in_thread(
        "ask", "hello", "--url", recorded.file.regions["tokyo"].entry + "/", "--key", "sk-farhop-not-us"
    )
    assert [region for region, _, _ in recorded.requests] == ["tokyo"]


@pytest.mark.parametrize(("arguments", "says"), [
    (("", ), "prompt is empty"),
    (("hi", "--url", "nonsense"), "--url"),
    (("hi", "--tenant", "bob"), "--tenant"),
    (("hi", "--from", "Atlantis"), "--from"),
    (("hi", "--allow", "mars"), "--allow"),
    (("hi", "--allow", "eu\r\nx: y"), "--allow"),
    (("hi", "--key", "sk-x\r\nx: y"), "--key"),
    (("h\udcff",), "not UTF-8"),
    (("hi", "--model", "\udcff"), "--model"),
    (("hi", "--tenant", "not-us", "--key", "sk-farhop-eu-only"), "--key"),
])  # fmt: skip
async def test_bad_options_are_one_line_and_send_nothing(world, cli, arguments, says):
    answer = cli.failed(await cli.in_thread("ask", *arguments), 2)
    assert says in answer
    assert answer.count("\n") == 1
    assert not world.requests


def test_error_without_a_world_names_farhop_up(cli, tmp_path):
    assert "farhop up" in cli.failed(cli.run("ask", "hi", "--world", str(tmp_path / "none.json")), 2)


def test_the_gaps_between_pieces_are_summed_up():
    assert gaps([1.0, 3.0, 4.0, 10.0]) == "gaps between 4 pieces: median 2.0 ms · p95 6.0 ms · longest 6.0 ms"
    assert "came in one" in gaps([5.0])
