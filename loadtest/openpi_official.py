"""openpi-server with a policy that takes MS milliseconds; runs in that server's environment.

python loadtest/openpi_official.py PORT MS
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from openpi_client.base_policy import BasePolicy
from openpi_server import WebsocketPolicyServer

PORT, TAKES_S = int(sys.argv[1]), float(sys.argv[2]) / 1000.0
ACTIONS = np.zeros((50, 32), np.float32)


class Null(BasePolicy):  # type: ignore[misc]
    """Its actions are zeros."""

    def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
        """After a sleep."""
        if TAKES_S:
            time.sleep(TAKES_S)
        return {"actions": ACTIONS}

    def reset(self) -> None:
        """Nothing to reset."""


WebsocketPolicyServer(Null(), "127.0.0.1", PORT, {}).serve_forever()
