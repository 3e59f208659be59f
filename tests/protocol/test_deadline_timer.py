from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protocol.deadline_timer import DeadlineTimer


class Handle:
    """A callback that waits for its time."""

    def __init__(self, callback: Callable[[], None], delay_s: float) -> None:
        self.callback = callback
        self.delay_s = delay_s
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The loop's timers, of which the test says when they fire; `now_ms` is the machine's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_000.25
        self.looks = 0
        self.handles: list[Handle] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._call_later)
        self.timer = DeadlineTimer(self._due, lambda: self.now_ms)

    def _due(self) -> None:
        self.looks += 1

    def _call_later(self, delay_s: float, callback: Callable[[], None], *_: Any) -> Handle:
        self.handles.append(Handle(callback, delay_s))
        return self.handles[-1]

    @property
    def waiting(self) -> list[float]:
        """In how many ms each callback comes that was not cancelled."""
        return [round(h.delay_s * 1000, 6) for h in self.handles if not h.cancelled]

    def fire(self) -> None:
        """The last timer's time has come."""
        handle = self.handles.pop()
        assert not handle.cancelled
        handle.callback()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_nothing_is_waited_for_without_a_deadline(clock: Clock) -> None:
    clock.timer.arm(None)
    assert clock.waiting == []


async def test_the_earliest_deadline_counts_and_one_put_off_is_looked_at_once_more(
    clock: Clock,
) -> None:
    clock.timer.arm(1_050.25)
    clock.timer.arm(1_020.25)
    assert clock.waiting == [20]
    clock.timer.arm(1_090.25)
    clock.timer.arm(None)
    assert clock.waiting == [20]
    clock.fire()
    assert clock.looks == 1
    clock.timer.arm(1_090.25)
    assert clock.waiting == [90]


async def test_a_deadline_is_rounded_up_to_the_whole_ms_and_never_lies_in_the_past(
    clock: Clock,
) -> None:
    clock.timer.arm(1_003.5)
    assert clock.waiting == [4]
    clock.timer.arm(990.0)
    assert clock.waiting == [0]


async def test_a_cancelled_timer_can_be_armed_again(clock: Clock) -> None:
    clock.timer.arm(1_020.25)
    clock.timer.cancel()
    clock.timer.cancel()
    assert clock.waiting == []
    clock.timer.arm(1_050.25)
    assert clock.waiting == [50]
    clock.fire()
    assert clock.looks == 1


async def test_what_changes_a_deadline_often_in_a_loop_turn_arms_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    asked: list[float] = []

    def at_ms() -> float:
        asked.append(1_100.25 - len(asked))
        return asked[-1]

    clock.timer.arm_soon(at_ms)
    clock.timer.arm_soon(at_ms)
    assert clock.waiting == []
    await asyncio.sleep(0)
    assert (len(asked), clock.waiting) == (1, [100])
    clock.timer.arm_soon(at_ms)
    clock.timer.cancel()
    await asyncio.sleep(0)
    assert (len(asked), clock.waiting) == (1, [])
