"""Who is attached to a session, and what each of them has been told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from protocol.errors import AntiphonError, CapacityExceeded, ErrorInfo, InvalidRequest
from sessions.actions import Action, AttachRefused, AttachRequested, ToClient
from sessions.client import Attached, LetGo, Role
from sessions.output_log import OutputLog
from sessions.resume_secret import ResumeSecret, digest

MAX_OBSERVERS = 16
MAX_ARRIVING = 4
"""Clients that may wait for the directory before they get control; one more is refused."""


class Attachments:
    """One controller at most, and observers, of one session.

    Without a `secret_digest` nobody can come back to the session, and no output is kept.
    An observer holds nothing up: it is told what is put out, or misses it.

    `write_digest` has the directory keep the digest of a secret, after which
    `digest_written` is called: one at a time, before the secret is given. Where it is given
    to nobody, that of the last one that was follows. `about` says what every attachment is
    told first; `gained` is called when a client has got control.
    """

    def __init__(
        self,
        controller: str | None,
        secret_digest: str | None,
        replay_bytes: int,
        *,
        act: Callable[[Action], None],
        write_digest: Callable[[str], None],
        about: Callable[[], Attached],
        gained: Callable[[], None],
    ) -> None:
        self.controller = controller
        self.sequence = 0
        self._act = act
        self._write_digest = write_digest
        self._about = about
        self._gained = gained
        self._arriving: deque[AttachRequested] = deque()
        """Who is to get control, in order."""
        self._written = secret_digest
        """The digest that the directory has, or is being told."""
        self._writing = False
        self._unconfirmed: str | None = None
        """Who was given the newest secret and has not spoken since."""
        self._observers: dict[str, None] = {}
        self._secret = None if secret_digest is None else ResumeSecret(secret_digest)
        self._log = None if secret_digest is None else OutputLog(replay_bytes)
        if controller is None:
            self._hold()

    @property
    def resumable(self) -> bool:
        """Whether a client can come back after it was cut off."""
        return self._secret is not None

    @property
    def full(self) -> bool:
        """Whether nobody is attached and as much is kept as may be."""
        return self._log is not None and self._log.full

    @property
    def kept_bytes(self) -> int:
        """Bytes of output that can be told again."""
        return 0 if self._log is None else self._log.kept_bytes

    def emit(self, output: Any) -> None:
        """Tell everybody, and keep it for who comes back."""
        self.sequence += 1
        if self._log is not None:
            self._log.append(self.sequence, output)
        self._act(ToClient(self.sequence, output))

    def speaks(self, attachment: str) -> bool:
        """Whether what this attachment says counts. It has its secret then."""
        if attachment != self.controller:
            return False
        if self._secret is not None and self._unconfirmed == attachment:
            self._secret.confirm()
            self._unconfirmed = None
        return True

    def observes(self, attachment: str) -> bool:
        """Whether this attachment only looks on."""
        return attachment in self._observers

    def tell(self, attachment: str, output: Any) -> None:
        """Tell one attachment alone, outside the numbers."""
        self._act(ToClient(self.sequence, output, attachment))

    def has(self, attachment: str, through: int) -> None:
        """The controller has all outputs up to `through`."""
        if self.speaks(attachment) and self._log is not None:
            self._log.acknowledge(min(through, self.sequence))

    # Coming and going

    def request(self, request: AttachRequested) -> None:
        """Let the client in, have it wait for the directory, or refuse it."""
        try:
            self._check(request)
        except AntiphonError as error:
            self._act(AttachRefused(request.attachment, error.info()))
            return
        if request.role is Role.OBSERVER:
            self._observers[request.attachment] = None
            self._welcome(request, None)
            return
        self._arriving.append(request)
        if not self._writing:
            self._write(digest(request.new_secret))

    def digest_written(self) -> None:
        """The directory has the digest: its client gets control, unless it has left."""
        assert self._secret is not None
        self._writing = False
        waiting, self._arriving = self._arriving, deque()
        if waiting and digest(waiting[0].new_secret) == self._written:
            request = waiting.popleft()
            presented = None if request.secret is None else digest(request.secret)
            self._secret.rotate(presented, self._written)
            self._take_control(request)
        for following in waiting:
            self.request(following)
        if not self._writing and self._written != self._secret.current:
            self._write(self._secret.current)

    def refuse_arriving(self, error: ErrorInfo) -> None:
        """Nobody who waits for control gets it."""
        for request in self._arriving:
            self._act(AttachRefused(request.attachment, error))
        self._arriving.clear()

    def leave(self, attachment: str) -> bool:
        """An attachment is gone; whether it had control."""
        self._observers.pop(attachment, None)
        # The directory may be being told of its secret, which nobody gets then.
        self._arriving = deque(r for r in self._arriving if r.attachment != attachment)
        if attachment != self.controller:
            return False
        self.controller = None
        self._hold()
        return True

    def end(self) -> None:
        """The session is over: nothing is kept, nobody is attached."""
        self.controller = None
        self._observers.clear()
        if self._log is not None:
            self._log.clear()

    def _check(self, request: AttachRequested) -> None:
        if self._secret is None:
            raise InvalidRequest("this session can only be used where it was opened")
        if request.cursor is not None and not 0 <= request.cursor <= self.sequence:
            raise InvalidRequest(
                f"the session's last output has number {self.sequence}", field="cursor"
            )
        if request.role is Role.OBSERVER:
            if len(self._observers) >= MAX_OBSERVERS:
                raise CapacityExceeded(f"a session has at most {MAX_OBSERVERS} observers")
            return
        if request.secret is not None:
            self._secret.check(digest(request.secret))
        if len(self._arriving) >= MAX_ARRIVING:
            raise CapacityExceeded("too many clients want this session at once")

    def _take_control(self, request: AttachRequested) -> None:
        if self.controller is not None:
            self.tell(self.controller, LetGo("replaced"))
        self.controller = self._unconfirmed = request.attachment
        self._observers.pop(request.attachment, None)
        self._welcome(request, request.new_secret)
        if self._log is not None:
            # Not before it was told what was kept for it.
            self._log.let_go()
        self._gained()

    def _welcome(self, request: AttachRequested, secret: str | None) -> None:
        """Tell an attachment first what there is, then what it has missed."""
        assert self._log is not None
        about = replace(self._about(), role=request.role, secret=secret)
        if request.cursor is None:
            self.tell(request.attachment, about)
            return
        missed = self._log.after(request.cursor)
        self.tell(request.attachment, replace(about, lost=missed.lost))
        for sequence, output in missed.outputs:
            self._act(ToClient(sequence, output, request.attachment))

    def _write(self, secret_digest: str) -> None:
        self._written = secret_digest
        self._writing = True
        self._write_digest(secret_digest)

    def _hold(self) -> None:
        if self._log is not None:
            self._log.hold()

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (
            self.controller,
            self.sequence,
            tuple(request.attachment for request in self._arriving),
            self._written,
            self._writing,
            self._unconfirmed,
            tuple(self._observers),
            None if self._secret is None else self._secret.freeze(),
            None if self._log is None else self._log.freeze(),
        )
