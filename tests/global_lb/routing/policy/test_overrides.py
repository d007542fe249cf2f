"""OperatorOverrides end by themselves, and a tenant's pin goes before a model's."""

from global_lb.routing.policy import Bias, OperatorOverrides, Pin


def test_overrides_end_at_their_own_time() -> None:
    words = OperatorOverrides({"x": Bias("x", 5.0, "w", "a", 10.0)}, {("model", "m"): Pin("x", False, "w", "a", 20.0)})
    assert (words.bias_ms(9.9), words.bias_ms(10.0)) == ({"x": 5.0}, {})
    assert words.pin("t", "m", 19.9).region == "x"
    assert words.pin("t", "m", 20.0) is None
    assert words.pin("t", "other", 1.0) is None


def test_a_tenants_pin_goes_first() -> None:
    pins = {("tenant", "t"): Pin("y", True, "w", "a", 10.0), ("model", "m"): Pin("x", False, "w", "a", 20.0)}
    words = OperatorOverrides(pins=pins)
    assert [words.pin("t", "m", now).region for now in (1.0, 15.0)] == ["y", "x"]
