"""When places become free: against sessions whose lengths are drawn from known distributions."""

from __future__ import annotations

import random

import pytest

from sessions.forecast import EXPECTED, Forecast, Holder

SURE = 1.2816
"""Standard deviations: nine times in ten."""


def learned(*lengths_ms: float) -> Forecast:
    forecast = Forecast()
    for held_ms in lengths_ms:
        forecast.ended("voice", held_ms)
    return forecast


def test_nothing_is_said_before_anything_was_seen() -> None:
    assert Forecast().wait_ms([Holder("voice", 10.0)], 1, SURE) is None
    assert learned(100.0).wait_ms([Holder("world", 10.0)], 1, SURE) is None
    assert learned(100.0).wait_ms([], 1, SURE) is None


def test_a_place_that_is_free_needs_no_waiting() -> None:
    assert Forecast().wait_ms([], 0, SURE) == 0.0


def test_who_has_held_longer_than_anybody_is_not_expected_to_end() -> None:
    assert learned(100.0, 200.0).wait_ms([Holder("voice", 300.0)], 1, EXPECTED) is None


@pytest.mark.parametrize("held_ms", [0.0, 4_000.0, 9_000.0])
def test_sessions_of_one_length_end_when_they_have_lasted_it(held_ms: float) -> None:
    forecast = learned(*[10_000.0] * 20)
    for certainty in (EXPECTED, SURE):
        found = forecast.wait_ms([Holder("voice", held_ms)], 1, certainty)
        assert found == pytest.approx(10_000.0 - held_ms, abs=60.0)


def test_more_places_take_longer_and_a_place_that_is_sure_too() -> None:
    forecast = learned(*[1_000.0 * n for n in range(1, 41)])
    holders = [Holder("voice", 500.0 * n) for n in range(10)]
    sure = [forecast.wait_ms(holders, places, SURE) or 0.0 for places in (1, 2, 3, 4)]
    expected = [forecast.wait_ms(holders, places, EXPECTED) or 0.0 for places in (1, 2, 3, 4)]
    assert all(sure + expected)
    assert sure == sorted(sure)
    assert all(late > early for late, early in zip(sure, expected, strict=True))


def test_only_the_last_sessions_count() -> None:
    forecast = learned(*[60_000.0] * 128, *[1_000.0] * 128)
    found = forecast.wait_ms([Holder("voice", 0.0)], 1, SURE)
    assert found == pytest.approx(1_000.0, abs=10.0)


def test_free_within_agrees_with_the_wait() -> None:
    forecast = learned(*[1_000.0 * n for n in range(1, 41)])
    holders = [Holder("voice", 700.0 * n) for n in range(7)]
    wait_ms = forecast.wait_ms(holders, 2, SURE)
    assert wait_ms is not None
    assert forecast.free_within(holders, wait_ms, 2, SURE)
    assert not forecast.free_within(holders, wait_ms * 0.9, 2, SURE)


@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("holders", [3, 8, 200])
@pytest.mark.parametrize("shape", ["exponential", "uniform"])
def test_nine_of_ten_times_the_places_are_free(shape: str, holders: int, places: int) -> None:
    """Drawn anew from the true distribution, at least 85 % of 2,000 times: the history is a
    sample of it too."""
    drawn = random.Random(f"{shape} {holders} {places}")

    def length_ms() -> float:
        if shape == "exponential":
            return drawn.expovariate(1 / 10_000.0)
        return drawn.uniform(2_000.0, 20_000.0)

    kept = tried = 0
    while tried < 2_000:
        forecast = learned(*(length_ms() for _ in range(128)))
        ages: list[tuple[float, float]] = []
        while len(ages) < holders:
            length = length_ms()
            ages.append((length, drawn.uniform(0.0, length)))
        sample = [Holder("voice", age) for _, age in ages]
        wait_ms = forecast.wait_ms(sample, places, SURE)
        if wait_ms is None:
            continue
        for _ in range(40):
            left = []
            for _, age in ages:
                while (length := length_ms()) <= age:
                    pass
                left.append(length - age)
            tried += 1
            kept += sorted(left)[places - 1] <= wait_ms
    assert kept / tried >= 0.85


def test_who_comes_later_holds_a_place_from_then_on() -> None:
    forecast = learned(*[10_000.0] * 100)
    holders = [Holder("voice", 4_000.0), Holder("voice", -6_000.0)]
    assert forecast.wait_ms(holders, 1, SURE) == pytest.approx(6_000.0, abs=80.0)
    assert forecast.wait_ms(holders, 2, SURE) == pytest.approx(16_000.0, abs=80.0)


def test_little_that_was_seen_says_little() -> None:
    assert learned(*[10_000.0] * 3).wait_ms([Holder("voice", 0.0)], 1, SURE) is None
    assert learned(*[10_000.0] * 30).wait_ms([Holder("voice", 0.0)], 1, SURE) is not None
