"""The robot's connection: one question at a time, asked by a thread of its own, with a network
between them that is slower than the real one."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy


class NoAnswer(Exception):
    """The gateway answered with an error, or not at all; in words for a person."""


@dataclass(frozen=True)
class Network:
    """What is injected on the way there and on the way back, each time alike.

    Each way takes half of `latency_ms`, and up to half of `jitter_ms` more (uniform). TCP loses
    nothing: what is lost is sent again. So a message that is lost, with probability `loss`,
    arrives `loss_ms` later.
    """

    latency_ms: float
    jitter_ms: float
    loss: float
    loss_ms: float

    def delay_s(self, rng: np.random.Generator) -> float:
        """How long one message takes."""
        lost, late = float(rng.random()), float(rng.random())
        delay_ms = (self.latency_ms + late * self.jitter_ms) / 2
        return (delay_ms + (self.loss_ms if lost < self.loss else 0.0)) / 1000.0


@dataclass(frozen=True)
class Answered:
    """An answer, and how long it took from when the observation was sent, in seconds."""

    answer: dict[str, Any]
    took_s: float


class Asking:
    """One connection, which is one session. Raises NoAnswer."""

    def __init__(
        self, uri: str, key: str | None, network: Network, seed: list[int], timeout_s: float
    ) -> None:
        try:
            self._policy = WebsocketClientPolicy(uri, api_key=key)
        except Exception as error:
            raise NoAnswer(f"no connection to {uri}: {_words(error)}") from None
        self.metadata: dict[str, Any] = self._policy.get_server_metadata()
        self.waiting = False
        """Whether there is an answer to come."""
        self._network = network
        self._rng = np.random.default_rng(seed)
        self._timeout_s = timeout_s
        self._asked_s = 0.0
        self._questions: queue.Queue[dict[str, Any] | None] = queue.Queue(1)
        self._answers: queue.Queue[Answered | Exception] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="asking", daemon=True)
        self._thread.start()

    def ask(self, observation: dict[str, Any]) -> None:
        """Send an observation; the one before it has been answered."""
        assert not self.waiting, "one question at a time"
        self.waiting = True
        self._asked_s = time.perf_counter()
        self._questions.put_nowait(observation)

    def take(self) -> Answered | None:
        """The answer, if it is there."""
        if not self.waiting:
            return None
        try:
            return self._taken(self._answers.get_nowait())
        except queue.Empty:
            if time.perf_counter() - self._asked_s > self._timeout_s:
                raise NoAnswer(f"no answer within {self._timeout_s:g} s") from None
            return None

    def finish(self) -> Answered | None:
        """Wait for the answer that is to come, if there is one, and close the connection."""
        last = None
        if self.waiting:
            try:
                last = self._taken(self._answers.get(timeout=self._timeout_s))
            except queue.Empty:
                raise NoAnswer(f"no answer within {self._timeout_s:g} s") from None
        self._questions.put(None)
        self._thread.join()
        # The client has no way to say goodbye; left open the session would wait for its return.
        self._policy._ws.close()
        return last

    def _taken(self, answer: Answered | Exception) -> Answered:
        self.waiting = False
        if isinstance(answer, Exception):
            raise NoAnswer(_words(answer)) from answer
        return answer

    def _run(self) -> None:
        while (observation := self._questions.get()) is not None:
            begun_s = time.perf_counter()
            answer: Answered | Exception
            try:
                self._pass()
                said = self._policy.infer(observation)
                self._pass()
                answer = Answered(said, time.perf_counter() - begun_s)
            except Exception as error:
                answer = error
            self._answers.put(answer)

    def _pass(self) -> None:
        delay_s = self._network.delay_s(self._rng)
        if delay_s:
            time.sleep(delay_s)


def _words(error: Exception) -> str:
    """An error of the client in one line."""
    said = " ".join(str(error).split()) or "no reason given"
    if isinstance(error, RuntimeError):
        return said.replace("Error in inference server: ", "the gateway said ")
    return f"the connection broke off: {type(error).__name__}: {said}"
