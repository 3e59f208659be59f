"""The policy as an ONNX file that is served as it is: its inputs are the keys of an observation."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from training.robots.collect import ACTIONS, HORIZON, MOST_FROZEN
from training.robots.network import TabletopPolicy
from training.robots.simulator import RATE_HZ, TASKS

INPUTS = (
    "observation/image",
    "observation/wrist_image",
    "observation/state",
    "prompt",
    "action_prefix",
    "action_prefix_length",
)
TRIED = 8


def export(policy: TabletopPolicy, path: Path) -> dict[str, Any]:
    """Write the file, hold it against the policy, and say how it compares."""
    policy.eval()
    examples = _examples(2)
    batch = torch.export.Dim("batch", min=1, max=1024)
    program = torch.onnx.export(
        policy,
        examples,
        input_names=list(INPUTS),
        output_names=["actions"],
        dynamic_shapes=tuple({0: batch} for _ in INPUTS),
        external_data=False,
    )
    assert program is not None
    model = program.model_proto
    said = {
        "prompts": [task.prompt for task in TASKS.values()],
        "metadata": {
            "policy": "tabletop",
            "action_horizon": HORIZON,
            "action_dim": ACTIONS,
            "rate_hz": RATE_HZ,
        },
    }
    onnx.helper.set_model_props(model, {"antiphon": json.dumps(said)})
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    tried = _examples(TRIED)
    with torch.inference_mode():
        expected = policy(*tried).numpy()
    (actions,) = session.run(
        ["actions"], {name: each.numpy() for name, each in zip(INPUTS, tried, strict=True)}
    )
    return {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "largest_difference": float(np.abs(actions - expected).max()),
    }


def _examples(count: int) -> tuple[torch.Tensor, ...]:
    """Observations of no world."""
    chance = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (2, count, 64, 64, 3), generator=chance, dtype=torch.uint8)
    return (
        images[0],
        images[1],
        torch.rand(count, ACTIONS, generator=chance),
        torch.arange(count) % len(TASKS),
        torch.rand(count, MOST_FROZEN, ACTIONS, generator=chance),
        torch.arange(count) % (MOST_FROZEN + 1),
    )
