"""A session's record, with a directory that answers late, twice over, or in doubt."""

from __future__ import annotations

import pytest

from sessions.directory import (
    Create,
    MemoryDirectory,
    Outcome,
    Read,
    Record,
    Remove,
    Reply,
    Request,
    Write,
)
from sessions.record import SessionRecord

RECORD = Record("s", 1, "gateway", "voice", "tenant", "digest")
UNKNOWN = Reply(Outcome.UNKNOWN)


class Calls:
    """The record under test, its calls in `asked`, and the directory that it calls."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.directory = MemoryDirectory()
        self.record = SessionRecord(RECORD, self.asked.append)

    def answer(self, *, carried_out: bool = True, told: bool = True) -> object:
        """The directory carries the last call out, or does not, and says so, or does not."""
        reply = self.directory.call(self.asked[-1]) if carried_out else UNKNOWN
        return self.record.answered(reply if told else UNKNOWN)


def test_a_call_that_is_answered_is_settled() -> None:
    calls = Calls()
    calls.record.create()
    assert calls.answer() == (Create(RECORD), Outcome.OK)
    calls.record.write("other")
    settled = calls.answer()
    assert isinstance(settled, tuple)
    there = calls.directory.get("s")
    assert there is not None
    assert (there.secret_digest, there.revision) == ("other", 2)
    calls.record.remove()
    calls.answer()
    assert len(calls.directory) == 0
    assert not calls.record.held


@pytest.mark.parametrize("carried_out", [True, False])
def test_in_doubt_the_record_is_read_before_anything_is_done(carried_out: bool) -> None:
    calls = Calls()
    for act, kind in (
        (calls.record.create, Create),
        (lambda: calls.record.write("other"), Write),
        (calls.record.remove, Remove),
    ):
        act()
        assert calls.answer(carried_out=carried_out, told=False) is None
        assert isinstance(calls.asked[-1], Read)
        assert calls.answer(carried_out=False) is None
        settled = calls.answer()
        if not carried_out:
            # It was not done: it is asked for once more.
            assert settled is None
            assert isinstance(calls.asked[-1], kind)
            settled = calls.answer()
        assert isinstance(settled, tuple)
        assert settled[1] is Outcome.OK
    assert len(calls.directory) == 0


def test_a_record_of_somebody_else_is_a_conflict_also_in_doubt() -> None:
    calls = Calls()
    calls.directory.call(Create(Record("s", 2, "other", "voice", "tenant")))
    calls.record.create()
    assert calls.answer(carried_out=False) is None
    assert calls.answer() == (Create(RECORD), Outcome.CONFLICT)
    assert not calls.record.held
    calls.record.remove()
    assert isinstance(calls.asked[-1], Read)
    assert len(calls.directory) == 1


def test_a_write_over_another_owner_is_a_conflict_also_in_doubt() -> None:
    for doubt in (False, True):
        calls = Calls()
        calls.record.create()
        calls.answer()
        calls.directory.call(Remove("s", 1))
        calls.directory.call(Create(Record("s", 2, "other", "voice", "tenant")))
        calls.record.write("mine")
        if doubt:
            calls.answer(carried_out=False)
        settled = calls.answer()
        assert isinstance(settled, tuple)
        assert settled[1] is Outcome.CONFLICT


def test_a_removal_waits_for_the_call_before_it() -> None:
    calls = Calls()
    calls.record.create()
    calls.record.remove()
    assert calls.asked == [Create(RECORD)]
    calls.answer()
    assert calls.asked[-1] == Remove("s", 1)
    calls.answer()
    assert len(calls.directory) == 0


def test_after_it_was_given_up_an_answer_means_nothing() -> None:
    calls = Calls()
    calls.record.create()
    calls.record.abandon()
    assert calls.answer() is None
    assert not calls.record.held
