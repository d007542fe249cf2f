"""Whatever is done to a link while bytes cross it, what arrives is what was sent: real sockets, both ways at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from farhop_lab.wan.link import Link
from farhop_lab.wan.tunnel import LinkLimits
from tests.conftest import played

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("near"), st.integers(1, 100_000)),
        st.tuples(st.just("far"), st.integers(1, 100_000)),
        st.tuples(st.just("delay"), st.floats(0.0, 6.0)),
        st.tuples(st.just("jitter"), st.floats(0.0, 6.0)),
        st.tuples(st.just("rate"), st.sampled_from([float("inf"), 400.0])),
        st.tuples(st.just("freeze"), st.just(0)),
        st.tuples(st.just("heal"), st.just(0)),
        st.tuples(st.just("wait"), st.floats(0.0, 3.0)),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_received_bytes_equal_sent_bytes(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:

        @given(STEPS)
        @settings(max_examples=played(25), deadline=None, derandomize=True)
        def holds(steps: list[tuple[str, float]]) -> None:
            runner.run(_crosses(steps))

        holds()


async def _crosses(steps: list[tuple[str, float]]) -> None:
    rng = Random(len(steps))
    limits = LinkLimits(flight_bytes_max=150_000, frozen_bytes_max=50_000)  # small, so that the bounds are met
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(Link("a>b", 2.0, 1.0, rng=rng, limits=limits))
        accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_server(lambda *far: accepted.put_nowait(far), "127.0.0.1", 0)
        stack.callback(server.close)
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        near = await asyncio.open_connection("127.0.0.1", link.port)
        near[1].write(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
        assert (await near[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        far = await asyncio.wait_for(accepted.get(), 60.0)
        sent = await _played(steps, link, {"near": near[1], "far": far[1]}, rng)
        got = await asyncio.wait_for(asyncio.gather(near[0].read(), far[0].read()), 60.0)
        for _, writer in (near, far):
            writer.close()
            await writer.wait_closed()
        assert got == [bytes(sent["far"]), bytes(sent["near"])]


async def _played(
    steps: list[tuple[str, float]], link: Link, writers: dict[str, asyncio.StreamWriter], rng: Random
) -> dict[str, bytearray]:
    sent = {"near": bytearray(), "far": bytearray()}
    for step, value in steps:
        match step:
            case "near" | "far":
                data = rng.randbytes(int(value))
                sent[step] += data
                writers[step].write(data)
            case "delay":
                link.set(delay_ms=value)
            case "jitter":
                link.set(jitter_ms=value)
            case "rate":
                link.set(bandwidth_mbps=value)
            case "freeze":
                link.freeze()
            case "heal":
                link.heal()
            case "wait":
                await asyncio.sleep(value / 1000)
    for writer in writers.values():
        writer.write_eof()
    link.heal()
    return sent
