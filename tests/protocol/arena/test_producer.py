"""The producer's end under any order of events: no byte is promised twice, none is lost."""

from __future__ import annotations

from itertools import count, pairwise

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

from protocol.arena.credits import GrantState
from protocol.arena.producer import ArenaLimits, Changes, Flow, Place, ProducerEnd
from protocol.arena.slots import Slot, SlotState
from protocol.connector_errors import (
    DescriptorRefused,
    NoCredit,
    NotAttached,
    PayloadClaimed,
    PayloadTooLarge,
    PeerLost,
    TurnVoid,
)

LIMITS = ArenaLimits(
    size_bytes=1 << 16,
    smallest_window_bytes=1024,
    session_cap_bytes=1 << 15,
    giant_bytes=1 << 18,
    slots=24,
    claims_per_consumer=12,
    consumers=3,
)
CONSUMERS = ["a", "b", "c"]
SESSIONS = ["s", "t"]


def new_end() -> ProducerEnd:
    keys = count(1)
    return ProducerEnd(LIMITS, lambda: next(keys))


class ProducerMachine(RuleBasedStateMachine):
    """Random turns, payloads, releases, floors, deaths, against what each may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.end = new_end()
        self.flows: list[Flow] = []
        self.live: dict[Slot[Place], None] = {}
        self.names: set[tuple[int, int, int]] = set()
        self.unanswered: list[tuple[str, Slot[Place]]] = []

    def freed(self, changes: Changes) -> None:
        for slot in changes.freed:
            assert not slot.claims
            del self.live[slot]

    @rule(consumer=st.sampled_from(CONSUMERS))
    def attach(self, consumer: str) -> None:
        if self.end.slots.knows(consumer):
            with pytest.raises((PayloadClaimed, NoCredit)):
                self.end.attach(consumer)
        else:
            self.end.attach(consumer)

    @rule(consumer=st.sampled_from(CONSUMERS))
    def lose(self, consumer: str) -> None:
        if not self.end.slots.knows(consumer):
            return
        self.freed(self.end.lose(consumer))
        self.unanswered = [entry for entry in self.unanswered if entry[0] != consumer]
        assert all(consumer not in slot.claims for slot in self.live)

    @rule(
        session=st.sampled_from(SESSIONS),
        turn=st.integers(1, 4),
        consumers=st.sets(st.sampled_from(CONSUMERS), min_size=1),
        window=st.sampled_from([100, 1024, 4000, 1 << 13, 1 << 15, 1 << 16]),
    )
    def open(self, session: str, turn: int, consumers: set[str], window: int) -> None:
        before = self.end.freeze()
        edges = {f"to-{consumer}": consumer for consumer in sorted(consumers)}
        try:
            self.flows.append(self.end.open(session, turn, edges, window))
        except (NoCredit, NotAttached, PayloadTooLarge):
            assert self.end.freeze() == before

    @precondition(lambda self: self.flows)
    @rule(
        data=st.data(),
        size=st.one_of(st.integers(1, 3000), st.sampled_from([1 << 13, 1 << 15, 40_000, 1 << 18])),
        offer=st.booleans(),
    )
    def put(self, data: st.DataObject, size: int, offer: bool) -> None:
        flow = data.draw(st.sampled_from(self.flows))
        before = self.end.freeze()
        if flow.grant.state is not GrantState.LIVE:
            with pytest.raises((TurnVoid, PeerLost)):
                self.end.fill(flow, size)
            return
        try:
            slot = self.end.fill(flow, size)
        except (NoCredit, PayloadTooLarge):
            assert self.end.freeze() == before
            return
        assert (slot.index, slot.generation, slot.key) not in self.names
        self.names.add((slot.index, slot.generation, slot.key))
        self.live[slot] = None
        if offer:
            self.offer(slot)

    def offer(self, slot: Slot[Place]) -> None:
        try:
            self.end.offer(slot)
        except NoCredit:
            assert not slot.claims
        else:
            assert set(slot.claims) == set(slot.owner.flow.consumers)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def offer_or_discard(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.live)))
        if slot.state is SlotState.OFFERED:
            for refused in (self.end.offer, self.end.discard):
                with pytest.raises(PayloadClaimed):
                    refused(slot)
            with pytest.raises(PayloadClaimed):
                self.end.renew(slot, 1)
        elif data.draw(st.booleans()):
            self.offer(slot)
        else:
            self.freed(self.end.discard(slot))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), consumer=st.sampled_from(CONSUMERS), forge=st.integers(0, 3))
    def release(self, data: st.DataObject, consumer: str, forge: int) -> None:
        slot = data.draw(st.sampled_from(list(self.live)))
        name = [slot.index, slot.generation, slot.key]
        if forge:
            name[forge - 1] += 1000
        index, generation, key = name
        if forge or consumer not in slot.claims:
            before = self.end.freeze()
            with pytest.raises(DescriptorRefused):
                self.end.release(consumer, index, generation, key)
            assert self.end.freeze() == before
            return
        edge = slot.claims[consumer]
        grant = slot.owner.flow.grant
        spent = grant.outstanding.get(edge, 0)
        self.freed(self.end.release(consumer, index, generation, key))
        # A late release of a void turn returns no credit; any other returns its bytes.
        returned = 0 if grant.state is GrantState.VOID else slot.length
        assert grant.outstanding.get(edge, 0) == spent - returned

    @rule(session=st.sampled_from(SESSIONS), turn=st.one_of(st.none(), st.integers(1, 4)))
    def void(self, session: str, turn: int | None) -> None:
        offered, changes = self.end.void(session, turn)
        self.freed(changes)
        for slot in offered:
            for consumer in self.end.slots.abandon(slot):
                self.unanswered.append((consumer, slot))
        for flow in self.flows:
            if flow.session == session and turn in (None, flow.turn):
                assert flow.grant.state is not GrantState.LIVE
                assert set(flow.slots) <= set(offered)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def answer_abandon(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.unanswered))
        self.unanswered.remove(entry)
        self.end.slots.abandon_answered(entry[0])

    @precondition(lambda self: self.flows)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        flow = data.draw(st.sampled_from(self.flows))
        held = [slot for slot in self.live if slot.owner.flow is flow]
        self.end.close(flow)
        for slot in held:
            if slot.state is SlotState.FILLED:
                self.live.pop(slot, None)

    @invariant()
    def bytes_are_promised_once(self) -> None:
        spans = sorted(
            (slot.offset, slot.offset + slot.length) for slot in self.live if not slot.owner.giant
        )
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start
        assert all(start >= 0 and end <= LIMITS.size_bytes for start, end in spans)

    @invariant()
    def payloads_lie_in_their_own_window(self) -> None:
        for slot in self.live:
            flow = slot.owner.flow
            if slot.owner.piece is not None:
                assert flow.start <= slot.offset
                assert slot.offset + slot.length <= flow.start + flow.ring.size_bytes

    @invariant()
    def grants_stay_within_the_arena_and_the_caps(self) -> None:
        credits = self.end.credits
        reserved = sum(grant.reserved_bytes for grant in credits.grants)
        assert reserved == credits.reserved_bytes == self.end.blocks.taken_bytes
        assert reserved <= LIMITS.size_bytes
        for session in SESSIONS:
            assert credits.session_bytes(session) <= LIMITS.session_cap_bytes

    @invariant()
    def credit_is_what_the_consumers_hold(self) -> None:
        for grant in self.end.credits.grants:
            mine = [slot for slot in self.live if slot.owner.flow.grant is grant]
            assert grant.used_bytes == sum(slot.length for slot in mine)
            for edge, spent in grant.outstanding.items():
                held = sum(
                    slot.length
                    for slot in mine
                    if edge in slot.claims.values() or slot.state is SlotState.FILLED
                )
                assert spent == (0 if grant.state is GrantState.VOID else held)

    @invariant()
    def records_on_their_way_are_bounded(self) -> None:
        for consumer in CONSUMERS:
            if self.end.slots.knows(consumer):
                held = sum(consumer in slot.claims for slot in self.live)
                unanswered = sum(name == consumer for name, _ in self.unanswered)
                assert self.end.slots.load(consumer) == held + unanswered
                assert held <= LIMITS.claims_per_consumer

    def teardown(self) -> None:
        """When all consumers are gone and all turns are over, nothing is left."""
        for consumer in CONSUMERS:
            if self.end.slots.knows(consumer):
                self.freed(self.end.lose(consumer))
        for session in SESSIONS:
            offered, changes = self.end.void(session)
            self.freed(changes)
            assert not offered
        assert not self.live
        assert self.end.freeze() == new_end().freeze()


def test_the_producers_end_keeps_its_promises() -> None:
    run_state_machine_as_test(
        ProducerMachine, settings=settings(max_examples=150, stateful_step_count=60, deadline=None)
    )


def test_a_turn_that_stalls_costs_no_other_turn_its_room() -> None:
    end = new_end()
    end.attach("stalled")
    end.attach("reader")
    stalled = end.open("s", 1, {"edge": "stalled"}, 1 << 14)
    for _ in range((1 << 14) // 1536):
        end.offer(end.fill(stalled, 1500))
    with pytest.raises(NoCredit):
        end.fill(stalled, 1500)
    reading = end.open("t", 1, {"edge": "reader"}, 4096)
    for _ in range(1000):
        slot = end.fill(reading, 1500)
        end.offer(slot)
        end.release("reader", slot.index, slot.generation, slot.key)


def test_a_payload_larger_than_the_window_goes_alone() -> None:
    end = new_end()
    end.attach("reader")
    flow = end.open("s", 1, {"edge": "reader"}, 1024)
    small = end.fill(flow, 100)
    end.offer(small)
    with pytest.raises(NoCredit):
        end.fill(flow, 5000)
    end.release("reader", small.index, small.generation, small.key)
    large = end.fill(flow, 5000)
    assert end.credits.reserved_bytes == 1024 + 8192
    with pytest.raises(NoCredit):
        end.fill(flow, 100)
    end.discard(large)
    assert end.credits.reserved_bytes == 1024


def test_half_the_arena_is_where_own_memory_begins() -> None:
    end = ProducerEnd(ArenaLimits(size_bytes=1 << 16, session_cap_bytes=1 << 16), lambda: 1)
    end.attach("reader")
    flow = end.open("s", 1, {"edge": "reader"}, 4096)
    half = end.fill(flow, 1 << 15)
    assert not half.owner.giant
    end.discard(half)
    assert end.fill(flow, (1 << 15) + 1).owner.giant
