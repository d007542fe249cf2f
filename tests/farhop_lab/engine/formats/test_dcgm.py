"""The exporter's page of emulated GPUs, read by those who read a real one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from farhop_lab.engine.core.faults import Fault, Faults
from farhop_lab.engine.core.profiles import PROFILES
from farhop_lab.engine.core.scheduler import EngineCore
from farhop_lab.engine.formats.dcgm import page
from farhop_lab.world.ports import free_ports
from regional_lb.engines.signals.gpus import fault, read_gpus


def gpu(profile: str = "l4") -> tuple[EngineCore, Faults]:
    return EngineCore(PROFILES[profile]), Faults(lambda: 0.0)


def test_each_replica_is_a_gpu_and_its_figures_are_its_own() -> None:
    broken = gpu("h100")
    broken[1].command(Fault("xid", xid=79))
    text = page([gpu(), broken])
    first, second = read_gpus(text)
    assert (first.index, first.xid, first.temperature_c) == ("0", 0, 34.0)
    assert (second.index, second.xid) == ("1", 79)
    assert fault([first, second], ()) == "GPU 1: XID 79, fell off the bus"
    families = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_FB_USED"} <= families


def test_weights_and_cache_fill_the_memory_and_an_engine_out_of_it_all() -> None:
    ((core, faults),) = [gpu()]
    (before,) = read_gpus(page([(core, faults)]))
    assert before.free_mib is not None
    assert 1000 < before.free_mib < 5000  # 22.5 GiB less 15 of weights, 3 of KV and 2 of other things
    faults.command(Fault("oom"))
    (after,) = read_gpus(page([(core, faults)]))
    assert after.free_mib == 0


async def test_dcgm_page_has_its_own_port(replica: Callable[..., Awaitable[Any]]) -> None:
    (port,) = free_ports(1)
    client = await replica(replicas=2, dcgm_port=port)
    async with client.session.get(f"http://127.0.0.1:{port}/metrics") as response:
        assert [gpu.index for gpu in read_gpus(await response.read())] == ["0", "1"]
