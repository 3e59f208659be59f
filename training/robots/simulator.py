"""Two table-top tasks in MuJoCo, observed as an OpenPI client would observe a robot.

A gripper on a gantry, a green block and a red ball. What the policy is given is two cameras,
where the gripper is, how far it is open, and the words of the task: never where block or ball
are. Both change place in mid-episode, so that who does not look on fails.

Needs mujoco and numpy, nothing of Antiphon, so that it runs in the environment of the official
client.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

os.environ.setdefault("MUJOCO_GL", "egl")
import mujoco

Array = npt.NDArray[np.float64]
Images = Literal["live", "blank", "frozen"]

RATE_HZ = 20
SUBSTEPS = 10
STEP_M = 0.02
"""How far an action of 1 moves the hand along an axis in one step."""
HAND_LOW = np.array([-0.32, -0.22, 0.02])
HAND_HIGH = np.array([0.32, 0.22, 0.32])
START_LOW = np.array([-0.28, -0.18, 0.14])
START_HIGH = np.array([0.28, 0.18, 0.28])
OBJECT_LOW = np.array([-0.26, -0.16])
OBJECT_HIGH = np.array([0.26, 0.16])
OPEN_M = 0.04
"""How far each finger is from the middle when the gripper is open."""
BLOCK_M = 0.02
"""Half an edge of the block: where its centre lies on the table."""
BALL_M = 0.025
FOLLOW_M = 0.05
"""The hand follows this high above the ball's centre, and may be as far from there."""


@dataclass(frozen=True)
class Task:
    """One task: the words that the policy is given, and when it has been done."""

    name: str
    prompt: str
    max_steps: int
    """Steps after which an episode that has not succeeded has failed."""
    hold_steps: int
    """Steps in a row for which the condition must hold."""


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        # The block is taken away and put elsewhere the first time the hand comes near it;
        # done once it has been 8 cm above the table for a quarter of a second.
        Task("pick", "pick up the green block", max_steps=120, hold_steps=5),
        # The ball rolls, turns, and once jumps; done once the hand has been with it for a second.
        Task("follow", "follow the red ball", max_steps=120, hold_steps=20),
    )
}


class Simulation:
    """One robot with its world, from a seed. Not safe to share between threads.

    `images`: `live`; `blank`, all black; or `frozen`, those of the first frame for the whole
    episode. The same task and seed give the same world, whatever the images are.
    """

    tasks = tuple(TASKS)
    rate_hz = float(RATE_HZ)
    training_seeds = range(0, 100_000)
    """No episode is judged that the policy may have been trained on."""

    def __init__(
        self, task: str, seed: int, *, image_size: int = 64, images: Images = "live"
    ) -> None:
        """Raises KeyError for a task that is none of TASKS."""
        self.task = TASKS[task]
        self.images = images
        self._size = image_size
        self._model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("scene.xml")))
        self._data = mujoco.MjData(self._model)
        self._renderer: Any = None
        self._velocity: Array = np.zeros(2)
        self.reset(seed)

    @property
    def max_steps(self) -> int:
        """Steps that an episode has."""
        return self.task.max_steps

    @property
    def succeeded(self) -> bool:
        """Whether the task has been done; once it has, it stays done."""
        return self._succeeded

    @property
    def over(self) -> bool:
        """Whether the episode has succeeded or its steps are used up."""
        return self._succeeded or self.steps >= self.task.max_steps

    def reset(self, seed: int) -> None:
        """Begin the episode of that seed."""
        self._random = np.random.default_rng([seed, sorted(TASKS).index(self.task.name)])
        self.steps = 0
        self.displaced_at: int | None = None
        self._held = 0
        self._succeeded = False
        self._first: dict[str, npt.NDArray[np.uint8]] | None = None
        mujoco.mj_resetData(self._model, self._data)
        block, ball = self._apart(), np.zeros(2)
        ball = self._apart(block)
        start = self._random.uniform(START_LOW, START_HIGH)
        self._data.qpos[:3] = self._data.ctrl[:3] = start
        self._data.qpos[3:5] = self._data.ctrl[3:5] = OPEN_M
        self._place_block(block)
        self._data.mocap_pos[0] = [*ball, BALL_M]
        self._jump_step = int(self._random.integers(15, 45))
        self._turn()
        mujoco.mj_forward(self._model, self._data)

    def observe(self) -> dict[str, Any]:
        """What an OpenPI client sends: images uint8 (height, width, 3), state float32, prompt."""
        images = self._draw()
        return {
            "observation/image": images["front"],
            "observation/wrist_image": images["wrist"],
            "observation/state": np.array([*self.hand, self.opening], np.float32),
            "prompt": self.task.prompt,
        }

    def step(self, action: npt.ArrayLike) -> None:
        """One control step, 1 / rate_hz seconds of the world.

        `action`: x, y, z in units of STEP_M, and the gripper, -1 open to 1 closed; what is
        beyond -1..1 counts as that. Raises ValueError for another shape or what is not finite.
        """
        values = np.asarray(action, np.float64)
        if values.shape != (4,) or not np.isfinite(values).all():
            raise ValueError("an action is four finite numbers")
        values = np.clip(values, -1.0, 1.0)
        # From where the hand is, so that a hand that is held up does not wind up.
        goal = self._data.ctrl[:3] + STEP_M * values[:3]
        goal = np.clip(goal, self.hand - 1.5 * STEP_M, self.hand + 1.5 * STEP_M)
        self._data.ctrl[:3] = np.clip(goal, HAND_LOW, HAND_HIGH)
        self._data.ctrl[3:5] = OPEN_M * (1.0 - values[3]) / 2.0 - 0.004 * (values[3] > 0)
        self._move_objects()
        mujoco.mj_step(self._model, self._data, SUBSTEPS)
        mujoco.mj_forward(self._model, self._data)
        self.steps += 1
        self._held = self._held + 1 if self._condition() else 0
        self._succeeded = self._succeeded or self._held >= self.task.hold_steps

    def hold(self, last: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """The action that leaves the hand where it is, and the gripper as it was told last."""
        return np.array([0.0, 0.0, 0.0, -1.0 if last is None else last[3]], np.float32)

    @property
    def hand(self) -> Array:
        """Where the point between the finger tips is, in metres."""
        position: Array = self._data.qpos[:3].copy()
        return position

    @property
    def opening(self) -> float:
        """How far the gripper is open: 0 closed, 1 open; half an open one with the block."""
        return float(self._data.qpos[3:5].sum() / (2.0 * OPEN_M))

    @property
    def block(self) -> Array:
        """The block's centre. For experts and judges, never for a policy."""
        position: Array = self._data.qpos[5:8].copy()
        return position

    @property
    def ball(self) -> Array:
        """The ball's centre. For experts and judges, never for a policy."""
        position: Array = self._data.mocap_pos[0].copy()
        return position

    def close(self) -> None:
        """Give the drawing context back."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _condition(self) -> bool:
        if self.task.name == "pick":
            lifted = self.block[2] > BLOCK_M + 0.08
            return bool(lifted and self.displaced_at is not None)
        goal = self.ball + np.array([0.0, 0.0, FOLLOW_M])
        near = np.linalg.norm(self.hand - goal) < FOLLOW_M
        return bool(near and self.displaced_at is not None)

    def _move_objects(self) -> None:
        if self.task.name == "pick":
            near = np.linalg.norm(self.hand[:2] - self.block[:2]) < 0.09
            if self.displaced_at is None and near:
                self._place_block(self._apart(self.block[:2], self.ball[:2], away=0.15))
                self.displaced_at = self.steps
            return
        ball = self.ball[:2]
        if self.displaced_at is None and self.steps >= self._jump_step:
            ball = self._apart(self.block[:2], ball, away=0.15)
            self.displaced_at = self.steps
        if self._random.random() < 0.03:
            self._turn()
        ball = ball + self._velocity / RATE_HZ
        # It rebounds from the edges of its field and from the block.
        outside = (ball < OBJECT_LOW) | (ball > OBJECT_HIGH)
        back = -np.sign(ball) * np.abs(self._velocity)
        self._velocity = np.asarray(np.where(outside, back, self._velocity))
        gap = ball - self.block[:2]
        if np.linalg.norm(gap) < 0.08:
            away = gap / np.linalg.norm(gap)
            self._velocity += away * (np.linalg.norm(self._velocity) - self._velocity @ away)
            self._velocity *= self._speed / np.linalg.norm(self._velocity)
        self._data.mocap_pos[0, :2] = np.clip(ball, OBJECT_LOW, OBJECT_HIGH)

    def _turn(self) -> None:
        self._speed = self._random.uniform(0.04, 0.10)
        angle = self._random.uniform(0.0, 2.0 * np.pi)
        self._velocity = self._speed * np.array([np.cos(angle), np.sin(angle)])

    def _place_block(self, place: Array) -> None:
        yaw = self._random.uniform(-0.15, 0.15)
        self._data.qpos[5:12] = [*place, BLOCK_M, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
        self._data.qvel[5:11] = 0.0

    def _apart(self, *others: Array, away: float = 0.12) -> Array:
        """A random place on the table that is that far from the others, in metres."""
        while True:
            place = self._random.uniform(OBJECT_LOW, OBJECT_HIGH)
            if all(np.linalg.norm(place - other) >= away for other in others):
                return place

    def _draw(self) -> dict[str, npt.NDArray[np.uint8]]:
        shape = (self._size, self._size, 3)
        if self.images == "blank":
            return {name: np.zeros(shape, np.uint8) for name in ("front", "wrist")}
        if self.images == "frozen" and self._first is not None:
            return self._first
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self._model, self._size, self._size)
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[flag] = 0
        drawn = {}
        for name in ("front", "wrist"):
            self._renderer.update_scene(self._data, name)
            drawn[name] = self._renderer.render()
        if self._first is None:
            self._first = drawn
        return drawn
