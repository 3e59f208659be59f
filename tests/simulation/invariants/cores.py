"""Realtime head-room: sessions are let in as long as the cores have room for all, and no longer."""

from __future__ import annotations

from protocol.messages import Answer, Open
from tests.simulation.watch import Invariant
from tests.simulation.worker import WorkerProcess
from workers.control_events import Action, CommandReceived, Event, OpenSession, SendReport


class Cores(Invariant):
    """By what sessions of the worker were measured to take."""

    name = "cores"
    preconditions = ("opens let in beside others", "opens refused for want of cores")

    def handled(self, worker: WorkerProcess, event: Event, actions: list[Action]) -> None:
        """An open that is let in leaves none of the others with too little."""
        match event:
            case CommandReceived(command=Open(restore=None) as command):
                pass
            case _:
                return
        use = worker.control.status(worker.stage, 0).compute
        assert use is not None
        if use.cores is None or not use.session:
            return
        sessions = worker.control.sessions
        for action in actions:
            match action:
                case OpenSession(session=session) if (
                    session == command.fence.session and sessions > 1
                ):
                    self.count("opens let in beside others")
                    self.check(
                        sessions * use.session <= use.cores + 1e-9,
                        f"{worker.place} takes {session}: {sessions} sessions at {use}",
                    )
                case SendReport(report=Answer(error=error)) if (
                    error is not None and "of a core" in error.message
                ):
                    self.count("opens refused for want of cores")
                    self.check(
                        (sessions + 1) * use.session > use.cores,
                        f"{worker.place} refuses another beside {sessions} sessions at {use}",
                    )
