"""The directory of sessions: requests and answers, and the record kept in it.

A directory call is an action of a machine; it is answered by `ok`, `conflict` or
`unknown`. Unknown means that the call may or may not have been carried out: the
caller reads again before it acts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a directory call went."""

    OK = "ok"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Record:
    """Who owns a session: the fencing epoch and the owner's incarnation.

    `secret_digest` is of the secret to resume with; None for a session that cannot be
    resumed. `revision` grows by one with each write.
    """

    session: str
    epoch: int
    owner: str
    pipeline: str
    tenant: str
    secret_digest: str | None = field(default=None, repr=False)
    revision: int = 1


@dataclass(frozen=True)
class Create:
    """Enter a record; conflict when the session is there already."""

    record: Record


@dataclass(frozen=True)
class Write:
    """Replace the record of revision `record.revision - 1`; conflict when it is another, or
    belongs to another owner."""

    record: Record


@dataclass(frozen=True)
class Remove:
    """Take the record out; conflict when another epoch owns the session by now."""

    session: str
    epoch: int


@dataclass(frozen=True)
class Read:
    """Ask for the record, which comes with the answer."""

    session: str


Request = Create | Write | Remove | Read


@dataclass(frozen=True)
class Reply:
    """The answer to a request; `record` is what `Read` found."""

    outcome: Outcome
    record: Record | None = None


class MemoryDirectory:
    """The directory of a single gateway: a map, gone with the process."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def call(self, request: Request) -> Reply:
        """Carry a request out."""
        match request:
            case Create(record):
                if record.session in self._records:
                    return Reply(Outcome.CONFLICT)
                self._records[record.session] = record
            case Write(record):
                there = self._records.get(record.session)
                if there is None or not _follows(record, there):
                    return Reply(Outcome.CONFLICT)
                self._records[record.session] = record
            case Remove(session, epoch):
                there = self._records.get(session)
                if there is not None and there.epoch != epoch:
                    return Reply(Outcome.CONFLICT)
                self._records.pop(session, None)
            case Read(session):
                return Reply(Outcome.OK, self._records.get(session))
        return Reply(Outcome.OK)

    def get(self, session: str) -> Record | None:
        """The record of a session."""
        return self._records.get(session)

    def __len__(self) -> int:
        return len(self._records)


def _follows(record: Record, there: Record) -> bool:
    return (
        record.epoch == there.epoch
        and record.owner == there.owner
        and record.revision == there.revision + 1
    )
