"""The network below the links: it delays, loses, repeats and reorders frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.world import World


@dataclass
class Weather:
    """Probabilities per frame, and the spread of its delay. Without spread frames keep
    their order."""

    drop: float = 0.0
    duplicate: float = 0.0
    spoil: float = 0.0
    spread_ms: float = 0.0


class Network:
    """Carries frames between places. A connection between two places may be cut for a while."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.weather = weather
        self._world = world
        self._cut_until_ms: dict[tuple[str, str], float] = {}
        self._last_ms: dict[tuple[str, str], float] = {}

    def cut(self, one: str, other: str, duration_ms: float) -> None:
        """Nothing passes between two places for a while."""
        until_ms = self._world.now_ms + duration_ms
        self._cut_until_ms[one, other] = self._cut_until_ms[other, one] = until_ms

    def heal(self) -> None:
        """From now on everything arrives, once and in order."""
        self.weather = Weather()
        self._cut_until_ms.clear()

    def carry(self, source: str, target: str, data: bytes, arrive: Callable[[bytes], None]) -> None:
        """Take a frame along; `arrive` is called each time that it arrives, in whatever state."""
        world, weather = self._world, self.weather
        if world.now_ms < self._cut_until_ms.get((source, target), 0.0):
            world.count("fault: frame lost in a cut connection")
            return
        if world.chance(weather.drop):
            world.count("fault: frame lost")
            return
        if world.chance(weather.spoil):
            world.count("fault: frame spoilt")
            data = data[: world.random.randrange(len(data))]
        copies = 1
        if world.chance(weather.duplicate):
            world.count("fault: frame repeated")
            copies = 2
        for _ in range(copies):
            self._deliver(source, target, lambda: arrive(data))

    def _deliver(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        world = self._world
        spread_ms = self.weather.spread_ms
        at_ms = world.now_ms + 0.2 + (world.random.random() * spread_ms if spread_ms else 0.0)
        last_ms = self._last_ms.get((source, target), 0.0)
        if at_ms < last_ms:
            if spread_ms:
                world.count("fault: frame overtaken")
            else:
                at_ms = last_ms
        self._last_ms[source, target] = max(at_ms, last_ms)
        world.at(at_ms, arrive)
