"""The arena: the environment whose frames the world model learns, many of them at once.

A square that the player moves without inertia, one lattice step a frame and key, on a floor
with walls, and a ball that flies straight on and bounces off the walls and off the square. Its
light side shows where it flies, so that a frame tells all there is to know. Opposite keys cancel
out. Plain numpy: no library of environments, no screen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

SIZE = 64
WALL = 4
PLAYER = 12
BALL = 10
STEP = 4
"""Pixels that the player moves in a frame."""
SPEED = 2
"""Pixels that the ball moves in a frame, each way."""
KEYS = ("up", "down", "left", "right")
SCENES = ("meadow", "dusk", "ice")

LOW, HIGH = WALL, SIZE - WALL - PLAYER
"""Where the player's upper left corner can be."""
BALL_LOW, BALL_HIGH = WALL, SIZE - WALL - BALL

PLAYER_COLOUR = (250, 140, 20)
CORE_COLOUR = (255, 240, 210)
BALL_COLOUR = (235, 30, 90)
LIGHT_COLOUR = (255, 215, 235)
_FLOORS = {
    "meadow": ((60, 130, 60), (75, 150, 70), (30, 60, 30)),
    "dusk": ((60, 55, 110), (75, 70, 130), (25, 20, 55)),
    "ice": ((150, 190, 205), (170, 208, 220), (80, 110, 130)),
}


def floors() -> Bytes:
    """The floor of each scene, (scenes, SIZE, SIZE, 3)."""
    found = np.empty((len(SCENES), SIZE, SIZE, 3), np.uint8)
    rows, columns = np.indices((SIZE, SIZE))
    dark = ((rows // 8 + columns // 8) % 2 == 0)[..., None]
    inside = (np.minimum(rows, columns) >= WALL) & (np.maximum(rows, columns) < SIZE - WALL)
    for index, scene in enumerate(SCENES):
        first, second, wall = (np.array(colour, np.uint8) for colour in _FLOORS[scene])
        found[index] = np.where(inside[..., None], np.where(dark, first, second), wall)
    return found


def displacement(actions: npt.NDArray[Any]) -> Integers:
    """Pixels (rows, columns) that keys held down move the player by, walls left aside."""
    up, down, left, right = np.moveaxis(np.asarray(actions) > 0.5, -1, 0).astype(np.int64)
    return STEP * np.stack([down - up, right - left], axis=-1)


class Arena:
    """Many worlds that go on together; their numbers are along the first axis of everything."""

    def __init__(self, worlds: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._floors = floors()
        self.scenes = self._random.integers(len(SCENES), size=worlds)
        lattice = (HIGH - LOW) // STEP + 1
        self.player = LOW + STEP * self._random.integers(lattice, size=(worlds, 2))
        self.velocity = SPEED * self._random.choice([-1, 1], size=(worlds, 2))
        self.ball = np.empty((worlds, 2), np.int64)
        missing: npt.NDArray[np.bool_] = np.ones(worlds, np.bool_)
        while missing.any():
            places = (BALL_HIGH - BALL_LOW) // SPEED + 1
            anywhere = BALL_LOW + SPEED * self._random.integers(places, size=(worlds, 2))
            self.ball[missing] = anywhere[missing]
            missing = np.logical_and(*self._touching().T)

    def step(self, actions: npt.NDArray[Any], scenes: Integers | None = None) -> None:
        """Go on by a frame with keys held down, (worlds, 4), and perhaps in other scenes."""
        if scenes is not None:
            self.scenes = scenes
        self.player = np.clip(self.player + displacement(actions), LOW, HIGH)
        self.ball = self.ball + self.velocity
        for axis in range(2):
            low, high = self.ball[:, axis] < BALL_LOW, self.ball[:, axis] > BALL_HIGH
            self.velocity[low, axis], self.velocity[high, axis] = SPEED, -SPEED
        self.ball = np.clip(self.ball, BALL_LOW, BALL_HIGH)
        hit = np.logical_and(*self._touching().T)
        if hit.any():
            # It flies away from the middle of the square, on the axis on which it is outermost.
            apart = 2 * self.ball + BALL - 2 * self.player - PLAYER
            axis = np.abs(apart).argmax(axis=1)
            worlds = np.flatnonzero(hit)
            away = np.where(apart[worlds, axis[worlds]] < 0, -SPEED, SPEED)
            self.velocity[worlds, axis[worlds]] = away

    def _touching(self) -> npt.NDArray[np.bool_]:
        apart = self.ball - self.player
        return (apart > -BALL) & (apart < PLAYER)

    def frames(self) -> Bytes:
        """What they look like, (worlds, SIZE, SIZE, 3)."""
        drawn = self._floors[self.scenes]
        _draw(drawn, self.ball, _DISC, BALL_COLOUR)
        _draw(drawn, self.ball + 3 + self.velocity, np.ones((4, 4), np.bool_), LIGHT_COLOUR)
        _draw(drawn, self.player, np.ones((PLAYER, PLAYER), np.bool_), PLAYER_COLOUR)
        _draw(drawn, self.player + 4, np.ones((PLAYER - 8, PLAYER - 8), np.bool_), CORE_COLOUR)
        return drawn


class Player:
    """Somebody who holds keys for a while and then others, in many worlds at once."""

    def __init__(self, worlds: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._held = np.zeros((worlds, len(KEYS)), np.float32)
        self._left = np.zeros(worlds, np.int64)

    def keys(self) -> npt.NDArray[np.float32]:
        """What is held in the next frame, (worlds, 4)."""
        worlds = np.flatnonzero(self._left <= 0)
        if len(worlds):
            kind = self._random.random(len(worlds))
            chosen = np.zeros((len(worlds), len(KEYS)), np.float32)
            vertical, horizontal = self._random.integers(2, size=(2, len(worlds)))
            everywhere = np.arange(len(worlds))
            both = kind < 0.3
            chosen[everywhere, vertical] = both | ((kind >= 0.3) & (kind < 0.58))
            chosen[everywhere, 2 + horizontal] = both | ((kind >= 0.58) & (kind < 0.86))
            odd = kind > 0.97
            chosen[odd] = self._random.integers(2, size=(int(odd.sum()), len(KEYS)))
            self._held[worlds] = chosen
            self._left[worlds] = self._random.integers(1, 13, size=len(worlds))
        self._left -= 1
        return self._held.copy()


def rollouts(
    worlds: int, length: int, seed: int, *, scene_changes: float = 0.0
) -> tuple[Bytes, npt.NDArray[np.float32], Integers]:
    """Frames (worlds, length + 1, SIZE, SIZE, 3), and the keys (worlds, length, 4) and scenes
    (worlds, length) that led to all of them but the first.

    In each frame a scene changes to another with the probability `scene_changes`.
    """
    arena, player = Arena(worlds, seed), Player(worlds, seed + 1)
    random = np.random.default_rng(seed + 2)
    frames = np.empty((worlds, length + 1, SIZE, SIZE, 3), np.uint8)
    keys = np.empty((worlds, length, len(KEYS)), np.float32)
    scenes = np.empty((worlds, length), np.int64)
    frames[:, 0] = arena.frames()
    for index in range(length):
        changed = random.random(worlds) < scene_changes
        others = random.integers(len(SCENES), size=worlds)
        scenes[:, index] = np.where(changed, others, arena.scenes)
        keys[:, index] = player.keys()
        arena.step(keys[:, index], scenes[:, index])
        frames[:, index + 1] = arena.frames()
    return frames, keys, scenes


def find_player(frames: Bytes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Where the square's upper left corner is in frames (..., SIZE, SIZE, 3), and whether it is
    there: at least half of its pixels have its colour, and they lie together."""
    return _find(frames, PLAYER_COLOUR, PLAYER, PLAYER**2 - (PLAYER - 8) ** 2)


def find_ball(frames: Bytes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The same of the ball."""
    return _find(frames, BALL_COLOUR, BALL, int(_DISC.sum()) - 16)


def _find(
    frames: Bytes, colour: tuple[int, int, int], size: int, pixels: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    apart = np.abs(frames.astype(np.int16) - np.array(colour, np.int16)).max(axis=-1)
    like = apart < 60
    count = like.sum(axis=(-2, -1))
    middle, spread = [], []
    for axis in (-1, -2):
        line = like.sum(axis=axis)
        numbers = np.arange(SIZE)
        mean = (line * numbers).sum(-1) / np.maximum(count, 1)
        off = (line * (numbers - mean[..., None]) ** 2).sum(-1) / np.maximum(count, 1)
        middle.append(mean)
        spread.append(np.sqrt(off))
    found = (count >= pixels / 2) & (count <= pixels * 2) & (np.maximum(*spread) < size * 0.6)
    return np.stack(middle, axis=-1) - (size - 1) / 2, found


def _draw(
    frames: Bytes, corners: Integers, shape: npt.NDArray[np.bool_], colour: tuple[int, int, int]
) -> None:
    rows, columns = np.nonzero(shape)
    worlds = np.arange(len(frames))[:, None]
    frames[worlds, corners[:, :1] + rows, corners[:, 1:] + columns] = colour


def _disc() -> npt.NDArray[np.bool_]:
    middle = (BALL - 1) / 2
    rows, columns = np.indices((BALL, BALL)) - middle
    found: npt.NDArray[np.bool_] = rows**2 + columns**2 <= (BALL / 2) ** 2
    return found


_DISC = _disc()
