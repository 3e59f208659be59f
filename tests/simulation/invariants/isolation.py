"""I11: one session's failure never ends or stalls another session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protocol.errors import ErrorInfo
from sessions.client import SessionEnded
from sessions.duplex import events as said
from sessions.lifecycle import CloseReason
from sessions.oneshot.events import RequestFailed
from sessions.pipeline import Limits
from sessions.steps.events import StepFailed
from tests.simulation.client import Client
from tests.simulation.requester import Requester
from tests.simulation.watch import Invariant

EXPLAINED_BY: dict[str, frozenset[str]] = {
    "engine_failed": frozenset({"engine", "stolen", "stopped"}),
    "turn_timeout": frozenset({"engine"}),
    "engine_lost": frozenset({"lost", "stolen", "stopped", "parked"}),
    "session_state_lost": frozenset({"lost", "stolen", "stopped", "engine", "snapshot"}),
    "fenced": frozenset({"stolen", "directory"}),
    "capacity_exceeded": frozenset({"full", "tight", "lost", "no room", "stopped"}),
    "tenant_share_exceeded": frozenset({"no room"}),
    "invalid_value": frozenset({"open refused", "configure refused"}),
}
"""What must have been done to a session before one of its responses fails with a code."""

ENDED_BY = frozenset(
    {
        "open refused",
        "configure refused",
        "lost",
        "stolen",
        "stopped",
        "full",
        "tight",
        "no room",
    }
)
"""What must have been done to a session that ends because it has no worker."""


LIMITED_BY = {
    CloseReason.IDLE: "idle_s",
    CloseReason.MAX_AGE: "max_age_s",
    CloseReason.STALLED: "stall_s",
    CloseReason.DETACHED: "grace_s",
}
"""The limit that ends a session for a reason."""

OWN_DOING = frozenset(
    {
        "payload_too_large",
        "rate_limit_exceeded",
        "request_cancelled",
        "deadline_missed",
        "emergency_stopped",
        "change_in_progress",
        "reset_in_progress",
        "step_cancelled",
        "step_committed",
        "step_late",
        "step_not_active",
        "step_out_of_order",
        "superseded",
    }
)
"""Codes that a client meets by what it says or leaves unread."""


class I11Isolation(Invariant):
    """Whatever fails or ends has a cause in its own session, or in the worker it ran on."""

    name = "I11 isolation"
    preconditions = (
        "responses failed for a cause of their own",
        "responses completed beside a failure",
        "turns given up that got nothing done",
        "sessions ended for a reason of their own",
        "sessions ended by a limit that their client chose",
    )

    def opened(self, client: Client) -> None:
        """A world whose limits are tight may refuse anybody."""
        if self.deployment.profile.tight:
            self.deployment.blame(client.session, "tight")

    def told(self, client: Client, sequence: int, output: Any) -> None:
        """A failure and an end are explained."""
        match output:
            case said.ResponseDone(response=response):
                if response.status is said.ResponseStatus.FAILED:
                    self._failed(client, response)
                elif response.status is said.ResponseStatus.CANCELLED:
                    self._cancelled(client, response)
                elif response.status is said.ResponseStatus.COMPLETED and any(
                    "engine" in causes for causes in self.deployment.causes.values()
                ):
                    self.count("responses completed beside a failure")
            case RequestFailed() | StepFailed():
                self._explained(client, output.error)
            case SessionEnded():
                self._ended(client, CloseReason(output.reason))

    def _failed(self, client: Client, response: said.Response) -> None:
        assert response.error is not None
        self._explained(client, response.error)
        self.count("responses failed for a cause of their own")

    def _explained(self, client: Client, error: ErrorInfo) -> None:
        """An error that is not of the client's own doing."""
        if error.code in OWN_DOING or error.field == "parameters":
            return
        if error.code == "turn_timeout":
            self.count("turns given up that got nothing done")
        causes = self.deployment.causes[client.session]
        expected = EXPLAINED_BY.get(error.code)
        self.check(
            expected is not None and bool(expected & causes),
            f"something of {client.session} fails with {error}; causes: {causes}",
        )

    def _cancelled(self, client: Client, response: said.Response) -> None:
        """Somebody asked for that; where no process fails nobody waits until all is over."""
        profile = self.deployment.profile
        if response.reason == "client_cancelled" and not client.interrupted:
            troubled = profile.fault_every_ms or profile.engine.hang or client.slow
            quiet_ms = self.deployment.quiet_since_ms
            idle_ms = self._limits_of(client).idle_ms
            if quiet_ms is not None and self.world.now_ms > quiet_ms + idle_ms:
                troubled = "stolen" in self.deployment.causes[client.session]
            self.check(
                bool(client.close_asked) or bool(troubled) or client.line.left_ms is not None,
                f"a response of {client.session} is cancelled, and nobody has asked for that",
            )

    def _limits_of(self, client: Client) -> Limits:
        """The pipeline's, but for what the client chose."""
        chosen_ms = {f"{name[:-2]}_ms": int(1_000 * s) for name, s in client.limits.items()}
        return replace(self.deployment.profile.pipeline.limits, **chosen_ms)

    def _ended(self, client: Client, reason: CloseReason) -> None:
        gateway = client.gateway
        assert gateway is not None
        limits = self._limits_of(client)
        causes = self.deployment.causes[client.session]
        now_ms = gateway.now_ms
        match reason:
            case CloseReason.CLIENT | CloseReason.ADMIN | CloseReason.DRAINED:
                explained = reason in client.close_asked
            case CloseReason.IDLE:
                explained = now_ms >= client.verb_ms + limits.idle_ms
            case CloseReason.MAX_AGE:
                explained = now_ms >= client.opened_ms + limits.max_age_ms
            case CloseReason.STALLED:
                blocked_ms = client.blocked_ms
                explained = blocked_ms is not None and now_ms >= blocked_ms + limits.stall_ms
            case CloseReason.DETACHED:
                left_ms = client.line.left_ms
                explained = left_ms is not None and now_ms >= left_ms + limits.grace_ms
            case CloseReason.EVICTED:
                explained = reason in client.close_asked
            case CloseReason.COMPLETED:
                explained = isinstance(client, Requester) and client.last_word is not None
            case CloseReason.FENCED:
                explained = "directory" in causes
            case CloseReason.ENGINE_LOST:
                explained = bool(causes & ENDED_BY)
            case _:
                explained = False
        self.count("sessions ended for a reason of their own")
        if LIMITED_BY.get(reason) in client.limits:
            self.count("sessions ended by a limit that their client chose")
        self.check(explained, f"{client.session} ends: {reason}; causes: {causes}")
