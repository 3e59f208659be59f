"""The recipe of the world model: twenty steps of it, never the whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from training.worlds import evaluate, train
from training.worlds.train import HELD_OUT, sequences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_twenty_steps_lower_the_loss_and_the_engine_plays_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "arena.safetensors"
    options = ["--steps", "20", "--batch", "1", "--report", "19", "--threads", "1"]
    train.main([*options, "--out", str(weights)])
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert last < first
    assert weights.stat().st_size < 10_000_000
    folder = tmp_path / "measured"
    evaluate.main([str(weights), "--worlds", "2", "--frames", "10", "--out", str(folder)])
    measured = json.loads((folder / "measures.json").read_text())
    assert (measured["worlds"], measured["frames"]) == (2, 10)
    assert measured["calls_per_frame"] == 1
    with Image.open(folder / "strip.png") as picture:
        assert picture.size == (2 * 3 * 64, 2 * (4 * 64 + 4))
    with Image.open(folder / "video.webp") as video:
        assert getattr(video, "n_frames", 1) == 11


WEIGHTS = Path(train.__file__).with_name("arena.safetensors")


def measured(folder: Path, *options: str) -> dict[str, float]:
    """What the committed weights come to in short rollouts."""
    evaluate.main([str(WEIGHTS), "--worlds", "2", "--frames", "40", "--out", str(folder), *options])
    found: dict[str, float] = json.loads((folder / "measures.json").read_text())
    return found


def test_the_committed_world_does_what_keys_say_and_its_weights_are_what_draws(
    tmp_path: Path,
) -> None:
    trained = measured(tmp_path / "trained")
    assert trained["action_recovered"] > 0.95
    assert trained["action_recovered_by_chance"] < 0.5
    assert trained["player_found"] > 0.95
    assert trained["error_of_repeating"] < 0.5
    zeroed = measured(tmp_path / "zeroed", "--zeroed")
    assert zeroed["player_found"] == 0.0
    assert WEIGHTS.stat().st_size < 10_000_000


def test_a_sequence_is_a_sink_and_frames_that_follow_each_other() -> None:
    batch = next(sequences(64, 1))
    steps = batch.times[:, 1:] - batch.times[:, :-1]
    assert (steps[:, 1:] == 1).all()
    assert (steps[:, 0] >= 0).all()
    assert steps[:, 0].max() > 20
    follows = steps == 1
    assert torch.equal(batch.before[:, 1:][follows], batch.frames[:, :-1][follows])
    assert HELD_OUT > 0
