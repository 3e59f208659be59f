"""Policies for tests of the engine and of its surfaces."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from protocol.errors import InvalidRequest
from workers.engines.vla import Batch, Inferred, Policy
from workers.engines.vla.policy import State

HORIZON, DIMENSIONS = 4, 2


class Counting(Policy):
    """Each action is the number of the observation in its session, plus its `state`.

    What a `prompt` makes it do: `fail` raises, `refuse` raises InvalidRequest, `bare` forgets
    `actions`, `slow` takes 1 s, and `wait` waits until `gate` is set. `also` is told beside the
    actions. Batches are remembered in `batches`.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.batches: list[list[Any]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.begun = threading.Event()

    def load(self) -> dict[str, Any]:
        return {"horizon": HORIZON, "low": np.zeros(DIMENSIONS, "<f4")}

    def initial_state(self, settings: dict[str, Any]) -> State:
        unknown = settings.keys() - {"start"}
        if unknown:
            raise InvalidRequest("there is no such setting", field=min(unknown))
        return {"count": np.array(settings.get("start", 0), np.int64)}

    def infer(self, batch: Batch) -> Inferred:
        self.threads.add(threading.get_ident())
        prompts = batch.observations.get("prompt", [None] * batch.size)
        self.batches.append(list(prompts))
        self.begun.set()
        for prompt in prompts:
            match prompt:
                case "fail":
                    raise RuntimeError("the policy failed on purpose")
                case "refuse":
                    raise InvalidRequest("the policy refused on purpose", code="no_such_task")
                case "bare":
                    return Inferred(
                        {"chunk": np.zeros((1, 1, 1))}, {"count": batch.states["count"]}
                    )
                case "slow":
                    time.sleep(1.0)
                case "wait":
                    self.gate.wait(60)
        count = batch.states["count"] + 1
        sensed = np.asarray(batch.observations.get("state", np.zeros((batch.size, 1))))
        first = count + sensed.reshape(batch.size, -1)[:, 0]
        actions = np.broadcast_to(
            first[:, np.newaxis, np.newaxis], (batch.size, HORIZON, DIMENSIONS)
        ).astype(np.float32)
        answers: dict[str, Any] = {"actions": actions}
        if "also" in batch.observations:
            answers["also"] = batch.observations["also"]
        return Inferred(answers, {"count": count})
