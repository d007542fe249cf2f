"""An engine that does not accept our key for it, or that points elsewhere, is no fault of the client: another replica,
then another region, has the request, and a client that no engine serves learns that the operator must mend it."""

from __future__ import annotations

import pytest
import structlog
from inprocess import MODEL, Engine, both, chat, send, streaming, topology, until
from structlog.testing import capture_logs

from farhop.balance import outcome

WORLD = topology()
POINTS_ELSEWHERE = (301, 307, 308)
CASES = [(status, "engine_key_refused", "set `engine_key`") for status in sorted(outcome.KEY_REFUSALS)]
CASES += [(status, "engine_redirects", "set the `url`") for status in POINTS_ELSEWHERE]


@pytest.mark.parametrize(("status", "code", "_remedy"), CASES)
async def test_a_replica_that_refuses_our_key_or_points_elsewhere_is_passed_over(
    engine: Engine, status: int, code: str, _remedy: str
) -> None:
    async with Engine().running() as other:
        other.behaviour, other.status = "error", status
        replicas = [
            {"url": f"http://{one.address}", "models": [MODEL], "name": name}
            for name, one in (("accepts", engine), ("refuses", other))
        ]
        async with both(engine, WORLD, regional={"replicas": replicas}) as up:
            await until(lambda: all(r["state"] == "up" for r in up.regional.tier_admin.status()["replicas"]))
            for port in (up.entry, up.client):
                answers = [await send(port, chat()) for _ in range(8)]
                assert {answer.status for answer in answers} == {200}
            assert other.seen  # it was asked
            page = up.regional.metrics.render().decode()
            assert f'outcome="{code}"' in page


@pytest.mark.parametrize(("status", "code", "remedy"), CASES)
async def test_client_error_names_the_faulty_party_if_no_engine_answers(
    engine: Engine, status: int, code: str, remedy: str
) -> None:
    async with both(engine, WORLD) as up:
        engine.behaviour, engine.status = "error", status
        answers = [await send(port, chat()) for port in (up.client, up.entry)]
        codes = [(answer.status, answer.json["error"]["code"]) for answer in answers]
        assert codes == [(502, code), (503, "no_region_serving")]
        messages = [answer.json["error"]["message"] for answer in answers]
        assert remedy in messages[0]
        assert code in messages[1]
        assert not any({"www-authenticate", "location"} & set(answer.headers) for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_s_stack_trace_stays_in_the_region(engine: Engine, stream: bool) -> None:
    structlog.reset_defaults()  # another test may have configured where logs go
    with capture_logs() as entries:
        async with both(engine, WORLD) as up:
            engine.behaviour = "error"
            engine.complaint = (
                'Traceback (most recent call last):\n  File "/opt/e.py", line 7, in step\nValueError: hello'
            )
            for port in (up.client, up.entry):
                answer = await send(port, chat(body=streaming() if stream else None))
                assert (answer.status, answer.code) == (500, "engine_error")
                assert b"/opt" not in answer.body
    said = str(entries)
    assert "ValueError at /opt/e.py:7 step" in said
    assert "ValueError: hello" not in said
