"""I1: once a worker has accepted (e, owner) it accepts no lower epoch, and not e from
another owner."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from protocol.errors import ErrorInfo
from protocol.messages import Answer, Close, Open, Report, RoomWanted, TurnEnded
from tests.simulation.profile import OUT_OF_BYTES
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from tests.simulation.world import World
from workers.control_events import (
    Action,
    CommandReceived,
    DiscardPayload,
    Event,
    OpenSession,
    SendReport,
)


class I1Fence(Invariant):
    """What each worker has accepted, and that it keeps to it."""

    name = "I1 fence"
    preconditions = (
        "equal epoch of another owner refused",
        "lower epoch refused",
        "sender that is not the owner refused",
        "higher epoch accepted",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._accepted: dict[tuple[str, str], tuple[int, str]] = {}
        self._latest: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """By worker, the sessions that it had, whose command came last at the end."""

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """A command that must be refused does nothing; one of the owner is never fenced."""
        if not isinstance(event, CommandReceived):
            return
        fence = event.command.fence
        key = (worker.incarnation, fence.session)
        known = self._accepted.get(key)
        opens = isinstance(event.command, Open | Close) and not any(map(_error, actions))
        here = fence.session in worker.engine.sessions
        if not here and known is not None and self._may_be_forgotten(worker, fence.session):
            known = None
        if here or opens or any(map(_finds_no_room, actions)):
            self._latest[worker.incarnation][fence.session] = None
            self._latest[worker.incarnation].move_to_end(fence.session)
        refusal = _refusal(event.gateway, (fence.epoch, fence.owner), known)
        if refusal is not None:
            self.count(refusal)
            for action in actions:
                # Who is to make room, and who waits for it, is looked at with whatever comes, once
                # its time has come.
                others = _asks(action) or _finds_no_room(action)
                self.check(
                    isinstance(action, DiscardPayload) or _is_fenced(action) or others,
                    f"{worker.place} has accepted {known} of {fence.session}, yet does {action}"
                    f" for {event.gateway} with {fence}",
                )
            return
        if known is None and isinstance(event.command, Open | Close):
            closes = isinstance(event.command, Close) and not any(map(_is_fenced, actions))
            if closes or any(isinstance(action, OpenSession) for action in actions):
                self._accepted[key] = (fence.epoch, fence.owner)
        elif known is not None and known != (fence.epoch, fence.owner):
            self.check(
                not any(map(_is_fenced, actions)), f"{worker.place} fences {fence} after {known}"
            )
            if opens or here:
                self.count("higher epoch accepted")
                self._accepted[key] = (fence.epoch, fence.owner)
        elif known is not None:
            self.check(
                not any(map(_is_fenced, actions)),
                f"{worker.place} fences {fence}, which it has accepted",
            )

    def _may_be_forgotten(self, worker: WorkerProcess, session: str) -> bool:
        """Whether the session is gone, and so many were there since that none need know of it.

        Those that are there are never forgotten, however long ago their last command came.
        """
        latest = self._latest[worker.incarnation]
        since = list(latest).index(session) if session in latest else 0
        limits = worker.profile.control
        return len(latest) - since > limits.remembered_fences - limits.sessions


def _refusal(gateway: str, fence: tuple[int, str], known: tuple[int, str] | None) -> str | None:
    """Why a command must be refused; None when it need not be."""
    epoch, owner = fence
    if owner != gateway:
        return "sender that is not the owner refused"
    if known is not None and epoch < known[0]:
        return "lower epoch refused"
    if known is not None and epoch == known[0] and owner != known[1]:
        return "equal epoch of another owner refused"
    return None


def _error(action: Action) -> ErrorInfo | None:
    if isinstance(action, SendReport):
        report: Report = action.report
        if isinstance(report, Answer | TurnEnded):
            return report.error
    return None


def _finds_no_room(action: Action) -> bool:
    """Whether a session was there for as long as it took to see that."""
    error = _error(action)
    return error is not None and error.code in OUT_OF_BYTES and "needed" in error.message


def _asks(action: Action) -> bool:
    return isinstance(action, SendReport) and isinstance(action.report, RoomWanted)


def _is_fenced(action: Action) -> bool:
    error = _error(action)
    return error is not None and error.code == "fenced"
