"""The directory of sessions: requests and answers, and the record kept in it.

A directory call is an action of a machine; it is answered by `ok`, `conflict` or
`unknown`. Unknown means that the call may or may not have been carried out: the
caller reads again before it acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a directory call went."""

    OK = "ok"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Record:
    """Who owns a session: the fencing epoch and the owner's incarnation."""

    session: str
    epoch: int
    owner: str
    pipeline: str
    tenant: str


@dataclass(frozen=True)
class Create:
    """Enter a record; conflict when the session is there already."""

    record: Record


@dataclass(frozen=True)
class Remove:
    """Take the record out; conflict when another epoch owns the session by now."""

    session: str
    epoch: int


Request = Create | Remove


class MemoryDirectory:
    """The directory of a single gateway: a map, gone with the process."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def call(self, request: Request) -> Outcome:
        """Carry a request out."""
        match request:
            case Create(record):
                if record.session in self._records:
                    return Outcome.CONFLICT
                self._records[record.session] = record
            case Remove(session, epoch):
                record_there = self._records.get(session)
                if record_there is not None and record_there.epoch != epoch:
                    return Outcome.CONFLICT
                self._records.pop(session, None)
        return Outcome.OK

    def get(self, session: str) -> Record | None:
        """The record of a session."""
        return self._records.get(session)

    def __len__(self) -> int:
        return len(self._records)
