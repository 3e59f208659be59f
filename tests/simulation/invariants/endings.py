"""Every response ends in `ResponseDone`, exactly once; and cancelling leaks nothing (I6)."""

from __future__ import annotations

from sessions.client import SessionEnded
from sessions.duplex import events as said
from sessions.lifecycle import CloseReason
from tests.simulation.client import Client
from tests.simulation.watch import Invariant
from tests.simulation.world import World

PATIENCE_MS = 90_000.0
"""A response that a client reads is over after this, whatever its engines do."""


class ResponsesEnd(Invariant):
    """One beginning, one end, and the end in time."""

    name = "responses end"
    preconditions = (
        "completed",
        "cancelled",
        "failed",
        "incomplete",
        "ended by the end of their session",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._begun: set[tuple[str, str]] = set()

    def told(self, client: Client, sequence: int, output: said.ClientOutput) -> None:
        """Begun once, ended once, none open at the end of the session."""
        match output:
            case said.ResponseCreated(response=response):
                key = (client.session, response.id)
                self.check(key not in self._begun, f"{key} begins again")
                self._begun.add(key)
                begun = response.status is said.ResponseStatus.IN_PROGRESS
                self.check(begun, f"{key} begins as {response}")
                self.world.after(PATIENCE_MS, lambda: self._look(client, response.id))
            case said.ResponseDone(response=response):
                self.check(
                    response.id in client.view.open,
                    f"{response.id} of {client.session} ends twice, or never began",
                )
                self.count(response.status.value)
                if response.status is said.ResponseStatus.COMPLETED:
                    self._whole(client, response)
                if client.close_asked:
                    self.count("ended by the end of their session")
            case SessionEnded():
                self.check(not client.view.open, f"{list(client.view.open)} have no end")

    def _whole(self, client: Client, response: said.Response) -> None:
        view = client.view.responses[response.id]
        told = "".join(part.text or "" for item in response.output for part in item.parts)
        self.check(
            view.text == told, f"{response.id} is complete with {told!r}, but said {view.text!r}"
        )

    def _look(self, client: Client, response_id: str) -> None:
        gateway = client.gateway
        if gateway is None or not gateway.alive or client.over:
            return
        if gateway.paused or client.slow:
            return
        self.check(
            response_id not in client.view.open,
            f"{response_id} of {client.session} is in progress after {PATIENCE_MS} ms",
        )


class I6Cancel(Invariant):
    """Cancelling at any step leaks nothing: what is left is I4's to see, and that nothing is
    wedged the last client's, which talks when all is over. Here is seen that it happens."""

    name = "I6 cancel"
    preconditions = (
        "closed while it opened",
        "closed with responses in progress",
        "closed in peace",
    )

    def released(self, client: Client, reason: CloseReason) -> None:
        """In which state the session was when it was given up."""
        if not client.close_asked:
            return
        if not client.view.created:
            self.count("closed while it opened")
        elif any(
            view.done is not None and view.done.status is said.ResponseStatus.CANCELLED
            for view in client.view.responses.values()
        ):
            self.count("closed with responses in progress")
        else:
            self.count("closed in peace")
