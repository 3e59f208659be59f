"""A session's record in the directory: one call at a time, and none believed in doubt.

A call that is answered `unknown` may have been carried out or not. The record is read
again, and the call is taken as done, as lost to somebody else, or made once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sessions.directory import Create, Outcome, Read, Record, Remove, Reply, Request, Write


class SessionRecord:
    """The record of one session, and the call about it that is under way.

    `ask` makes a call. Once it has been settled, by `answered`, the next may follow; a
    removal that is asked for meanwhile waits for that.
    """

    def __init__(self, record: Record, ask: Callable[[Request], None]) -> None:
        self._record = record
        self._ask = ask
        self._calling: Request | None = None
        self._doubted = False
        self._remove_next = False
        self.held = False
        """Whether the directory may have the record."""

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._calling is not None

    def create(self) -> None:
        """Enter the record."""
        self.held = True
        self._call(Create(self._record))

    def write(self, secret_digest: str) -> None:
        """Replace the digest of the resume secret."""
        record = self._record
        self._record = replace(record, secret_digest=secret_digest, revision=record.revision + 1)
        self._call(Write(self._record))

    def remove(self) -> None:
        """Take the record out, as soon as no other call is under way."""
        if self.busy:
            self._remove_next = True
        elif self.held:
            self._call(Remove(self._record.session, self._record.epoch))

    def abandon(self) -> None:
        """The directory does not answer: the record ends there by its own time to live."""
        self._calling = None
        self._remove_next = False
        self.held = False

    def answered(self, reply: Reply) -> tuple[Request, Outcome] | None:
        """The answer to the last call: which call was settled by it, and how; None: not yet."""
        call = self._calling
        if call is None:
            return None
        if reply.outcome is Outcome.UNKNOWN:
            self._doubted = True
            self._ask(Read(self._record.session))
            return None
        outcome: Outcome = reply.outcome
        if self._doubted:
            self._doubted = False
            found = self._found(call, reply.record)
            if found is None:
                self._ask(call)
                return None
            outcome = found
        self._calling = None
        if isinstance(call, Remove) or outcome is Outcome.CONFLICT:
            # What is there now, if anything, is another owner's.
            self.held = False
        if self._remove_next:
            self._remove_next = False
            self.remove()
        return call, outcome

    def freeze(self) -> tuple[object, ...]:
        """The canonical value of this state."""
        return (self._record, self._calling, self._doubted, self._remove_next, self.held)

    def _call(self, request: Request) -> None:
        self._calling = request
        self._ask(request)

    def _found(self, call: Request, there: Record | None) -> Outcome | None:
        """What became of `call`, seen from the record that is there; None: nothing."""
        match call:
            case Create(record):
                if there is None:
                    return None
                return Outcome.OK if there == record else Outcome.CONFLICT
            case Write(record):
                if there == record:
                    return Outcome.OK
                before = replace(record, secret_digest="", revision=record.revision - 1)
                unwritten = there is not None and replace(there, secret_digest="") == before
                return None if unwritten else Outcome.CONFLICT
            case Remove(_, epoch):
                return None if there is not None and there.epoch == epoch else Outcome.OK
            case Read():
                raise AssertionError("a reading is not called for its own sake")
