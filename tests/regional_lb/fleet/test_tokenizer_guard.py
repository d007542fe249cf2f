"""A tokenizer is trusted for each shape of request separately, and checked by what was cached, too."""

from __future__ import annotations

from regional_lb.fleet.tokenizer_guard import Shape, TokenizerGuard

PLAIN, TOOLS = Shape("m", "team", "chat"), Shape("m", "team", "chat+tools")


def test_a_tokenizer_is_gone_by_until_it_counts_wrong_thrice_in_a_row() -> None:
    guard = TokenizerGuard()
    for one in (11, 11, 10, 11, 11):
        guard.counted(TOOLS, 10, one)
        assert guard.believes(TOOLS)
    guard.counted(TOOLS, 10, 11)
    assert not guard.believes(TOOLS)
    assert guard.believes(PLAIN)
    assert (guard.miscounts, guard.distrusted) == (5, [TOOLS])
    guard.counted(TOOLS, 10, 10)
    assert guard.believes(TOOLS)
    assert not guard.distrusted


def test_a_tokenizer_with_right_counts_and_wrong_predictions_is_detected() -> None:
    guard = TokenizerGuard()
    for _ in range(3):
        assert guard.believes(TOOLS)
        guard.counted(TOOLS, 900, 900)
        guard.cached(TOOLS, 0.0, 768, 0.0)  # it had most of it cached, and reports none even now
    assert (guard.believes(TOOLS), guard.believes(PLAIN), guard.mispredictions) == (False, True, 3)


def test_a_late_answer_is_no_misprediction() -> None:
    guard = TokenizerGuard()
    for _ in range(9):
        guard.cached(PLAIN, 0.0, 768, 896.0)  # another of the same prompt was computed at the same time
    assert (guard.believes(PLAIN), guard.mispredictions) == (True, 0)
    for _ in range(3):
        guard.cached(PLAIN, 768.0, 0, 896.0)  # it reported the hit
    assert not guard.believes(PLAIN)


def test_a_doubted_shape_is_tried_again() -> None:
    guard = TokenizerGuard()
    for _ in range(3):
        guard.cached(TOOLS, 0.0, 768, 0.0)
    believed = []
    for _ in range(48):
        believed.append(guard.believes(TOOLS))
        guard.counted(TOOLS, 900, 900)
    assert [place for place, right in enumerate(believed) if right] == [15, 31, 47]
    guard.cached(TOOLS, 768.0, 768, 768.0)  # the template was repaired
    assert guard.believes(TOOLS)


def test_uncached_prompt_does_not_restore_trust_in_a_shape() -> None:
    guard = TokenizerGuard()
    for _ in range(3):
        guard.cached(TOOLS, 0.0, 768, 0.0)
    guard.cached(TOOLS, 0.0, 0, 0.0)
    assert not guard.believes(TOOLS)


def test_memory_is_bounded() -> None:
    guard = TokenizerGuard()
    for n in range(5000):
        guard.counted(Shape("m", str(n), "chat"), 1, 2)
    assert len(guard.mismatches) == 4096
