"""Opens that wait on their worker until what the session had there before is freed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import AntiphonError, CapacityExceeded, SessionStateLost
from protocol.messages import Command, Configure, Feed, Open, Run, Signal, Update
from workers.control_events import ControlLimits

Following = Update | Configure | Signal | Run | Feed
"""The commands that are for the state to come, and not for what is being freed."""


@dataclass
class Reopen:
    """The open, and in their order the commands that came after it."""

    gateway: str
    command: Open
    following: list[Following] = field(default_factory=list)


class Reopens:
    """One at most for each session. `refuse` tells a gateway that its command comes to nothing."""

    def __init__(
        self, limits: ControlLimits, refuse: Callable[[str, Command, AntiphonError], None]
    ) -> None:
        self._limits = limits
        self._refuse = refuse
        self._waiting: dict[str, Reopen] = {}

    def put(self, gateway: str, command: Open) -> None:
        """Have an open wait, in the place of another; one that comes again is answered once."""
        name = command.fence.session
        before = self._waiting.get(name)
        if before is None or (before.gateway, before.command) != (gateway, command):
            self.refuse(name)
            self._waiting[name] = Reopen(gateway, command)

    def takes(self, gateway: str, command: Command) -> bool:
        """Whether a command is for what an open that waits is to make; then it waits as well.

        Where too much does, input is dropped, whose number is missing then. Another command
        that finds no room is refused, and so is the open.
        """
        reopen = self._waiting.get(command.fence.session)
        if reopen is None or reopen.gateway != gateway or not isinstance(command, Following):
            return False
        inputs = sum(isinstance(waiting, Update) for waiting in reopen.following)
        error = CapacityExceeded("too many commands wait for this session")
        if isinstance(command, Update):
            room = inputs < self._limits.held_inputs
        else:
            room = len(reopen.following) - inputs < self._limits.waiting_commands
            if not room:
                self.refuse(command.fence.session, error)
        if room:
            reopen.following.append(command)
        else:
            self._refuse(gateway, command, error)
        return True

    def pop(self, session: str) -> Reopen | None:
        """The session's open, which waits no longer."""
        return self._waiting.pop(session, None)

    def refuse(self, session: str, error: AntiphonError | None = None) -> None:
        """The session's open is not wanted any more, or cannot be had for `error`."""
        if (reopen := self.pop(session)) is not None:
            error = error or SessionStateLost("the session was closed")
            for command in (reopen.command, *reopen.following):
                self._refuse(reopen.gateway, command, error)

    def gateway_gone(self, gateway: str) -> None:
        """Nobody waits any more for what this gateway wanted."""
        for session in [s for s, reopen in self._waiting.items() if reopen.gateway == gateway]:
            self.refuse(session)

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return tuple(sorted((s, len(reopen.following)) for s, reopen in self._waiting.items()))
