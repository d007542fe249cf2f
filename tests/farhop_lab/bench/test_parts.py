"""Counts, not times: more frames or calls for a request or a chunk are seen however busy the machine is."""

from __future__ import annotations

import sys

import pytest

from farhop_lab.bench import parts, tiers

# As counted beside four others that kept the machine busy: 193 and 403 frames, 289 and 623 calls. Above that is what
# a busier one adds: two frames (a chunk: two a tier), 3 to 5 % of calls. Lower them with every change that saves
# something; to raise one is to say in its commit what it buys.
FRAMES_MAX = {"farhop regional": (195, 12), "both tiers": (405, 24)}
C_CALLS_MAX = {"farhop regional": (297, 22), "both tiers": (650, 44)}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted for Python 3.11: others make other frames of it")
@pytest.mark.parametrize("tier", [tiers.OURS[0], tiers.OURS[2]], ids=lambda tier: tier.name)
async def test_a_request_and_a_chunk_are_made_of_no_more_parts_than_before(tier: tiers.Tiers) -> None:
    if (missing := tier.missing()) is not None:
        pytest.skip(missing)
    async with parts.counted(tier) as row:
        request, chunk = await row.requests(), await row.chunks()
    frames, c_calls = (request.frames, chunk.frames), (request.c_calls, chunk.c_calls)
    functions = request.functions, chunk.functions
    assert all(now <= most for now, most in zip(frames, FRAMES_MAX[tier.name], strict=True)), (frames, functions)
    assert all(now <= most for now, most in zip(c_calls, C_CALLS_MAX[tier.name], strict=True)), c_calls
