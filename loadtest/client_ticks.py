"""One robot at a steady rate with Antiphon's own client, whose watchdog covers what no gateway can.

    PYTHONPATH=clients/python python loadtest/client_ticks.py URL RATE_HZ SECONDS

Reads and prints as `loadtest/openpi_ticks.py` does; `reason` is who decided, where that was not
the policy.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from antiphon_client import RobotLoop

RATE_HZ, SECONDS = float(sys.argv[2]), float(sys.argv[3])
PERIOD_MS = 1000.0 / RATE_HZ
observation = {
    "observation/image": np.zeros((224, 224, 3), np.uint8),
    "observation/state": np.zeros(8, np.float32),
    "prompt": "pick up the cup",
}
with RobotLoop.open(
    sys.argv[1],
    "robots",
    safe_action=np.zeros(32, np.float32),
    rate_hz=RATE_HZ,
    deadline_ms=PERIOD_MS,
    max_age_ms=10 * PERIOD_MS,
) as loop:
    while not loop.act(observation).fresh:
        loop.pace()
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    while (at := time.monotonic()) < begun + SECONDS:
        action = loop.act(observation)
        took_ms = (time.monotonic() - at) * 1000.0
        assert action.values.shape == (32,)
        reason = None if action.fresh else f"{action.source}: {action.reason}"
        print(json.dumps([at, took_ms, reason]), flush=True)
        loop.pace()
