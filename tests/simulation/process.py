"""A process: a clock of its own, a loop that takes one thing at a time, an end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from tests.simulation.world import World


class Process(ABC):
    """What runs machines. It may be paused, its clock may jump ahead, and it may die.

    `incarnation` is its name for as long as it lives, `place` that of whatever runs there.
    """

    def __init__(self, world: World, place: str, incarnation: str) -> None:
        self.world = world
        self.place = place
        self.incarnation = incarnation
        self.alive = True
        self.paused = False
        self.jumped_ms = 0.0
        """When its clock last jumped, by that clock."""
        self.ahead_ms = 0.0
        """How far the clock has jumped."""
        self.pause_before_send_ms = 0.0
        """Pause this long between the next decision and what it sends."""
        self.disturbed_ms = world.now_ms
        """When something last kept it from working; its begin at first."""
        self._soon: deque[Callable[[], None]] = deque()
        self._held: deque[Callable[[], None]] = deque()
        self._unsent: deque[Callable[[], None]] = deque()
        self._timer_ms: float | None = None
        self._timers = 0

    @property
    def now_ms(self) -> float:
        """What its own clock says."""
        return self.world.now_ms + self.ahead_ms

    # The loop

    def run(self, action: Callable[[], None]) -> None:
        """Do `action` and what it causes, as one turn of the loop; later while paused."""
        if not self.alive:
            return
        if self.paused:
            self._held.append(action)
            return
        action()
        self.turn_ended()
        while self._soon:
            while self._soon:
                self._soon.popleft()()
            self.turn_ended()
        self.arm()

    def soon(self, action: Callable[[], None]) -> None:
        """Do `action` before the present turn of the loop ends."""
        self._soon.append(action)

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay_ms`, in a turn of its own."""
        self.world.after(delay_ms, lambda: self.run(action))

    def leave(self, send: Callable[[], None]) -> None:
        """Something leaves the process: at once, or when it goes on after a pause."""
        if self.pause_before_send_ms:
            duration_ms, self.pause_before_send_ms = self.pause_before_send_ms, 0.0
            self.world.count("fault: paused between a decision and its send")
            self.pause(duration_ms)
        if self.paused:
            self._unsent.append(send)
        else:
            send()

    # Faults

    def pause(self, duration_ms: float) -> None:
        """Stop for `duration_ms`; what comes meanwhile waits."""
        if not self.alive or self.paused:
            return
        self.world.note(self.place, f"paused for {duration_ms:.0f} ms")
        self.paused = True
        self.world.after(duration_ms, self.resume)

    def resume(self) -> None:
        """Go on: what was decided leaves, what came is read, then the clock is looked at."""
        if not self.alive or not self.paused:
            return
        self.world.note(self.place, "goes on")
        self.paused = False
        self.disturbed_ms = self.world.now_ms
        unsent, self._unsent = self._unsent, deque()
        for send in unsent:
            send()
        held, self._held = self._held, deque()
        for action in held:
            self.run(action)
        self.run(self._fire)

    def jump(self, ahead_ms: float) -> None:
        """The clock jumps ahead, as after a suspended machine."""
        self.world.note(self.place, f"clock jumps {ahead_ms:.0f} ms ahead")
        self.ahead_ms += ahead_ms
        self.jumped_ms = self.now_ms
        self.disturbed_ms = self.world.now_ms
        if not self.paused:
            self.run(self._fire)

    def die(self) -> None:
        """End at once; nothing of it is left but what others hold."""
        self.world.note(self.place, f"{self.incarnation} dies")
        self.alive = False

    # Deadlines

    def arm(self) -> None:
        """See to it that the next deadline is met."""
        deadline_ms = self.deadline_ms()
        if deadline_ms is None:
            return
        when_ms = deadline_ms - self.ahead_ms
        if self._timer_ms is None or when_ms < self._timer_ms:
            self._timers += 1
            self._timer_ms = when_ms
            self.world.at(when_ms, lambda number=self._timers: self._due(number))  # type: ignore[misc]

    def _due(self, number: int) -> None:
        if number == self._timers and not self.paused:
            self._timer_ms = None
            self.run(self._fire)

    def _fire(self) -> None:
        self._timer_ms = None
        self._timers += 1
        self.tick(self.now_ms)
        deadline_ms = self.deadline_ms()
        if deadline_ms is not None and deadline_ms <= self.now_ms:
            self.world.fail(
                "deadlines", f"{self.place} is due at {deadline_ms} again at {self.now_ms}"
            )

    @abstractmethod
    def deadline_ms(self) -> float | None:
        """The next deadline of all its machines, by its own clock."""

    @abstractmethod
    def tick(self, now_ms: float) -> None:
        """Tell the machines whose deadline has come."""

    @abstractmethod
    def turn_ended(self) -> None:
        """A turn of the loop ends: what it collected leaves."""
