"""One robot at a steady rate with the official client; runs in that client's environment.

    python loadtest/openpi_ticks.py URI RATE_HZ SECONDS

Prints `ready` when it has had its first answer and waits for a line on standard input. Then it
observes at that rate, and prints a JSON list for each tick: when it began (the machine's
monotonic clock, in seconds), how long its answer took (ms), and why that was not fresh (null: it
was). When the connection breaks it prints when it found out, and what was raised, and ends.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

PERIOD_S, SECONDS = 1.0 / float(sys.argv[2]), float(sys.argv[3])
observation = {
    "observation/image": np.zeros((224, 224, 3), np.uint8),
    "observation/state": np.zeros(8, np.float32),
    "prompt": "pick up the cup",
}
policy = WebsocketClientPolicy(sys.argv[1])
shape = policy.infer(observation)["actions"].shape
print("ready", flush=True)
sys.stdin.readline()
begun = due = time.monotonic()
while due < begun + SECONDS:
    time.sleep(max(0.0, due - time.monotonic()))
    at = time.monotonic()
    try:
        answer = policy.infer(observation)
    except Exception as error:
        print(json.dumps([time.monotonic(), type(error).__name__, "broken"]), flush=True)
        break
    took_ms = (time.monotonic() - at) * 1000.0
    assert answer["actions"].shape == shape
    print(json.dumps([at, took_ms, answer["antiphon"].get("reason")]), flush=True)
    due = max(due + PERIOD_S, at)
