"""Clients of sessions of one turn: they ask, read the answer, and may want no more of it."""

from __future__ import annotations

from typing import Any

from protocol.errors import ErrorInfo
from protocol.payloads import conversation_payload
from sessions.oneshot.events import CancelRequest, Request, RequestDone, RequestFailed
from tests.simulation.client import Client
from tests.simulation.deployment import Deployment
from tests.simulation.steps import HUGE_INPUTS

BAD_BY_STAGE: list[dict[str, Any]] = [
    {"nobody": {}},
    {"speak": "loudly"},
    {"think": {"stop": "x" * 70_000}},
]
GOOD_BY_STAGE: list[dict[str, Any]] = [{"think": {"seed": 1}}, {"speak": {"speed": 1.1}}]


class Requester(Client):
    """The client of a one-shot session."""

    progress = (Request,)

    def __init__(self, deployment: Deployment, gateway_place: str, name: str) -> None:
        super().__init__(deployment, gateway_place, name)
        self.asked = False
        self.last_word: RequestDone | RequestFailed | None = None

    def a_patch(self) -> dict[str, Any] | None:
        """Settings by stage."""
        if not self.rude or not self.world.chance(0.4):
            return None
        bad = self.world.chance(self.rude)
        return self.world.random.choice(BAD_BY_STAGE if bad else GOOD_BY_STAGE)

    def a_verb(self) -> CancelRequest:
        """Something to say that is harmless."""
        return CancelRequest()

    def learns(self, output: Any) -> None:
        """The answer's last word."""
        if isinstance(output, RequestDone | RequestFailed):
            self.last_word = output

    def pending(self) -> list[Any]:
        """The request, until it is answered."""
        return ["request"] if self.asked and self.last_word is None else []

    def busy(self) -> bool:
        """Most wait for the answer."""
        return self.asked and self.world.chance(0.9)

    def handed_over(self, verb: Any) -> None:
        """A verb is about to reach the session."""
        if isinstance(verb, Request):
            bad = verb.ports == frozenset() or verb.parameters in BAD_BY_STAGE
            self.asked = self.asked or not (bad or verb.inputs == HUGE_INPUTS)
        elif isinstance(verb, CancelRequest):
            self.interrupted = True

    def act(self) -> None:
        """Ask; ask again, which is refused; or want no more."""
        world = self.world
        if not self.asked or world.chance(0.3):
            if world.chance(self.rude):
                world.count("bad input")
                asked = [conversation_payload([])]
                bad = [Request(asked, ports=frozenset()), Request(HUGE_INPUTS), CancelRequest()]
                bad += [Request(asked, parameters=given) for given in BAD_BY_STAGE]
                self.say(world.random.choice(bad))
                return
            ports = world.random.choice([None, None, frozenset({"text"})])
            parameters = world.random.choice([{}, *GOOD_BY_STAGE])
            self.say(Request([conversation_payload([])], parameters, ports=ports))
        else:
            world.count("requests cancelled")
            self.say(CancelRequest())

    def probe(self) -> None:
        """Ask for everything."""
        self.say(Request([conversation_payload([])]))

    def probed(self) -> tuple[ErrorInfo | None] | None:
        """How it was answered."""
        word = self.last_word
        if word is None:
            return None
        return (word.error if isinstance(word, RequestFailed) else None,)
