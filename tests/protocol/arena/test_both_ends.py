"""Both ends of an arena with records on their way: each payload is released exactly once."""

from __future__ import annotations

import contextlib
from collections import deque
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protocol.arena.consumer import ConsumerEnd
from protocol.arena.producer import ArenaLimits, Flow, Place, ProducerEnd
from protocol.arena.records import ABANDON, ABANDON_SEEN, OFFER, RELEASE
from protocol.arena.slots import Slot
from protocol.connector_errors import DescriptorRefused, NoCredit, TurnVoid

LIMITS = ArenaLimits(
    size_bytes=1 << 14,
    smallest_window_bytes=1024,
    session_cap_bytes=1 << 14,
    slots=8,
    claims_per_consumer=6,
)
Name = tuple[int, int, int]


class BothEnds(RuleBasedStateMachine):
    """Descriptors go by messages and by records, in any order against each other."""

    def __init__(self) -> None:
        super().__init__()
        keys = count(1)
        self.producer = ProducerEnd(LIMITS, lambda: next(keys))
        self.consumer = ConsumerEnd(LIMITS.slots)
        self.producer.attach("c")
        self.flow: Flow = self.producer.open("s", 1, {"edge": "c"}, 4096)
        self.turn = 1
        self.messages: list[Name] = []
        self.there: deque[tuple[int, Name]] = deque()
        self.back: deque[tuple[int, Name]] = deque()
        self.reading: dict[Name, bool] = {}
        self.offered: dict[Name, Slot[Place]] = {}
        self.seen: list[Name] = []

    @rule(size=st.integers(1, 2000), by_record=st.booleans(), by_message=st.booleans())
    def put(self, size: int, by_record: bool, by_message: bool) -> None:
        try:
            slot = self.producer.fill(self.flow, size)
        except (NoCredit, TurnVoid):
            return
        try:
            self.producer.offer(slot)
        except NoCredit:
            self.producer.discard(slot)
            return
        name = (slot.index, slot.generation, slot.key)
        self.offered[name] = slot
        if by_record:
            self.there.append((OFFER, name))
        if by_message or not by_record:
            self.messages.append(name)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def message_arrives(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.messages))
        self.messages.remove(name)
        self.read(name)

    @precondition(lambda self: self.there)
    @rule()
    def record_arrives(self) -> None:
        kind, name = self.there.popleft()
        if kind == OFFER:
            self.read(name)
            return
        if self.consumer.abandoned(*name[:2]):
            self.back.append((RELEASE, name))
        self.back.append((ABANDON_SEEN, name))

    def read(self, name: Name) -> None:
        try:
            self.consumer.take(*name[:2])
        except DescriptorRefused:
            return
        # Whatever is taken is claimed at the producer, so nothing is written over it.
        assert self.offered[name].claims
        self.reading.setdefault(name, False)
        self.seen.append(name)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def an_old_name_is_used_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.seen))
        if name not in self.reading:
            with pytest.raises(DescriptorRefused):
                self.consumer.take(*name[:2])
        else:
            self.read_again(name)

    def read_again(self, name: Name) -> None:
        if self.reading[name]:
            with pytest.raises(DescriptorRefused):
                self.consumer.take(*name[:2])
        else:
            self.consumer.take(*name[:2])

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.reading)))
        self.consumer.release(*name[:2])
        self.reading[name] = True

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def views_go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.reading)))
        gone = self.consumer.views_gone(*name[:2])
        assert gone == self.reading[name]
        if gone:
            del self.reading[name]
            self.back.append((RELEASE, name))

    @precondition(lambda self: self.back)
    @rule()
    def answer_arrives(self) -> None:
        kind, name = self.back.popleft()
        if kind == RELEASE:
            # Refused, and so raised here, if it had been released before.
            self.producer.release("c", *name)
            del self.offered[name]
        else:
            self.producer.slots.abandon_answered("c")

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.offered)))
        for _ in self.producer.slots.abandon(self.offered[name]):
            self.there.append((ABANDON, name))

    @rule()
    def floor_rises(self) -> None:
        offered, _ = self.producer.void("s", self.turn)
        for slot in offered:
            for _ in self.producer.slots.abandon(slot):
                self.there.append((ABANDON, (slot.index, slot.generation, slot.key)))
        self.turn += 1
        with contextlib.suppress(NoCredit):
            self.flow = self.producer.open("s", self.turn, {"edge": "c"}, 4096)

    @invariant()
    def the_rings_do_not_overflow(self) -> None:
        assert len(self.there) <= 2 * LIMITS.claims_per_consumer
        assert len(self.back) <= 2 * LIMITS.claims_per_consumer

    def teardown(self) -> None:
        """Once everyone has let go and everything has arrived, nothing is claimed."""
        self.floor_rises()
        while self.there or self.back or self.reading:
            if self.there:
                self.record_arrives()
            elif self.back:
                self.answer_arrives()
            else:
                name = next(iter(self.reading))
                self.consumer.release(*name[:2])
                assert self.consumer.views_gone(*name[:2])
                del self.reading[name]
                self.back.append((RELEASE, name))
        assert not self.offered
        assert len(self.producer.slots) == len(self.consumer) == 0
        assert self.producer.slots.load("c") == 0
        # What lies in a void turn's window keeps it; now nothing does.
        assert self.producer.credits.reserved_bytes in (0, 4096)


def test_each_payload_is_released_once() -> None:
    run_state_machine_as_test(
        BothEnds, settings=settings(max_examples=200, stateful_step_count=60, deadline=None)
    )
