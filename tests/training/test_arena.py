"""The environment that the world model learns, and how what it made is measured."""

from __future__ import annotations

import numpy as np

from training.worlds import arena
from training.worlds.recovery import recovered


def test_opposite_keys_move_opposite_ways_and_cancel_out() -> None:
    for one, other in ((0, 1), (2, 3)):
        keys = np.eye(4)
        assert np.array_equal(arena.displacement(keys[one]), -arena.displacement(keys[other]))
        assert arena.displacement(keys[one]).any()
        assert not arena.displacement(keys[one] + keys[other]).any()


def test_the_same_seed_gives_the_same_rollout() -> None:
    first, keys, scenes = arena.rollouts(3, 20, 7, scene_changes=0.1)
    again = arena.rollouts(3, 20, 7, scene_changes=0.1)
    assert np.array_equal(first, again[0])
    assert np.array_equal(keys, again[1])
    assert np.array_equal(scenes, again[2])
    assert not np.array_equal(arena.rollouts(3, 20, 8)[0], first)


def test_the_square_is_where_the_keys_say_in_every_true_frame() -> None:
    frames, keys, _ = arena.rollouts(8, 60, 3, scene_changes=0.02)
    right, found = recovered(frames, keys)
    assert right.all()
    assert found.all()
    shuffled = np.random.default_rng(0).permutation(keys, axis=1)
    assert recovered(frames, shuffled)[0].mean() < 0.6


def test_a_square_that_is_not_there_is_not_found() -> None:
    frames, keys, _ = arena.rollouts(4, 10, 3)
    for wrong in (arena.floors()[:1, None].repeat(11, 1), frames // 2, 0 * frames + 140):
        right, found = recovered(np.broadcast_to(wrong, frames.shape), keys)
        assert not right.any()
        assert not found.any()
    twice = np.maximum(frames, frames[:, :, ::-1])
    assert recovered(twice, keys)[0].mean() < 0.5


def test_the_ball_bounces_off_the_walls_and_the_square() -> None:
    world = arena.Arena(256, 5)
    turned = set()
    for _ in range(200):
        before = world.velocity.copy()
        world.step(np.zeros((256, 4)))
        changed = (world.velocity != before).any(axis=1)
        at_wall = (world.ball == arena.BALL_LOW) | (world.ball == arena.BALL_HIGH)
        turned |= set(at_wall.any(axis=1)[changed].tolist())
        assert (world.ball >= arena.BALL_LOW).all()
        assert (world.ball <= arena.BALL_HIGH).all()
    assert turned == {True, False}
