"""Scripted experts: a chunk of actions from what only the simulator knows.

A plan is a pure function of where hand, block and ball are, so an expert can be asked at any
state, also one that a half-trained policy has got itself into (DAgger).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from training.robots.simulator import FOLLOW_M, HAND_HIGH, HAND_LOW, STEP_M, Array, Simulation

LIFT_M = 0.20
HOVER_M = 0.10
GRASPED = 0.60
"""An opening below this, with the block between the fingers, is a grasp."""
CLOSING = 0.25
"""How much the gripper closes or opens in a step, as the plan has it."""


def plan(
    simulation: Simulation, horizon: int, decided: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.float32]:
    """The next `horizon` actions of the task's expert, (horizon, 4), were nothing to happen.

    The first are those that are `decided`, (n, 4), whatever the expert thinks of them: it goes
    on from where they lead.
    """
    hand, opening = simulation.hand, simulation.opening
    block, ball = simulation.block, simulation.ball
    picks = simulation.task.name == "pick"
    actions = np.zeros((horizon, 4), np.float32)
    for index in range(horizon):
        goal, grip = (
            _pick(hand, opening, block) if picks else (ball + np.array([0.0, 0.0, FOLLOW_M]), -1.0)
        )
        move = np.clip(0.6 * (goal - hand) / STEP_M, -1.0, 1.0)
        if decided is not None and index < len(decided):
            move, grip = np.asarray(decided[index][:3], np.float64), float(decided[index][3])
        actions[index] = [*move, grip]
        carried = opening < GRASPED and _between_fingers(hand, block)
        hand = np.clip(hand + STEP_M * move, HAND_LOW, HAND_HIGH)
        if carried:
            block = hand
        narrowest = 0.5 if _between_fingers(hand, block) else 0.0
        opening = max(opening - CLOSING, narrowest) if grip > 0 else min(opening + CLOSING, 1.0)
    return actions


def _between_fingers(hand: Array, block: Array) -> bool:
    gap = np.abs(hand - block)
    return bool(gap[0] < 0.025 and gap[1] < 0.018 and gap[2] < 0.02)


def _pick(hand: Array, opening: float, block: Array) -> tuple[Array, float]:
    """Where the hand should go, and what the gripper should do."""
    if _between_fingers(hand, block):
        if opening < GRASPED:
            return np.array([hand[0], hand[1], LIFT_M]), 1.0
        if np.linalg.norm(hand - block) < 0.010:
            return block, 1.0
    # Down a funnel: the further from above the block, the higher.
    off = float(np.linalg.norm(hand[:2] - block[:2]))
    height = min(HOVER_M, 4.0 * max(0.0, off - 0.008))
    if opening < 0.9:
        height = HOVER_M
    return block + np.array([0.0, 0.0, height]), -1.0
