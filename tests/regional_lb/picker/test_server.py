from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from inprocess import until
from picking import CHAT, asked, body, sent, stage

from regional_lb.picker.server import LIVENESS, READINESS, SERVICE

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_is_answered_by_the_names_of_the_protocol() -> None:
    async with stage(1) as one, grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def health_of(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        assert [await health_of(name) for name in ("", LIVENESS, READINESS, SERVICE)] == [SERVING] * 4
        with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'other' here"):
            await health_of("other")
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        one.picker.stopping = True  # it drains: alive, and nothing more is to come
        assert [await health_of(name) for name in (LIVENESS, READINESS, SERVICE)] == [SERVING, NOT_SERVING, NOT_SERVING]
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_draining_answers_who_waits_and_keeps_nothing() -> None:
    async with stage(1, slots=1, queue={"wait_s": 60}) as one:
        first, second = one.stream(), one.stream()
        for stream in (first, second):
            one.picker.open_streams.add(stream)
            stream.take(asked())
            stream.take(body(CHAT))
        assert sent(second) == []  # it waits
        await one.picker.emptied(0.0)
        for stream in (first, second):
            stream.expel()
        assert sent(second)[0].immediate_response.status.code == 503
        assert first.is_over
        one.picker.open_streams.clear()
        await until(lambda: not any(one.held))


async def test_status_warns_of_gateways_that_fail_open() -> None:
    async with stage(1, picker={"failure_mode": "FailOpen"}) as one:
        (found,) = one.balancer.tier_admin.status()["picker"]["trouble"]
        assert found.startswith("picker.failure_mode is FailOpen: while no picker answers, gateways send requests past")
        assert one.picker.fails_open([])
    async with stage(1) as one:
        assert one.balancer.tier_admin.status()["picker"]["trouble"] == []
        assert not one.picker.fails_open([])
        (found,) = one.picker.status(["kubernetes gpus pool llama"])["trouble"]
        assert found.startswith("kubernetes gpus pool llama says FailOpen")
