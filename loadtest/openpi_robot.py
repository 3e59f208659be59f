"""One robot with the official client; runs in that client's environment, for `loadtest.robots`.

    python loadtest/openpi_robot.py URI STEPS WARM

Prints `ready` when it has warmed up, waits for a line on standard input, takes the steps as
fast as they are answered, and prints the seconds of each as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

rng = np.random.default_rng(0)
observation = {
    "observation/image": rng.integers(0, 255, (224, 224, 3), np.uint8),
    "observation/wrist_image": rng.integers(0, 255, (224, 224, 3), np.uint8),
    "observation/state": rng.random(8, np.float32),
    "prompt": "pick up the cup",
}
policy = WebsocketClientPolicy(sys.argv[1])
steps, warm = int(sys.argv[2]), int(sys.argv[3])
for _ in range(warm):
    policy.infer(observation)
print("ready", flush=True)
sys.stdin.readline()
taken = []
for _ in range(steps):
    begun = time.perf_counter()
    answer = policy.infer(observation)
    taken.append(time.perf_counter() - begun)
    assert answer["actions"].shape == (50, 32)
print(json.dumps(taken))
