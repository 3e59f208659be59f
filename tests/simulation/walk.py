"""Every reachable state of a small instance, breadth first: `python -m tests.simulation.walk`.

Exits with 1 when an invariant does not hold in one of them, with the shortest way there.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from sessions.lifecycle import Lifecycle, State, Trigger
from tests.simulation.instance import Bounds, Broken, Instance

Way = tuple[str, ...]
LIVE = 4_000
"""States that wait to be looked at as they are; others are gone to anew."""


@dataclass
class Walk:
    """What a walk has seen. `failure` is what does not hold, and the way there."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    taken: set[tuple[State, Trigger]] = field(default_factory=set)
    failure: str | None = None
    complete: bool = False


@contextmanager
def _watched(taken: set[tuple[State, Trigger]]) -> Iterator[None]:
    """Note every transition of a session's life."""
    move = Lifecycle.move

    def noted(self: Lifecycle, trigger: Trigger, now_ms: float) -> None:
        taken.add((self.state, trigger))
        move(self, trigger, now_ms)

    Lifecycle.move = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lifecycle.move = move  # type: ignore[method-assign]


def walk(bounds: Bounds | None = None, *, most_states: int | None = None) -> Walk:
    """Visit all states within `bounds`, or the first `most_states` of them."""
    bounds = bounds or Bounds()
    seen = Walk()
    with _watched(seen.taken):
        first = Instance(bounds)
        known: set[int] = {hash(first.value())}
        waiting: deque[tuple[Way, Instance | None]] = deque([((), first)])
        while waiting:
            way, there = waiting.popleft()
            seen.states += 1
            seen.depth = len(way)
            here = there or _at(bounds, way)
            choices = here.choices()
            if (failure := _attempt(here.check)) is not None:
                seen.failure = f"{failure}\nafter: {'; '.join(way)}"
                return seen
            for number, choice in enumerate(choices, 1):
                seen.transitions += 1
                instance = here if number == len(choices) else _at(bounds, way)
                if (failure := _attempt(partial(instance.do, choice))) is not None:
                    seen.failure = f"{failure}\nafter: {'; '.join((*way, choice))}"
                    return seen
                value = hash(instance.value())
                if value not in known:
                    known.add(value)
                    live = instance if len(waiting) < LIVE else None
                    waiting.append(((*way, choice), live))
            if most_states is not None and seen.states >= most_states:
                return seen
    seen.complete = True
    return seen


def _at(bounds: Bounds, way: Way) -> Instance:
    instance = Instance(bounds)
    for choice in way:
        instance.do(choice)
    return instance


def _attempt(what: Callable[[], None]) -> str | None:
    try:
        what()
    except Broken as broken:
        return str(broken)
    except Exception:
        return f"a machine raised:\n{traceback.format_exc()}"
    return None


def main() -> int:
    """Walk, and say what was seen; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.walk", description=__doc__)
    parser.add_argument("--client", type=int, default=Bounds.client)
    parser.add_argument("--faults", type=int, default=Bounds.faults)
    parser.add_argument("--states", type=int)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    bounds = Bounds(client=arguments.client, faults=arguments.faults)
    seen = walk(bounds, most_states=arguments.states)
    print(
        f"{seen.states} states, {seen.transitions} transitions, {seen.depth} deep, "
        f"{'all' if seen.complete else 'not all'}, {time.perf_counter() - started_s:.1f} s"
    )
    if seen.failure is not None:
        print(f"walk: {seen.failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
