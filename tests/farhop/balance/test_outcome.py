"""The catalogue of endings: unique, low in cardinality, and not retryable unless nothing was begun."""

import msgspec
import pytest

from farhop.balance import outcome as endings
from farhop.balance.outcome import Outcome, Source, by_reason, catalogue


def test_every_constant_of_the_module_is_in_the_catalogue_once() -> None:
    constants = [value for value in vars(endings).values() if isinstance(value, Outcome)]
    assert sorted(o.reason for o in constants) == sorted(o.reason for o in catalogue())
    assert len({o.reason for o in constants}) == len(constants)
    assert 0 < len(constants) <= 72


@pytest.mark.parametrize("outcome", catalogue(), ids=lambda outcome: outcome.reason)
def test_a_reason_read_from_the_wire_finds_its_outcome(outcome: Outcome) -> None:
    assert by_reason(outcome.reason) is outcome
    assert outcome.reason == outcome.reason.lower()
    assert outcome.reason.replace("_", "").isalnum()


def test_a_reason_of_another_build_is_unknown_and_not_an_error() -> None:
    assert by_reason("no_such_reason") is None
    assert by_reason("") is None


def test_default_is_not_retryable() -> None:
    assert not Outcome(Source.TRANSPORT, "new").retryable


def test_outcomes_after_an_engine_began_or_by_the_clients_fault_are_never_retryable() -> None:
    assert not any(o.retryable for o in catalogue() if o.source in (Source.ENGINE, Source.CLIENT))
    assert not endings.DIED_MID_STREAM.retryable
    assert not endings.UNLAWFUL.retryable
    assert all(o.retryable for o in catalogue() if o.source is Source.REGION)


def test_an_outcome_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        endings.SERVED.retryable = True  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(endings.QUEUE_FULL), type=Outcome) == endings.QUEUE_FULL


def test_whose_fault_an_engines_answer_is() -> None:
    assert {endings.of_answer(status) for status in (200, 204, 301)} == {endings.SERVED}
    clients = {status for status in range(400, 600) if endings.of_answer(status).source is Source.CLIENT}
    assert clients == {400, 404, 413, 415, 422, 501}
    assert {endings.of_answer(status) for status in (401, 403, 408, 429, 500, 503)} == {endings.ENGINE_ERROR}
    assert set(range(500, 600)) - {501} == endings.ENGINES_FAULTS
