"""The link's machines over a network that loses, repeats, reorders and delays."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import CapacityExceeded
from protocol.link import GatewayEnd, GatewayState, NotLinked, WorkerEnd
from protocol.link_events import (
    Action,
    Connected,
    Crowded,
    Deliver,
    Disconnected,
    Down,
    Flush,
    LinkSettings,
    PeerStatus,
    Received,
    Refused,
    StatusChanged,
    Tick,
    Transmit,
    Up,
)
from protocol.link_frames import (
    LINK_VERSION,
    Acknowledge,
    Address,
    Credit,
    Data,
    Heartbeat,
    Hello,
    Introduce,
    Mark,
    Marks,
    Welcome,
    WorkerInfo,
    decode_frame,
    encode_frame,
)
from protocol.stream import Outbox, StreamLimits
from tests.protocol.link_network import Faults, LinkNetwork

faults = st.builds(
    Faults,
    drop=st.floats(0, 0.3),
    duplicate=st.floats(0, 0.3),
    delay_ms=st.floats(0, 400),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("to_worker"), st.integers(1, 40)),
        st.tuples(st.just("to_gateway"), st.integers(1, 40)),
        st.tuples(st.just("urgent"), st.integers(1, 4)),
        st.tuples(st.just("run"), st.integers(1, 3000)),
        st.tuples(st.just("restart_worker"), st.just(0)),
        st.tuples(st.just("restart_gateway"), st.just(0)),
    ),
    max_size=40,
)


def linked_pair() -> LinkNetwork:
    network = LinkNetwork(0, Faults())
    network.run(10)
    assert network.gateway.state is GatewayState.OPEN
    return network


@settings(max_examples=150, deadline=None)
@given(st.integers(), faults, steps)
def test_messages_of_each_link_arrive_once_and_in_order(
    seed: int, fault: Faults, plan: list[tuple[str, int]]
) -> None:
    network = LinkNetwork(seed, fault)
    for action, amount in plan:
        match action:
            case "to_worker":
                for _ in range(amount):
                    network.send_to_worker()
            case "to_gateway":
                for _ in range(amount):
                    network.send_to_gateway()
            case "urgent":
                for _ in range(amount):
                    network.send_to_worker(urgent=True)
            case "run":
                network.flush()
                network.run(amount)
            case "restart_worker":
                network.restart_worker()
            case "restart_gateway":
                network.restart_gateway()
    network.settle()
    # What was sent on the link that stands at the end has arrived completely.
    gateway = network.gateway.incarnation
    there = network.worker_sides[gateway]
    for link, count in network.gateway_side.sent.items():
        if network.gateway.peer is not None and f">{network.gateway.peer}" in link:
            assert there.received.get(link) == count
    for link, count in there.sent.items():
        if link.startswith(f"{network.worker.incarnation}#{there.ups}>"):
            assert network.gateway_side.received.get(link) == count


def test_a_hundred_thousand_messages_survive_a_bad_network_and_restarts() -> None:
    network = LinkNetwork(7, Faults(drop=0.05, duplicate=0.05, delay_ms=5))
    accepted = 0
    for turn in range(5000):
        for _ in range(12):
            accepted += network.send_to_worker()
            accepted += network.send_to_gateway()
        network.flush()
        network.run(5)
        if turn % 1000 == 500:
            network.restart_worker()
        if turn % 1000 == 900:
            network.restart_gateway()
    network.settle()
    assert accepted > 100_000
    assert network.delivered > 0.9 * accepted


def test_messages_of_one_loop_turn_share_a_frame() -> None:
    network = linked_pair()
    for _ in range(100):
        assert network.send_to_worker()
    actions = network.gateway.handle(Flush(), network.now_ms)
    assert len(actions) == 1


def test_an_urgent_message_does_not_wait_for_a_full_window() -> None:
    limits = StreamLimits(window_messages=2)
    end, _ = open_gateway_end(LinkSettings(ordered=limits), Credit(2, 1_000_000))
    for number in range(5):
        end.send(bytes([number]))
    end.send(b"urgent", urgent=True)
    sent = data_frames(end.handle(Flush(), 0))
    assert [(frame.urgent, frame.messages) for frame in sent] == [
        (True, [b"urgent"]),
        (False, [b"\x00", b"\x01"]),
    ]


def test_a_full_queue_refuses_and_keeps_what_it_had() -> None:
    limits = StreamLimits(window_messages=2, queue_messages=3)
    network = LinkNetwork(0, Faults(), LinkSettings(ordered=limits))
    network.run(10)
    taken = [network.send_to_worker() for _ in range(3)]
    assert taken == [True, True, True]
    with pytest.raises(CapacityExceeded):
        network.gateway.send(b"one too many")
    network.settle()
    assert list(next(iter(network.worker_sides.values())).received.values()) == [3]


def test_a_queue_that_payloads_have_filled_takes_control() -> None:
    limits = StreamLimits(queue_messages=4, payload_messages=2)
    end, _ = open_gateway_end(LinkSettings(ordered=limits), Credit(1, 1000))
    for _ in range(2):
        end.send(b"payload", payload=True)
    with pytest.raises(CapacityExceeded):
        end.send(b"payload", payload=True)
    for _ in range(2):
        end.send(b"control")
    with pytest.raises(CapacityExceeded):
        end.send(b"control")


def test_bytes_of_payloads_leave_room_for_control() -> None:
    limits = StreamLimits(queue_bytes=100, payload_bytes=50)
    end, _ = open_gateway_end(LinkSettings(ordered=limits), Credit(1, 1000))
    end.send(bytes(50), payload=True)
    with pytest.raises(CapacityExceeded):
        end.send(bytes(1), payload=True)
    end.send(bytes(50))


@pytest.mark.parametrize("mark", [{"high_messages": 3}, {"high_bytes": 30}])
def test_a_crowded_queue_says_so_once_and_again_when_it_has_emptied(mark: dict[str, int]) -> None:
    limits = StreamLimits(low_messages=1, low_bytes=10, frame_messages=1, **mark)
    end, address = open_gateway_end(LinkSettings(ordered=limits), Credit(1, 1000))
    crowdings = [end.send(bytes(10), payload=True) for _ in range(4)]
    assert crowdings == [[], [], [Crowded("w.1", True)], []]
    assert end.crowded
    through = 0
    told = []
    while end.unacknowledged:
        told.append([a for a in end.handle(Flush(), 0) if isinstance(a, Crowded)])
        through += 1
        mark_ = Marks(Mark(through, 0), Mark(0, 0))
        frame = encode_frame(Acknowledge(address, mark_))
        told.append([a for a in end.handle(Received(frame), 0) if isinstance(a, Crowded)])
    assert [actions for actions in told if actions] == [[Crowded("w.1", False)]]
    assert not end.crowded


def test_a_lost_link_is_not_crowded() -> None:
    limits = StreamLimits(high_messages=1)
    end, _ = open_gateway_end(LinkSettings(ordered=limits), Credit(1, 1000))
    end.send(b"x", payload=True)
    assert end.crowded
    end.handle(Disconnected(), 0)
    assert not end.crowded


def test_bytes_beyond_the_peers_credit_wait() -> None:
    end, _ = open_gateway_end(LinkSettings(), Credit(100, 1000))
    for _ in range(3):
        end.send(bytes(600))
    assert [len(frame.messages) for frame in data_frames(end.handle(Flush(), 0))] == [1]


def test_a_message_above_the_window_travels_alone() -> None:
    limits = StreamLimits(window_bytes=1000, message_bytes=10_000)
    network = LinkNetwork(0, Faults(), LinkSettings(ordered=limits))
    network.run(10)
    for size in (500, 5000, 500):
        assert network.send_to_worker(size)
    network.settle()
    assert list(next(iter(network.worker_sides.values())).received.values()) == [3]


def test_a_message_above_the_limit_is_refused() -> None:
    network = linked_pair()
    with pytest.raises(ValueError, match="above"):
        network.gateway.send(bytes(StreamLimits().message_bytes + 1))


def test_nothing_is_sent_without_a_link() -> None:
    end = GatewayEnd("g")
    with pytest.raises(NotLinked):
        end.send(b"x")
    assert end.deadline_ms is None


def test_a_restarted_worker_is_a_new_incarnation_and_the_old_one_is_lost_at_once() -> None:
    network = linked_pair()
    first = network.gateway.peer
    network.restart_worker()
    network.send_to_worker()
    network.flush()
    network.run(10)
    assert network.gateway_side.downs == ["the worker restarted"]
    assert network.gateway.peer not in (None, first)


def test_a_worker_that_forgot_the_gateway_asks_for_an_introduction() -> None:
    network = linked_pair()
    gateway = network.gateway.incarnation
    network._at_worker(Disconnected(gateway))
    network.run(1500)
    assert network.gateway_side.downs == ["the worker had given the link up"]
    assert network.gateway.state is GatewayState.OPEN
    assert network.worker.gateways == (gateway,)


def test_a_restarted_gateway_gets_a_link_of_its_own() -> None:
    network = linked_pair()
    network.restart_gateway()
    network.run(10)
    assert set(network.worker.gateways) == {"g1", "g2"}
    network.run(6000)
    assert network.worker.gateways == ("g2",)


def test_what_is_overdue_is_sent_again_at_any_time_of_the_clock() -> None:
    outbox = Outbox(StreamLimits(retransmit_ms=2_000.0, retransmit_ceiling_ms=2_000.0))
    outbox.put(b"message")
    # The sum of the two times rounds down: their difference is less than 2,000.
    assert outbox.take(15_875.806061435595) is not None
    due_ms = outbox.deadline_ms
    assert due_ms is not None
    assert [batch.messages for batch in outbox.overdue(due_ms)] == [[b"message"]]


def test_a_silent_peer_is_lost_after_the_stated_time() -> None:
    network = linked_pair()
    network.faults = Faults(drop=1.0)
    network.run(4000)
    assert network.gateway.state is GatewayState.OPEN
    network.run(2000)
    assert network.gateway_side.downs == ["the worker fell silent"]
    assert network.worker.gateways == ()


def test_an_idle_link_stays_open_with_heartbeats_alone() -> None:
    network = linked_pair()
    network.run(60_000)
    assert network.gateway_side.downs == []
    assert network.gateway.state is GatewayState.OPEN


def test_status_travels_with_the_heartbeat_and_an_older_one_is_ignored() -> None:
    end, address = open_gateway_end(LinkSettings(), Credit(10, 1000))
    marks = empty_marks()
    newer = encode_frame(Heartbeat(address, marks, 2, b"new"))
    older = encode_frame(Heartbeat(address, marks, 1, b"old"))
    assert end.handle(Received(newer), 1) == [PeerStatus("w.1", b"new")]
    assert end.handle(Received(older), 2) == []


def test_readiness_is_announced_at_once() -> None:
    network = linked_pair()
    actions = network.worker.handle(StatusChanged(b"s", True, announce=True), network.now_ms)
    (transmit,) = actions
    assert isinstance(transmit, Transmit)
    beat = decode_frame(transmit.data)
    assert isinstance(beat, Heartbeat)
    assert beat.status == b"s"


def test_a_gateway_of_another_version_is_refused_in_words() -> None:
    worker = WorkerEnd("w", WorkerInfo("think", "synthetic", True))
    hello = Hello("g", 1, 7, 9, Credit(1, 1))
    (answer,) = worker.handle(Received(encode_frame(hello), "g"), 0)
    assert isinstance(answer, Transmit)
    gateway = GatewayEnd("g")
    gateway.handle(Connected(), 0)
    (refused,) = gateway.handle(Received(answer.data), 1)
    assert isinstance(refused, Refused)
    assert refused.code == "version_mismatch"
    assert "7 to 9" in refused.reason
    assert gateway.deadline_ms == 1 + LinkSettings().refused_ms
    retry = gateway.handle(Tick(), gateway.deadline_ms)
    assert isinstance(retry[0], Transmit)


def test_a_gateway_too_many_is_refused() -> None:
    worker = WorkerEnd("w", WorkerInfo("s", "e", True), LinkSettings(gateways=1))
    for name in ("a", "b"):
        hello = encode_frame(Hello(name, 1, LINK_VERSION, LINK_VERSION, Credit(1, 1)))
        (answer, *_) = worker.handle(Received(hello, name), 0)
    assert isinstance(answer, Transmit)
    assert worker.gateways == ("a",)


def test_a_repeated_hello_does_not_reset_the_link() -> None:
    worker = WorkerEnd("w", WorkerInfo("s", "e", True))
    hello = Received(encode_frame(Hello("g", 1, LINK_VERSION, LINK_VERSION, Credit(1, 1))), "g")
    assert [type(action) for action in worker.handle(hello, 0)] == [Transmit, Up]
    assert [type(action) for action in worker.handle(hello, 1)] == [Transmit]


def test_a_gateway_that_still_says_hello_is_not_silent() -> None:
    worker = WorkerEnd("w", WorkerInfo("s", "e", True), LinkSettings(silence_ms=5_000))
    hello = Received(encode_frame(Hello("g", 1, LINK_VERSION, LINK_VERSION, Credit(1, 1))), "g")
    worker.handle(hello, 0)
    # The welcome was late, as after a pause of the worker: it knows of no link yet.
    worker.handle(hello, 6_000)
    assert not any(isinstance(action, Down) for action in worker.handle(Tick(), 6_001))
    assert worker.gateways == ("g",)


def test_a_late_hello_of_a_lost_link_does_not_bring_it_back() -> None:
    worker = WorkerEnd("w", WorkerInfo("s", "e", True))
    hello = Received(encode_frame(Hello("g", 1, LINK_VERSION, LINK_VERSION, Credit(1, 1))), "g")
    worker.handle(hello, 0)
    assert worker.handle(Disconnected("g"), 1) == [Down("g", "the connection to the gateway ended")]
    worker.handle(hello, 2)
    assert worker.gateways == ()


def test_late_frames_of_an_earlier_link_between_the_same_two_are_dropped() -> None:
    network = linked_pair()
    gateway, worker, now_ms = network.gateway, network.worker, network.now_ms
    gateway.send(b"late")
    worker.send("g1", b"late")
    (to_worker,) = gateway.handle(Flush(), now_ms)
    (to_gateway,) = worker.handle(Flush(), now_ms)
    assert isinstance(to_worker, Transmit)
    assert isinstance(to_gateway, Transmit)
    network._at_worker(Disconnected("g1"))
    network.run(1500)
    assert gateway.peer == "w1.2"
    gateway_before, worker_before = gateway.freeze(), worker.freeze()
    assert gateway.handle(Received(to_gateway.data), network.now_ms) == []
    answers = worker.handle(Received(to_worker.data, "g1"), network.now_ms)
    assert [type(decode_frame(a.data)) for a in answers if isinstance(a, Transmit)] == [Introduce]
    for answer in answers:
        assert isinstance(answer, Transmit)
        # The request to be introduced is about the earlier link too.
        assert gateway.handle(Received(answer.data), network.now_ms) == []
    assert (gateway.freeze(), worker.freeze()) == (gateway_before, worker_before)


def test_a_frame_under_another_gateways_name_is_dropped() -> None:
    network = linked_pair()
    network.gateway.send(b"x")
    (action,) = network.gateway.handle(Flush(), network.now_ms)
    assert isinstance(action, Transmit)
    assert network.worker.handle(Received(action.data, "somebody else"), network.now_ms) == []
    assert network.worker.malformed == 1


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_dropped_and_counted(data: bytes) -> None:
    network = linked_pair()
    before = (network.gateway.freeze(), network.worker.freeze())
    assert network.gateway.handle(Received(data), network.now_ms) == []
    assert network.worker.handle(Received(data, "g1"), network.now_ms) == []
    assert (network.gateway.freeze(), network.worker.freeze()) == before
    assert network.gateway.malformed + network.gateway.stale == 1


frame_values = st.recursive(
    st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(max_size=8), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["hello", "welcome", "refuse", "introduce", "data", "acknowledge"]),
    st.lists(frame_values, max_size=6),
)
def test_frames_with_wild_fields_never_raise(tag: str, fields: list[object]) -> None:
    network = linked_pair()
    data = msgspec.msgpack.encode([tag, *fields])
    network.gateway.handle(Received(data), network.now_ms)
    network.worker.handle(Received(data, "g1"), network.now_ms)


def test_an_acknowledgement_of_what_was_never_sent_is_ignored() -> None:
    end, address = open_gateway_end(LinkSettings(), Credit(10, 1000))
    end.send(b"x")
    end.handle(Flush(), 0)
    impossible = Acknowledge(address, Marks(Mark(99), Mark(0)))
    end.handle(Received(encode_frame(impossible)), 1)
    assert end.unacknowledged == 1


def test_acknowledgements_ride_on_data_and_otherwise_wait() -> None:
    network = linked_pair()
    network.gateway.send(b"g")
    (out,) = network.gateway.handle(Flush(), network.now_ms)
    assert isinstance(out, Transmit)
    actions = network.worker.handle(Received(out.data, "g1"), network.now_ms)
    assert [type(action) for action in actions] == [Deliver]
    due = network.worker.deadline_ms
    assert due == network.now_ms + LinkSettings().acknowledge_ms
    network.worker.send("g1", b"w")
    (back,) = network.worker.handle(Flush(), network.now_ms)
    assert isinstance(back, Transmit)
    network.gateway.handle(Received(back.data), network.now_ms)
    assert network.gateway.unacknowledged == 0
    assert network.worker.deadline_ms != due


def open_gateway_end(link_settings: LinkSettings, credit: Credit) -> tuple[GatewayEnd, Address]:
    """A gateway's end with an open link to worker `w`, and the link's address."""
    end = GatewayEnd("g", link_settings)
    end.handle(Connected(), 0)
    address = Address("g", "w", 1)
    info = WorkerInfo("think", "synthetic", True)
    welcome = encode_frame(Welcome(address, LINK_VERSION, credit, info))
    assert end.handle(Received(welcome), 0) == [Up("w.1", info)]
    return end, address


def empty_marks() -> Marks:
    return Marks(Mark(0), Mark(0))


def data_frames(actions: list[Action]) -> list[Data]:
    frames = [decode_frame(action.data) for action in actions if isinstance(action, Transmit)]
    return [frame for frame in frames if isinstance(frame, Data)]
