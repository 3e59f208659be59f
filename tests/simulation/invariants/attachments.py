"""I7 at the client: what comes over its attachments is all that the session has put out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from protocol.errors import ErrorInfo
from sessions.client import (
    Answered,
    Attached,
    LetGo,
    Parking,
    Refused,
    Restored,
    Restoring,
    Role,
)
from sessions.lifecycle import CloseReason, State
from tests.simulation.client import Client
from tests.simulation.line import Attachment
from tests.simulation.profile import OUT_OF_BYTES
from tests.simulation.told import size_of, value_of
from tests.simulation.watch import Invariant
from tests.simulation.world import World

OUTPUT_BYTES = 512
"""What an output may cost beside the text and data in it."""


class I7Attachments(Invariant):
    """Over one attachment after the other a client gets every output once, in order and as it
    was put out, or is told which are gone; what was put out while nobody was there never is.
    One attachment has control, whose client is let in with the secret that it has."""

    name = "I7 attachments"
    preconditions = (
        "controllers attached",
        "observers attached",
        "outputs told again",
        "gaps stated",
        "nothing missed",
        "replaced",
        "let go: stalled",
        "old secrets refused",
        "guesses refused",
        "attaches refused for a session that has ended",
        "old secrets good after a lost answer",
        "observers refused",
        "commands answered",
        "commands answered again",
        "commands refused",
        "stages restored",
        "graces run out",
        "outputs while nobody was there",
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._put_out: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._unseen: defaultdict[str, set[int]] = defaultdict(set)
        self._answers: dict[tuple[str, str], Any] = {}
        self._since: list[tuple[str, Any]] | None = None
        self._restoring: defaultdict[str, set[str]] = defaultdict(set)
        self._came_with: dict[tuple[str, str], int] = {}

    # The session

    def told(self, client: Client, sequence: int, output: Any) -> None:
        """Keep what is put out, as it is now."""
        session = client.session
        if self._since is not None:
            self._since.append((session, output))
        if client.line.resumable:
            self._put_out[session][sequence] = value_of(output)
            if client.session_state is State.DETACHED:
                self.count("outputs while nobody was there")
                self._unseen[session].add(sequence)
        match output:
            case Restoring(stage) | Parking(stage):
                self._restoring[session].add(stage)
            case Restored(stage):
                self.count("stages restored")
                expected = stage in self._restoring[session]
                self.check(expected, f"{session} has restored {stage}, which was not lost")
                self._restoring[session].discard(stage)

    def released(self, client: Client, reason: CloseReason) -> None:
        """Nobody waits for an attachment any more."""
        if reason is CloseReason.DETACHED:
            self.count("graces run out")
        for attachment in client.line.attachments.values():
            self.check(
                attachment.following is not None or attachment.dead,
                f"{attachment.name} waits for {client.session}, which is gone",
            )

    # Attachments

    def delivered(self, client: Client, attachment: Attachment, sequence: int, output: Any) -> None:
        """The next output, or the first word."""
        session = client.session
        if isinstance(output, Attached):
            self._attached(client, attachment, sequence, output)
            return
        if isinstance(output, LetGo):
            self.count("replaced" if output.reason == "replaced" else f"let go: {output.reason}")
            controls = attachment.role is Role.CONTROLLER
            self.check(controls, f"the observer {attachment.name} is let go")
            return
        observes = attachment.role is Role.OBSERVER
        if observes and isinstance(output, Refused) and output.error.code == "not_controller":
            self.count("observers refused")
            return
        self.check(
            sequence == attachment.following,
            f"{attachment.name} is told output {sequence}, not {attachment.following}",
        )
        if client.line.resumable:
            put_out = self._put_out[session].get(sequence)
            self.check(
                value_of(output) == put_out,
                f"{attachment.name} is told {output} as output {sequence}, which was {put_out}",
            )

    def _attached(
        self, client: Client, attachment: Attachment, sequence: int, about: Attached
    ) -> None:
        session = client.session
        self.check(attachment.attached is None, f"{attachment.name} is attached twice")
        self.check(about.role is attachment.role, f"{attachment.name} gets {about.role}")
        self.check(about.sequence == sequence == client.last_sequence, f"{about} is no present")
        controls = attachment.role is Role.CONTROLLER
        self.check(not attachment.unwelcome, f"{attachment.name} is let in with an old secret")
        for other in client.line.attachments.values() if controls else ():
            replaced = other is not attachment and other.role is Role.CONTROLLER
            self.check(
                not replaced or other.following is None,
                f"{other.name} is not told that {attachment.name} takes its place",
            )
        self.count("controllers attached" if controls else "observers attached")
        self.check((about.secret is not None) is controls, f"{attachment.name} has a secret")
        if attachment.secret is not None:
            key = (session, attachment.secret)
            self._came_with[key] = self._came_with.get(key, 0) + 1
            if self._came_with[key] > 1:
                self.count("old secrets good after a lost answer")
        if attachment.cursor is not None:
            self._missed(client, attachment, about)
        if controls:
            self._unseen[session].clear()

    def _missed(self, client: Client, attachment: Attachment, about: Attached) -> None:
        session, cursor, lost = client.session, attachment.cursor, about.lost
        assert cursor is not None
        if lost is None:
            self.count("outputs told again" if about.sequence > cursor else "nothing missed")
            return
        self.count("gaps stated")
        self.check(
            lost[0] == cursor + 1 and lost[0] <= lost[1] <= about.sequence,
            f"{attachment.name} has missed {lost} after {cursor}, of {about.sequence}",
        )
        gone = range(lost[0], lost[1] + 1)
        unseen = self._unseen[session].intersection(gone)
        self.check(not unseen, f"{session} has dropped {unseen}, which nobody was there for")
        if lost[1] > client.line.acknowledged:
            rest = [self._put_out[session][n] for n in range(lost[1], about.sequence + 1)]
            size = size_of(rest) + OUTPUT_BYTES * len(rest)
            limit = self.deployment.profile.pipeline.limits.replay_bytes
            self.check(size >= limit, f"{session} has dropped {lost}, and keeps {size} bytes")

    def attach_refused(self, client: Client, attachment: Attachment, error: ErrorInfo) -> None:
        """For a reason: only who comes with what is good no more may hear that."""
        if error.code == "secret_reused":
            self.count("old secrets refused")
        elif error.code == "resume_refused":
            self.count("guesses refused")
        elif error.code == "session_state_lost":
            self.count("attaches refused for a session that has ended")
            return
        elif error.code in ("fenced", *OUT_OF_BYTES):
            return
        self.check(
            attachment.refusable is not None and error.code in attachment.refusable,
            f"{attachment.name} is refused: {error}",
        )

    # Commands

    def commanded(self, client: Client, command: str, first: bool) -> None:
        """From now on exactly one answer is owed."""
        self._since = []
        if first:
            self.check((client.session, command) not in self._answers, f"{command} is not new")

    def answered(self, client: Client, command: str) -> None:
        """The first answer again, and nothing beside it, for a command that was repeated."""
        outputs, self._since = self._since, None
        assert outputs is not None
        mine = [output for session, output in outputs if session == client.session]
        answers = [o for o in mine if isinstance(o, Answered) and o.command == command]
        self.check(len(answers) == 1, f"{command} of {client.session} is answered with {answers}")
        answer = value_of(answers[0])
        key = (client.session, command)
        if key in self._answers:
            self.count("commands answered again")
            self.check(answer == self._answers[key], f"{answers[0]} was {self._answers[key]}")
            # While nobody is there an answer may be one too many to be kept, and end the work.
            away = client.line.current is None or client.session_state is State.DETACHED
            alone = len(mine) == 1 or away
            self.check(alone, f"{command} is carried out again: {mine}")
            return
        self.count("commands answered" if answers[0].error is None else "commands refused")
        self._answers[key] = answer
