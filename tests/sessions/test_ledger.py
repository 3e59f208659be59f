"""The ledger: nothing is reserved that does not fit, and nothing stays that was given back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.device_bytes import HOST, DeviceBytes, binary_size
from protocol.errors import CapacityExceeded
from sessions.ledger import Budget, Ledger, OutOfBytes

GPU = "cuda:0"


def ledger(total: int = 100, **budget: float) -> Ledger:
    return Ledger({HOST: Budget(total, **budget)})


def reserved(of: Ledger, device: str = HOST) -> int:
    return of.devices()[device].reserved


def test_what_fits_is_reserved_until_it_is_released() -> None:
    it = ledger()
    it.reserve("a", "t", {HOST: 60})
    assert it.of("a") == {HOST: 60}
    it.reserve("b", "t", {HOST: 40})
    assert reserved(it) == 100
    it.release("a")
    assert (reserved(it), it.of("a")) == (40, {})
    it.release("a")
    assert reserved(it) == 40


def test_what_does_not_fit_is_refused_with_what_is_free() -> None:
    it = ledger()
    it.reserve("a", "t", {HOST: 60})
    with pytest.raises(CapacityExceeded, match="41 B of cpu are needed, and 40 B of 100 B"):
        it.reserve("b", "t", {HOST: 41})
    assert (reserved(it), it.of("b")) == (60, {})


def test_all_devices_or_none() -> None:
    it = Ledger({HOST: Budget(100), GPU: Budget(10)})
    with pytest.raises(CapacityExceeded, match=GPU):
        it.reserve("a", "t", {HOST: 50, GPU: 11})
    assert (reserved(it), reserved(it, GPU)) == (0, 0)


def test_a_device_without_a_budget_is_counted_and_not_bounded() -> None:
    it = ledger()
    it.reserve("a", "t", {GPU: 10**12})
    assert it.devices()[GPU] == DeviceBytes(None, sessions=10**12)
    assert it.devices()[GPU].free is None


def test_a_budget_that_the_config_gave_is_not_replaced() -> None:
    it = ledger(100)
    it.bound(HOST, Budget(1000))
    it.bound(GPU, Budget(7))
    assert (it.devices()[HOST].budget, it.devices()[GPU].budget) == (100, 7)


def test_engine_and_arena_come_before_sessions() -> None:
    it = ledger()
    it.load(HOST, engine=50, arena=20)
    it.reserve("a", "t", {HOST: 30})
    with pytest.raises(CapacityExceeded, match="0 B of 30 B"):
        it.reserve("b", "t", {HOST: 1})


def test_an_engine_that_leaves_nothing_of_the_budget_is_refused() -> None:
    it = ledger(100, head_room=0.1)
    it.load(HOST, engine=80, arena=10)
    with pytest.raises(CapacityExceeded, match="takes 91 B of cpu") as refused:
        it.load(HOST, engine=60, pool=21, arena=10)
    assert refused.value.field == "budget.cpu"


def test_a_budget_may_be_raised_and_is_never_lowered() -> None:
    it = ledger(100, head_room=0.1)
    it.raise_to(HOST, 150)
    it.raise_to(HOST, 120)
    assert (it.devices()[HOST].budget, it.devices()[HOST].head_room) == (150, 15)


def test_sessions_have_the_pool_and_no_more() -> None:
    it = ledger()
    it.load(HOST, engine=50, pool=30)
    assert reserved(it) == 80
    it.reserve("a", "t", {HOST: 20})
    assert reserved(it) == 80
    assert it.devices()[HOST].accounts() == {
        "engine": 50,
        "pool": 10,
        "sessions": 20,
        "kept": 0,
        "arena": 0,
    }
    with pytest.raises(OutOfBytes, match="10 B of 30 B") as refused:
        it.reserve("b", "t", {HOST: 11})
    assert refused.value.shortage == {HOST: 1}
    it.reserve("b", "t", {HOST: 10})
    with pytest.raises(CapacityExceeded, match="31 B of cpu are needed"):
        it.reserve("c", "t", {HOST: 31})


def test_a_pool_bounds_a_device_without_a_budget_too() -> None:
    it = Ledger()
    it.load(GPU, engine=50, pool=30)
    it.reserve("a", "t", {GPU: 30})
    with pytest.raises(OutOfBytes):
        it.reserve("b", "t", {GPU: 1})


def test_what_lies_in_the_pool_can_be_had_whatever_output_has_taken() -> None:
    it = ledger(100, head_room=0.2)
    it.load(HOST, engine=50, pool=30)
    it.keep(20)
    it.reserve("a", "t", {HOST: 30})
    assert reserved(it) == 100


def test_what_others_would_have_to_free_is_told_for_every_device() -> None:
    it = Ledger({HOST: Budget(100), GPU: Budget(10)})
    it.reserve("a", "t", {HOST: 60, GPU: 10})
    with pytest.raises(OutOfBytes, match=r"cpu .* cuda:0") as refused:
        it.reserve("b", "t", {HOST: 50, GPU: 4})
    assert refused.value.shortage == {HOST: 10, GPU: 4}


def test_sessions_leave_the_head_room_and_output_takes_it() -> None:
    it = ledger(100, head_room=0.2)
    with pytest.raises(CapacityExceeded, match="80 B of 80 B"):
        it.reserve("a", "t", {HOST: 81})
    it.reserve("a", "t", {HOST: 80})
    assert it.has_room(20)
    assert not it.has_room(21)
    it.keep(20)
    assert (it.kept_bytes, it.devices()[HOST].free) == (20, 0)
    assert not it.has_room(1)
    it.drop(20)
    assert it.has_room(20)


def test_output_that_is_kept_leaves_less_for_sessions() -> None:
    it = ledger(100, head_room=0.2)
    it.keep(50)
    with pytest.raises(CapacityExceeded, match="50 B of 80 B"):
        it.reserve("a", "t", {HOST: 51})
    it.reserve("a", "t", {HOST: 50})


def test_the_sessions_of_one_tenant_have_a_share_and_make_room_for_each_other() -> None:
    it = ledger(100, tenant_share=0.5)
    it.reserve("a", "one", {HOST: 30})
    with pytest.raises(OutOfBytes, match="one tenant may have 50 B together") as refused:
        it.reserve("b", "one", {HOST: 21})
    assert (refused.value.shortage, refused.value.tenant) == ({HOST: 1}, "one")
    with pytest.raises(CapacityExceeded, match="one tenant may have 50 B together") as never:
        it.reserve("b", "two", {HOST: 51})
    assert not isinstance(never.value, OutOfBytes)
    it.reserve("b", "two", {HOST: 50})
    with pytest.raises(OutOfBytes) as refused:
        it.reserve("c", "three", {HOST: 40})
    assert (refused.value.shortage, refused.value.tenant) == ({HOST: 20}, None)
    it.release("a")
    it.reserve("c", "one", {HOST: 50})


def test_new_settings_count_beside_the_old_until_they_are_taken() -> None:
    it = ledger()
    it.reserve("a", "t", {HOST: 60})
    it.reserve("a", "t", {HOST: 30})
    assert it.of("a") == {HOST: 60}
    it.settle("a", taken=True)
    assert it.of("a") == {HOST: 30}
    it.reserve("a", "t", {HOST: 80})
    it.settle("a", taken=False)
    assert it.of("a") == {HOST: 30}


def test_new_settings_that_do_not_fit_leave_the_old_as_they_are() -> None:
    it = ledger()
    it.reserve("a", "t", {HOST: 60})
    it.settle("a", taken=True)
    with pytest.raises(CapacityExceeded):
        it.reserve("a", "t", {HOST: 101})
    it.settle("a", taken=False)
    assert it.of("a") == {HOST: 60}


def test_a_session_counts_with_the_larger_of_declared_and_measured() -> None:
    it = ledger()
    it.reserve("a", "t", {HOST: 60})
    it.measure("a", {HOST: 10})
    assert (it.of("a"), it.devices()[HOST].undeclared) == ({HOST: 60}, 0)
    it.measure("a", {HOST: 75, GPU: 5})
    assert it.of("a") == {HOST: 75, GPU: 5}
    assert (it.devices()[HOST].undeclared, it.devices()[GPU].undeclared) == (15, 5)
    with pytest.raises(CapacityExceeded, match="25 B of 100 B"):
        it.reserve("b", "t", {HOST: 26})
    it.measure("a", {HOST: 60})
    it.reserve("b", "t", {HOST: 40})
    it.release("a")
    assert it.devices()[HOST].undeclared == 0


def test_what_is_held_beyond_the_budget_is_told_and_nothing_more_is_reserved() -> None:
    it = ledger()
    it.reserve("a", "t", {HOST: 60})
    it.measure("a", {HOST: 130})
    assert it.devices()[HOST].free == -30
    with pytest.raises(CapacityExceeded, match="0 B of 100 B"):
        it.reserve("b", "t", {HOST: 1})
    assert not it.has_room(1)


def test_a_session_that_is_not_here_is_not_measured() -> None:
    it = ledger()
    it.measure("a", {HOST: 10})
    it.settle("a", taken=True)
    assert reserved(it) == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (3 << 40, "3072 GiB")],
)
def test_sizes_are_told_in_binary_units(size: int, text: str) -> None:
    assert binary_size(size) == text


SESSIONS = st.sampled_from("abcdef")
TENANTS = st.sampled_from(("one", "two"))
SIZES = st.dictionaries(st.sampled_from((HOST, GPU)), st.integers(0, 70))


class Reservations(RuleBasedStateMachine):
    """Against a model: who declared what, and what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger({HOST: Budget(200, 0.1, 0.7), GPU: Budget(100)})
        self.ledger.load(HOST, engine=60, arena=5)
        self.declared: dict[str, tuple[str, dict[str, int]]] = {}
        self.kept = 0

    @rule(session=SESSIONS, tenant=TENANTS, sizes=SIZES)
    def open(self, session: str, tenant: str, sizes: dict[str, int]) -> None:
        if session in self.declared:
            return
        try:
            self.ledger.reserve(session, tenant, sizes)
        except CapacityExceeded:
            assert self.ledger.of(session) == {}
        else:
            self.ledger.settle(session, taken=True)
            self.declared[session] = (tenant, sizes)

    @rule(session=SESSIONS, sizes=SIZES, taken=st.booleans())
    def configure(self, session: str, sizes: dict[str, int], taken: bool) -> None:
        if session not in self.declared:
            return
        tenant, before = self.declared[session]
        try:
            self.ledger.reserve(session, tenant, sizes)
        except CapacityExceeded:
            pass
        else:
            self.in_budget()
            self.ledger.settle(session, taken=taken)
            self.declared[session] = (tenant, sizes if taken else before)

    @rule(session=SESSIONS)
    def close(self, session: str) -> None:
        self.ledger.release(session)
        self.declared.pop(session, None)

    @rule(size=st.integers(0, 60))
    def keep(self, size: int) -> None:
        if self.ledger.has_room(size):
            self.ledger.keep(size)
            self.kept += size

    @rule(part=st.integers(0, 60))
    def acknowledge(self, part: int) -> None:
        part = min(part, self.kept)
        self.ledger.drop(part)
        self.kept -= part

    @invariant()
    def in_budget(self) -> None:
        for held in self.ledger.devices().values():
            assert held.budget is not None
            assert held.reserved <= held.budget

    @invariant()
    def the_accounts_are_those_of_the_sessions(self) -> None:
        devices = self.ledger.devices()
        for device in (HOST, GPU):
            sizes = [sizes.get(device, 0) for _, sizes in self.declared.values()]
            assert devices[device].sessions == sum(sizes)
        host = devices[HOST]
        assert host.kept == self.kept
        for tenant in ("one", "two"):
            theirs = [s.get(HOST, 0) for t, s in self.declared.values() if t == tenant]
            assert sum(theirs) <= 0.7 * (200 - 20 - 60 - 5)


Reservations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReservations = Reservations.TestCase
