"""What a DCGM exporter's page says, and what of it is a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from regional_lb.engines.signals.exposition import PageError
from regional_lb.engines.signals.gpus import Gpu, fault, read_gpus, strain

PAGE = (Path(__file__).parent / "pages" / "dcgm.txt").read_bytes()
FIRST, SECOND = Gpu("0", "GPU-5f0c1d2e", 31, 61.0, 4021.0), Gpu("1", "GPU-9a8b7c6d", 79, 92.0, 80994.0)


def test_a_page_as_dcgm_writes_it() -> None:
    assert read_gpus(PAGE) == (FIRST, SECOND)


def test_parts_of_a_gpu_count_as_one_and_the_worst_counts() -> None:
    lines = [
        b'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="u",GPU_I_ID="1"} 0',
        b'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="u",GPU_I_ID="2"} 48',
        b'DCGM_FI_DEV_FB_FREE{gpu="0",UUID="u",GPU_I_ID="1"} 100',
        b'DCGM_FI_DEV_FB_FREE{gpu="0",UUID="u",GPU_I_ID="2"} 50',
    ]
    assert read_gpus(b"\n".join(lines) + b"\n") == (Gpu("0", "u", 48, None, 50.0),)


@pytest.mark.parametrize("xids", [(79, 109), (109, 79), (0, 79), (79, 31)])
def test_a_fatal_xid_of_one_part_is_not_hidden_by_a_larger_one_of_another(xids: tuple[int, ...]) -> None:
    row = b'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="u",GPU_I_ID="%d"} %d\n'
    gpus = read_gpus(b"".join(row % one for one in enumerate(xids)))
    assert fault(gpus, ()) == "GPU 0: XID 79, fell off the bus"


@pytest.mark.parametrize("number", [b"NaN", b"-1", b"1e9", b"x"])
def test_a_value_out_of_range_is_unknown(number: bytes) -> None:
    assert read_gpus(b'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="u"} %b\n' % number) == (Gpu("0", "u"),)


@pytest.mark.parametrize("text", [b"", b"<html></html>\n", b"vllm:num_requests_waiting 1\n"])
def test_another_page_is_refused(text: bytes) -> None:
    with pytest.raises(PageError, match=r"is this DCGM's\?"):
        read_gpus(text)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ((), "GPU 1: XID 79, fell off the bus"),
        (("0",), ""),
        (("0", "1"), "GPU 1: XID 79, fell off the bus"),
        (("GPU-9a8b7c6d",), "GPU 1: XID 79, fell off the bus"),
        (("7",), ""),
    ],
)
def test_only_faults_of_own_gpus_count(mine: tuple[str, ...], message: str) -> None:
    """XID 31 of the first is its application's own."""
    assert fault((FIRST, SECOND), mine) == message


@pytest.mark.parametrize(
    ("mine", "hottest_c", "least_mib", "message"),
    [
        ((), 95.0, 0.0, ""),
        ((), 90.0, 0.0, "GPU 1: 92 °C, above 90"),
        (("0",), 90.0, 0.0, ""),
        ((), 95.0, 5000.0, "GPU 0: 4021 MiB free, below 5000"),
        (("GPU-9a8b7c6d",), 95.0, 5000.0, ""),
    ],
)
def test_only_strain_of_own_gpus_counts(
    mine: tuple[str, ...], hottest_c: float, least_mib: float, message: str
) -> None:
    assert strain((FIRST, SECOND), mine, hottest_c, least_mib) == message
    assert strain((Gpu("0", "u"),), mine, hottest_c, least_mib) == ""  # a missing value marks no GPU as strained
