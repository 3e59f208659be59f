"""What only shared memory promises: views, credits, and no trust in descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog

from protocol import unix_listener
from protocol.arena import Arrival, Attachment, handshake, memory
from protocol.arena.handshake import Hello, Prepare
from protocol.arena.records import ABANDON_SEEN, OFFER, RELEASE
from protocol.arrays import array_of
from protocol.connector_errors import (
    DescriptorRefused,
    NoCredit,
    NotAttached,
    PayloadClaimed,
    PayloadTooLarge,
    PeerLost,
    TransferTimeout,
    TurnVoid,
)
from protocol.connectors import ShmDescriptor
from protocol.errors import CapacityExceeded, ConfigError
from protocol.shm_connector import ShmConnector, usable_kind
from tests.protocol.connectors.ends import (
    LIMITS,
    WINDOW_BYTES,
    Ends,
    FarProcess,
    Refused,
    descriptor_of,
    open_files,
    start_ends,
    wire,
)
from tests.protocol.connectors.far_end import content_of, payload_of
from tests.protocol.connectors.test_conformance import checksum, fill


@pytest.fixture
def kind() -> str:
    """Shared memory alone."""
    return "shm"


async def test_a_consumer_killed_while_its_producer_waits_for_it(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    fill(ends, flow, 100_000)
    waiting = asyncio.create_task(ends.near.put_when_ready(payload_of(100_000, 1), flow, 30.0))
    await asyncio.sleep(0)
    await far.kill()
    with pytest.raises(PeerLost):
        await waiting
    assert ends.near.health().reserved_bytes == 0


async def test_ten_times_the_arena_against_a_stalled_consumer(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    size, total = 100_000, 10 * LIMITS["size_bytes"] // 100_000
    far.stop()
    made = fill(ends, flow, size)
    assert len(made) == WINDOW_BYTES // 100_096 == 10
    more = asyncio.Event()

    async def produce() -> None:
        for seed in range(len(made), total):
            made.append(await ends.near.put_when_ready(payload_of(size, seed), flow))
            more.set()

    producing = asyncio.create_task(produce())
    await asyncio.sleep(0)
    assert (len(made), ends.near.health().waiting) == (10, 1)
    far.go_on()
    for seed in range(total):
        while len(made) <= seed:
            more.clear()
            await more.wait()
        assert await far.call("consume", wire(made[seed])) == checksum(size, seed)
        assert ends.near.health().used_bytes <= WINDOW_BYTES
    await producing
    assert total * size > 9.9 * LIMITS["size_bytes"]
    await ends.near.drained(flow)


def attachment_of(ends: Ends) -> Attachment:
    """The near end's attachment to its one producer."""
    assert isinstance(ends.near, ShmConnector)
    (attachment,) = ends.near.attachments
    return attachment


async def from_far(ends: Ends, far: FarProcess, size: int = 1000, seed: int = 1) -> ShmDescriptor:
    """A payload that the far end has put for this process."""
    await far.call("open", seed, {"edge": "near"}, WINDOW_BYTES)
    descriptor = await far.put(seed, size, seed)
    assert isinstance(descriptor, ShmDescriptor)
    return descriptor


# Views


async def test_an_array_of_a_payload_lies_in_the_arena_and_cannot_be_written(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far)
    values = array_of(ends.near.get(descriptor))
    assert np.shares_memory(values, attachment_of(ends).memory)
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        values.flags.writeable = True
    del values
    ends.near.release(descriptor)


async def test_a_released_view_raises(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far)
    payload = ends.near.get(descriptor)
    view = memoryview(payload.data)
    part = view[10:20]
    part.release()
    view.release()
    ends.near.release(descriptor)
    with pytest.raises(ValueError, match="released"):
        payload.data[0]
    with pytest.raises(DescriptorRefused):
        ends.near.get(descriptor)


async def test_what_is_still_held_is_not_written_over(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far, 300_000)
    values = array_of(ends.near.get(descriptor))[100:]
    ends.near.release(descriptor)
    assert ends.near.health().lingering == 1
    for seed in range(2, 12):
        await far.call("open", seed, {"edge": "near"}, WINDOW_BYTES)
        other = await far.put(seed, 300_000, seed)
        assert zlib.crc32(ends.near.get(other).data) == checksum(300_000, seed)
        ends.near.release(other)
        await far.call("close_flow", seed)
    assert np.array_equal(values, content_of(300_000, 1)[100:])
    assert (await far.call("health"))["slots"] == 1
    del values
    await far.call("drained", 1)
    assert ends.near.health().lingering == 0


async def test_a_thread_may_be_the_last_to_let_go(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far, 100_000)
    kept = [array_of(ends.near.get(descriptor))]
    ends.near.release(descriptor)
    await asyncio.to_thread(kept.clear)
    await far.call("drained", 1)


async def test_small_payloads_may_be_copied_and_outlive_their_release(ends: Ends) -> None:
    far = await ends.add("far")
    copying = ShmConnector(str(ends.directory / "copying.arena"), "copying", copied_bytes=1000)
    try:
        await copying.attach(far.path)
        await far.call("open", 1, {"edge": "copying"}, WINDOW_BYTES)
        small, large = await far.put(1, 1000, 1), await far.put(1, 1001, 1)
        kept = copying.get(small).data
        seen = copying.get(large).data
        copying.release(small)
        copying.release(large)
        assert zlib.crc32(kept) == checksum(1000, 1)
        with pytest.raises(ValueError, match="released"):
            seen[0]
        await far.call("drained", 1)
    finally:
        copying.close()


# Descriptors


@pytest.mark.parametrize("field", ["slot", "generation", "offset", "key", "size_bytes"])
async def test_a_forged_descriptor_is_refused(ends: Ends, field: str) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far)
    right = getattr(descriptor, field)
    for wrong in {right + 1, right + 64, right + 1000, 0, 1, 2**40, 2**63} - {right}:
        forged = msgspec.structs.replace(descriptor, **{field: wrong})
        with pytest.raises(DescriptorRefused):
            ends.near.get(forged)
    assert zlib.crc32(ends.near.get(descriptor).data) == checksum(1000, 1)
    ends.near.release(descriptor)


@pytest.mark.parametrize("copied_bytes", [0, 1000])
async def test_a_release_with_another_key_lets_go_of_nothing(ends: Ends, copied_bytes: int) -> None:
    far = await ends.add("far")
    path = str(ends.directory / "reader.arena")
    reader = ShmConnector(path, "reader", copied_bytes=copied_bytes)
    try:
        await reader.attach(far.path)
        await far.call("open", 1, {"edge": "reader"}, WINDOW_BYTES)
        descriptor = await far.put(1, 1000, 1)
        assert isinstance(descriptor, ShmDescriptor)
        reader.get(descriptor)
        with pytest.raises(DescriptorRefused):
            reader.release(msgspec.structs.replace(descriptor, key=descriptor.key + 1))
        assert zlib.crc32(reader.get(descriptor).data) == checksum(1000, 1)
        assert (await far.call("health"))["slots"] == 1
        reader.release(descriptor)
        reader.release(descriptor)
        await far.call("drained", 1)
    finally:
        reader.close()


async def test_a_forged_release_frees_nothing(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far)
    ends.near.get(descriptor)
    attachment = attachment_of(ends)
    attachment._outbox.tell(RELEASE, descriptor.slot, descriptor.generation, 0, descriptor.key + 1)
    attachment._outbox.tell(RELEASE, descriptor.slot, descriptor.generation + 1, 0, descriptor.key)
    attachment._outbox.tell(OFFER, descriptor.slot, descriptor.generation, 0, descriptor.key)
    attachment._outbox.tell(ABANDON_SEEN, descriptor.slot, descriptor.generation, 0, descriptor.key)
    other = await from_far(ends, far, 1000, 2)
    ends.near.get(other)
    ends.near.release(other)
    await far.call("drained", 2)
    health = await far.call("health")
    assert (health["refused"], health["slots"]) == (4, 1)
    ends.near.release(descriptor)
    await far.call("drained", 1)


async def test_a_descriptor_is_small(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far)
    assert len(wire(descriptor)) < 120
    ends.near.discard(descriptor)


async def test_a_descriptor_may_come_before_the_arena(ends: Ends, tmp_path: Path) -> None:
    far = await ends.add("far")
    late = ShmConnector(str(ends.directory / "late.arena"), "late")
    try:
        await far.call("attach", late.path)
        await late.consumer("far", 10.0)
        descriptor = late.put(payload_of(1000, 1), late.open("s", 1, {"edge": "far"}, 65536))
        assert isinstance(descriptor, ShmDescriptor)
        with pytest.raises(NotAttached):
            ends.near.get(descriptor)
        with pytest.raises(TransferTimeout):
            await ends.near.receive(descriptor, 0.01)
        waiting = asyncio.create_task(ends.near.receive(descriptor, 10.0))
        assert isinstance(ends.near, ShmConnector)
        await ends.near.attach(late.path)
        # Its key is no secret among the processes that may read the arena.
        assert zlib.crc32((await waiting).data) == checksum(1000, 1)
    finally:
        late.close()


# Credits


async def test_raising_the_floor_voids_a_turn_at_both_ends(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    held = wire(ends.near.put(payload_of(100_000, 1), flow))
    unread = wire(ends.near.put(payload_of(100_000, 2), flow))
    await far.call("receive", held)
    fill(ends, flow, 100_000)
    waiting = asyncio.create_task(ends.near.put_when_ready(payload_of(100_000, 3), flow))
    await asyncio.sleep(0)
    await far.call("void", 1)
    ends.near.void("s", 1)
    with pytest.raises(TurnVoid):
        await waiting
    # Unread payloads are given back, the one that is being read is not.
    while ends.near.health().slots > 1:
        await far.call("health")
    with pytest.raises(Refused, match="descriptor_refused"):
        await far.call("receive", unread)
    assert ends.near.health().reserved_bytes == WINDOW_BYTES
    # Its late release frees the slot, and with it the turn's last bytes.
    await far.call("release", held)
    await ends.near.drained(flow)
    assert ends.near.health().reserved_bytes == 0
    with pytest.raises(TurnVoid):
        ends.near.put(payload_of(10, 4), flow)


async def test_a_payload_of_a_void_turn_is_given_back_on_arrival(ends: Ends) -> None:
    far = await ends.add("far")
    ends.near.void("s", 1)
    descriptor = await from_far(ends, far)
    with pytest.raises(TurnVoid):
        ends.near.get(descriptor)
    await far.call("drained", 1)


@pytest.mark.parametrize("size", [1000, 6 << 20])
async def test_an_abandoned_payload_comes_back_unread(ends: Ends, size: int) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far, size)
    await far.call("abandon", wire(descriptor))
    await far.call("drained", 1)
    with pytest.raises(DescriptorRefused):
        await ends.near.receive(descriptor, 10.0)


async def test_an_abandoned_payload_stays_for_the_one_who_reads_it(ends: Ends) -> None:
    far = await ends.add("far")
    descriptor = await from_far(ends, far)
    payload = ends.near.get(descriptor)
    await far.call("abandon", wire(descriptor))
    assert zlib.crc32(payload.data) == checksum(1000, 1)
    ends.near.release(descriptor)
    await far.call("drained", 1)


async def test_each_branch_of_a_fan_out_has_its_own_credit(ends: Ends) -> None:
    slow, fast = await ends.add("slow"), await ends.add("fast")
    flow = ends.flow(1, slow, fast)
    slow.stop()
    made = fill(ends, flow, 100_000)
    for seed, descriptor in enumerate(made):
        assert await fast.call("consume", wire(descriptor)) == checksum(100_000, seed)
    # The fast branch has all its credit back; the bytes are the slow one's still.
    assert fill(ends, flow, 100_000) == []
    slow.go_on()
    assert await slow.call("consume", wire(made[0])) == checksum(100_000, 0)
    await ends.near.put_when_ready(payload_of(100_000, 0), flow, 10.0)


async def test_a_dead_branch_holds_the_others_up_no_longer(ends: Ends) -> None:
    dead, alive = await ends.add("dead"), await ends.add("alive")
    flow = ends.flow(1, dead, alive)
    made = fill(ends, flow, 100_000)
    for seed, descriptor in enumerate(made):
        assert await alive.call("consume", wire(descriptor)) == checksum(100_000, seed)
    await dead.kill()
    await ends.one_lost(dead)
    await ends.near.drained(flow)
    descriptor = ends.near.put(payload_of(100_000, 7), flow)
    assert await alive.call("consume", wire(descriptor)) == checksum(100_000, 7)


async def test_a_closed_turn_has_drained_when_its_only_reader_is_dead(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    ends.near.put(payload_of(1000, 1), flow)
    ends.near.close_flow(flow)
    draining = asyncio.create_task(ends.near.drained(flow))
    await asyncio.sleep(0)
    await far.kill()
    await asyncio.wait_for(draining, 10.0)


@pytest.mark.parametrize("way", ["close_flow", "void", "death"])
async def test_the_window_of_an_ended_turn_is_room_for_a_large_payload(
    ends: Ends, way: str
) -> None:
    far, other = await ends.add("far"), await ends.add("other")
    flow = ends.flow(1, far)
    ended = ends.flow(2, other, window=4 << 20)
    held = ends.flow(3, far, window=2 << 20)
    waiting = asyncio.create_task(ends.near.put_when_ready(payload_of(3 << 20, 1), flow))
    await asyncio.sleep(0)
    assert ends.near.health().waiting == 1
    if way == "close_flow":
        ends.near.close_flow(ended)
    elif way == "void":
        ends.near.void("s", 2)
    else:
        await other.kill()
    descriptor = await asyncio.wait_for(waiting, 10.0)
    assert await far.call("consume", wire(descriptor)) == checksum(3 << 20, 1)
    ends.near.close_flow(held)


async def test_a_held_payload_goes_with_its_turn(ends: Ends) -> None:
    far = await ends.add("far")
    assert isinstance(ends.near, ShmConnector)
    flow = ends.flow(1, far)
    files = open_files()
    held = ends.near.hold(payload_of(5 << 20, 1), flow)
    assert open_files() == files + 1
    ends.near.close_flow(flow)
    assert open_files() == files
    with pytest.raises(DescriptorRefused):
        ends.near.offer(held, flow)


async def test_one_session_takes_no_more_of_the_arena_than_its_cap(tmp_path: Path) -> None:
    limits = {**LIMITS, "session_cap_bytes": 2 << 20}
    os.chmod(tmp_path, 0o700)
    ends = start_ends("shm", tmp_path, limits)
    far = await ends.add("far", limits)
    for turn in (1, 2):
        ends.flow(turn, far)
    with pytest.raises(NoCredit):
        ends.flow(3, far)
    ends.near.open("other", 1, {"edge": "far"}, WINDOW_BYTES)
    ends.near.void("s", 1)
    ends.flow(3, far)
    with pytest.raises(PayloadTooLarge):
        ends.near.open("other", 2, {"edge": "far"}, 4 << 20)
    await ends.end()


async def test_the_latest_goes_when_earlier_ones_were_held_back(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    assert isinstance(ends.near, ShmConnector)
    held = ends.near.hold(payload_of(1000, 1), flow)
    latest = ends.near.replace(held, payload_of(900, 2))
    with pytest.raises(DescriptorRefused):
        ends.near.replace(held, payload_of(900, 3))
    assert isinstance(latest, ShmDescriptor)
    ends.near.offer(latest, flow)
    with pytest.raises(PayloadClaimed):
        ends.near.replace(latest, payload_of(900, 3))
    assert await far.call("consume", wire(latest)) == checksum(900, 2)
    await ends.near.drained(flow)


# Arrivals


async def test_arrivals_come_in_order_with_their_notes(ends: Ends) -> None:
    far = await ends.add("far")
    sizes = [10, 6 << 20, 0, 100_000, 6 << 20, 5]
    await far.call("listen")
    flow = ends.flow(3, far)
    assert isinstance(ends.near, ShmConnector)
    for seed, size in enumerate(sizes):
        await ends.near.put_when_ready(
            payload_of(size, seed), flow, 10.0, f"note {seed}".encode(), tell=True
        )
    await ends.near.drained(flow)
    assert await far.call("heard") == [
        ["near", "to-far", "s", 3, f"note {seed}", checksum(size, seed)]
        for seed, size in enumerate(sizes)
    ]


# Attaching


async def test_two_consumers_of_one_name_are_one_too_many(ends: Ends) -> None:
    far = await ends.add("far")
    with pytest.raises(Refused, match="attached already"):
        await far.call("attach", ends.path)
    descriptor = await from_far(ends, far)
    ends.near.discard(descriptor)


async def test_a_stranger_that_says_nothing_understandable_is_sent_away(ends: Ends) -> None:
    far = await ends.add("far")
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.setblocking(False)
        await loop.sock_connect(stranger, ends.path)
        assert await loop.sock_recv(stranger, 4096)
        await loop.sock_sendall(stranger, b"\xc1 not msgpack")
        assert b"cannot be read" in await loop.sock_recv(stranger, 4096)
        assert await loop.sock_recv(stranger, 4096) == b""
    descriptor = ends.near.put(payload_of(10, 1), ends.flow(1, far))
    assert await far.call("consume", wire(descriptor)) == checksum(10, 1)


async def test_a_consumer_of_another_version_is_refused(ends: Ends) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.setblocking(False)
        await loop.sock_connect(stranger, ends.path)
        assert await loop.sock_recv(stranger, 4096)
        outbox_fd, _ = memory.create("outbox", 4096)
        handshake.send(stranger, Hello(handshake.VERSION - 1, "old"), [outbox_fd])
        os.close(outbox_fd)
        assert b"speaks version" in await loop.sock_recv(stranger, 4096)
        assert await loop.sock_recv(stranger, 4096) == b""
    assert ends.near.health().consumers == 0


async def test_an_arena_of_another_version_is_refused(ends: Ends) -> None:
    path = str(ends.directory / "old.arena")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        assert isinstance(ends.near, ShmConnector)
        attaching = asyncio.create_task(ends.near.attach(path, timeout_s=10.0))
        await asyncio.sleep(0)
        with listener.accept()[0] as arena:
            handshake.send(arena, Prepare(handshake.VERSION + 1, 4096), [])
            with pytest.raises(DescriptorRefused, match="speaks version"):
                await attaching
    os.unlink(path)


async def test_too_many_at_the_door_is_no_refusal(ends: Ends) -> None:
    path = str(ends.directory / "busy.arena")
    waiting = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        assert isinstance(ends.near, ShmConnector)
        with pytest.raises(PeerLost):
            await ends.near.attach(path, timeout_s=10.0)
        for one in waiting:
            one.close()
    os.unlink(path)


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """This process can open nothing."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_room_for_files_the_door_rests(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_listener, "_ACCEPT_AGAIN_S", 0.1)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.setblocking(False)
        with structlog.testing.capture_logs() as logs, no_more_files():
            await loop.sock_connect(stranger, ends.path)
            for _ in range(20):
                await asyncio.sleep(0)
        assert [entry["event"] for entry in logs] == ["accept_failed"]
        # It is let in when there is room again.
        assert await loop.sock_recv(stranger, 4096)


async def test_a_large_payload_for_which_there_is_no_memory_changes_nothing(ends: Ends) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    with no_more_files(), pytest.raises(CapacityExceeded, match="no memory for a large payload"):
        ends.near.put(payload_of(6 << 20, 1), flow)
    descriptor = ends.near.put(payload_of(6 << 20, 2), flow)
    assert await far.call("consume", wire(descriptor)) == checksum(6 << 20, 2)
    await ends.near.drained(flow)


async def test_memory_that_was_lost_on_its_way_holds_nothing_up(ends: Ends) -> None:
    far = await ends.add("far")
    assert isinstance(ends.near, ShmConnector)
    arrived: asyncio.Queue[Arrival] = asyncio.Queue()
    ends.near.on_arrival = arrived.put_nowait
    await far.call("open", 1, {"edge": "near"}, WINDOW_BYTES)
    with no_more_files():
        giant = await far.put(1, 6 << 20, 1)
        with pytest.raises(DescriptorRefused):
            await ends.near.receive(giant, 10.0)
        # Each has the whole window: the next can be put when it is given back.
        await far.call("drained", 1)
        await far.call("tell", 1, 6 << 20, 2)
        await far.call("drained", 1)
        await far.call("tell", 1, 1000, 3)
        arrival = await asyncio.wait_for(arrived.get(), 10.0)
    assert zlib.crc32(arrival.payload.data) == checksum(1000, 3)
    ends.near.release(arrival.descriptor)
    await far.call("drained", 1)


async def test_memory_that_could_not_be_sent_goes_with_the_next_word(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = await ends.add("far")
    small = ends.near.put(payload_of(10, 1), ends.flow(1, far))
    flow = ends.flow(2, far)
    sent = handshake.send

    def refused(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    monkeypatch.setattr(handshake, "send", refused)
    giant = ends.near.put(payload_of(6 << 20, 2), flow)
    monkeypatch.setattr(handshake, "send", sent)
    receiving = far.begin("consume", wire(giant))
    assert await far.call("consume", wire(small)) == checksum(10, 1)
    assert await asyncio.wait_for(receiving, 10.0) == checksum(6 << 20, 2)


async def test_memory_that_was_given_back_before_it_was_sent_is_closed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = await ends.add("far")
    flow = ends.flow(1, far)
    files = open_files()

    def refused(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    monkeypatch.setattr(handshake, "send", refused)
    ends.near.put(payload_of(6 << 20, 2), flow)
    assert open_files() == files + 1
    ends.near.void("s", 1)
    await ends.near.drained(flow)
    assert open_files() == files


async def test_a_payload_that_is_named_twice_is_one(ends: Ends) -> None:
    far = await ends.add("far")
    assert isinstance(ends.near, ShmConnector)
    arrived: asyncio.Queue[Arrival] = asyncio.Queue()
    ends.near.on_arrival = arrived.put_nowait
    attachment = attachment_of(ends)
    await far.call("open", 1, {"edge": "near"}, WINDOW_BYTES)
    # Taken by its descriptor before its record has been read.
    attachment._loop.remove_reader(attachment._woken_fd)
    descriptor = descriptor_of(await far.call("tell", 1, 100_000, 1))
    payload = ends.near.get(descriptor)
    attachment._loop.add_reader(attachment._woken_fd, attachment._woken)
    arrival = await arrived.get()
    assert arrival.payload is payload
    ends.near.release(descriptor)
    with pytest.raises(ValueError, match="released"):
        payload.data[0]
    await far.call("drained", 1)


async def test_a_callback_that_fails_ends_no_attachment(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str) -> None:
        raise RuntimeError(name)

    assert isinstance(ends.near, ShmConnector)
    monkeypatch.setattr(ends.near, "_on_consumer", fails)
    far = await ends.add("far")
    # Nothing will take its connection for that of a stranger who never spoke.
    assert not ends.near._arena._door._strangers
    descriptor = ends.near.put(payload_of(10, 1), ends.flow(1, far))
    assert await far.call("consume", wire(descriptor)) == checksum(10, 1)


async def test_nobody_listens(ends: Ends) -> None:
    assert isinstance(ends.near, ShmConnector)
    with pytest.raises(PeerLost):
        await ends.near.attach(str(ends.directory / "nobody.arena"))


async def test_a_socket_in_use_is_not_taken_over(ends: Ends) -> None:
    with pytest.raises(ConfigError, match="in use"):
        ShmConnector(ends.path, "second")


async def test_a_socket_that_a_killed_process_left_is_swept(ends: Ends) -> None:
    far = await ends.add("far")
    await far.kill()
    assert stat.S_ISSOCK(os.stat(far.path).st_mode)
    again = ShmConnector(far.path, "again")
    assert stat.S_IMODE(os.stat(far.path).st_mode) == 0o600
    again.close()


async def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="0700"):
        ShmConnector(str(tmp_path / "near.arena"), "near")


async def test_without_shared_memory_an_edge_is_inline_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with structlog.testing.capture_logs() as logs:
        assert usable_kind("shm", "listen") == "inline"
    (entry,) = logs
    assert (entry["event"], entry["edge"]) == ("connector_falls_back", "listen")
    assert "needs Linux" in entry["reason"]
    with pytest.raises(ConfigError, match="needs Linux"):
        ShmConnector("/nowhere", "near")
