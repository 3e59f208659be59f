"""The link's shells over real sockets, both ends on one loop."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from protocol import link_shell
from protocol.connectors import InlineDescriptor
from protocol.endpoints import check_endpoint
from protocol.errors import CapacityExceeded, ConfigError, EngineLost
from protocol.link_events import LinkSettings
from protocol.link_frames import LINK_VERSION, Credit, Hello, WorkerInfo, encode_frame
from protocol.messages import (
    Acknowledge,
    Command,
    Fence,
    Output,
    RaiseFloor,
    Report,
    Signal,
    WorkerStatus,
)
from protocol.payloads import text_payload
from protocol.stream import StreamLimits
from protocol.worker_endpoint import WorkerEndpoint
from protocol.worker_link import WorkerLink
from tests.ports import free_port

FENCE = Fence("s", 1, "gateway-1")


@dataclass
class Recorder:
    """What the callbacks of one end were called with, one queue a kind."""

    ups: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    downs: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    reports: asyncio.Queue[Report] = field(default_factory=asyncio.Queue)
    statuses: asyncio.Queue[WorkerStatus] = field(default_factory=asyncio.Queue)
    commands: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)
    ready: bool = True

    def on_report(self, report: Report) -> None:
        if isinstance(report, WorkerStatus):
            self.statuses.put_nowait(report)
        else:
            self.reports.put_nowait(report)

    def status(self) -> WorkerStatus:
        return WorkerStatus("think", 0, 0, 0, ready=self.ready)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Within one host, and as between two."""
    if request.param == "tcp":
        yield f"tcp://127.0.0.1:{free_port()}"
        return
    with tempfile.TemporaryDirectory(prefix="antiphon-test-") as directory:
        yield f"ipc://{directory}/worker.sock"


def make_link(
    endpoint: str,
    recorder: Recorder,
    incarnation: str = "gateway-1",
    settings: LinkSettings | None = None,
) -> WorkerLink:
    return WorkerLink(
        endpoint,
        incarnation,
        on_report=recorder.on_report,
        on_up=lambda worker, _info: recorder.ups.put_nowait(worker),
        on_down=recorder.downs.put_nowait,
        settings=settings,
    )


def make_endpoint(
    endpoint: str,
    recorder: Recorder,
    incarnation: str = "worker-1",
    settings: LinkSettings | None = None,
) -> WorkerEndpoint:
    return WorkerEndpoint(
        endpoint,
        incarnation,
        WorkerInfo("think", "synthetic", recorder.ready),
        on_command=lambda _gateway, command: recorder.commands.put_nowait(command),
        on_gateway_up=recorder.ups.put_nowait,
        on_gateway_down=recorder.downs.put_nowait,
        status=recorder.status,
        settings=settings,
    )


@pytest.fixture
async def pair(
    endpoint: str,
) -> AsyncIterator[tuple[WorkerLink, Recorder, WorkerEndpoint, Recorder]]:
    gateway, worker = Recorder(), Recorder()
    bound = make_endpoint(endpoint, worker)
    link = make_link(endpoint, gateway)
    try:
        await gateway.ups.get()
        await worker.ups.get()
        yield link, gateway, bound, worker
    finally:
        link.close()
        bound.close()


Pair = tuple[WorkerLink, Recorder, WorkerEndpoint, Recorder]


def signal(number: int) -> Signal:
    return Signal(FENCE, f"c{number}", "note", {"n": number})


async def test_commands_and_reports_arrive_in_order(pair: Pair) -> None:
    link, gateway, bound, worker = pair
    # More than a socket takes at once, from one loop turn.
    count = 6000
    for number in range(count):
        link.send(signal(number))
    for number in range(count):
        command = await worker.commands.get()
        assert isinstance(command, Signal)
        assert command.arguments == {"n": number}
    for number in range(count):
        output = Output("s", 1, number, InlineDescriptor(text_payload(str(number))))
        bound.send("gateway-1", output)
    for number in range(count):
        report = await gateway.reports.get()
        assert isinstance(report, Output)
        assert report.sequence == number


async def test_a_full_queue_refuses_and_loses_nothing(pair: Pair) -> None:
    link, _, _, worker = pair
    sent = StreamLimits().queue_messages
    for number in range(sent):
        link.send(signal(number))
    with pytest.raises(CapacityExceeded):
        link.send(signal(sent))
    for number in range(sent):
        command = await worker.commands.get()
        assert isinstance(command, Signal)
        assert command.arguments == {"n": number}


async def test_an_acknowledgement_waits_for_something_to_travel_with(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _, _, worker = pair
    monkeypatch.setattr(link_shell, "FLUSH_S", 3600.0)
    link.send(Acknowledge(FENCE, 1, 1))
    link.send(signal(2))
    assert isinstance(await worker.commands.get(), Acknowledge)
    assert isinstance(await worker.commands.get(), Signal)
    for number in range(link_shell.UNHURRIED):
        link.send(Acknowledge(FENCE, 1, number))
    for _ in range(link_shell.UNHURRIED):
        assert isinstance(await worker.commands.get(), Acknowledge)


async def test_an_acknowledgement_waits_for_a_moment_only(pair: Pair) -> None:
    link, _, _, worker = pair
    link.send(Acknowledge(FENCE, 1, 1))
    assert isinstance(await worker.commands.get(), Acknowledge)


async def test_raise_floor_overtakes_what_waits(pair: Pair) -> None:
    link, _, _, worker = pair
    for number in range(5):
        link.send(signal(number))
    link.send(RaiseFloor(FENCE, "default", 3))
    assert isinstance(await worker.commands.get(), RaiseFloor)


@pytest.mark.parametrize("endpoint", ["ipc"], indirect=True)
async def test_the_gateway_learns_of_a_workers_end_at_once_and_meets_the_next(
    endpoint: str,
) -> None:
    # Heartbeats are too slow to be what tells.
    settings = LinkSettings(heartbeat_ms=600_000, silence_ms=1_200_000)
    gateway = Recorder()
    first = make_endpoint(endpoint, Recorder(), "worker-1", settings)
    link = make_link(endpoint, gateway, settings=settings)
    assert (await gateway.ups.get()).startswith("worker-1.")
    first.close()
    assert await gateway.downs.get() == "the connection to the worker ended"
    with pytest.raises(EngineLost):
        link.send(signal(0))
    second = make_endpoint(endpoint, Recorder(), "worker-2", settings)
    assert (await gateway.ups.get()).startswith("worker-2.")
    link.close()
    second.close()


@pytest.mark.parametrize("endpoint", ["ipc"], indirect=True)
async def test_the_worker_learns_of_a_gateways_end_at_once(endpoint: str) -> None:
    settings = LinkSettings(heartbeat_ms=600_000, silence_ms=1_200_000)
    worker = Recorder()
    bound = make_endpoint(endpoint, worker, settings=settings)
    first, second = Recorder(), Recorder()
    leaving = make_link(endpoint, first, "gateway-1", settings)
    staying = make_link(endpoint, second, "gateway-2", settings)
    await first.ups.get()
    await second.ups.get()
    leaving.close()
    assert await worker.downs.get() == "gateway-1"
    assert bound.gateways == ("gateway-2",)
    staying.close()
    bound.close()


async def test_readiness_comes_with_the_welcome_and_then_with_the_status(endpoint: str) -> None:
    worker, gateway = Recorder(ready=False), Recorder()
    bound = make_endpoint(endpoint, worker)
    link = make_link(endpoint, gateway)
    await gateway.ups.get()
    assert not link.ready
    worker.ready = True
    bound.announce()
    while not (await gateway.statuses.get()).ready:
        pass
    assert link.ready
    link.close()
    bound.close()


async def test_a_gateway_may_be_there_before_the_worker(endpoint: str) -> None:
    gateway = Recorder()
    link = make_link(endpoint, gateway)
    await asyncio.sleep(0)
    bound = make_endpoint(endpoint, Recorder())
    await gateway.ups.get()
    link.close()
    bound.close()


async def test_a_failing_callback_does_not_stop_the_link(endpoint: str) -> None:
    worker, gateway = Recorder(), Recorder()
    bound = make_endpoint(endpoint, worker)
    seen: list[Report] = []

    def fail_once(report: Report) -> None:
        if isinstance(report, Output):
            seen.append(report)
            if len(seen) == 1:
                raise RuntimeError("synthetic")
            gateway.reports.put_nowait(report)

    link = WorkerLink(
        endpoint,
        "gateway-1",
        on_report=fail_once,
        on_up=lambda name, _info: gateway.ups.put_nowait(name),
        on_down=gateway.downs.put_nowait,
    )
    await gateway.ups.get()
    for number in (1, 2):
        bound.send("gateway-1", Output("s", 1, number, InlineDescriptor(text_payload("x"))))
    report = await gateway.reports.get()
    assert isinstance(report, Output)
    assert report.sequence == 2
    link.close()
    bound.close()


async def test_a_message_that_is_no_command_ends_that_link_only(pair: Pair) -> None:
    link, gateway, _, worker = pair
    link._end.send(msgspec.msgpack.encode({"type": "no such command"}))
    link._flush_soon()
    assert await worker.downs.get() == "gateway-1"
    await gateway.downs.get()
    await gateway.ups.get()
    link.send(signal(1))
    assert await worker.commands.get() == signal(1)


@pytest.mark.parametrize("endpoint", ["ipc"], indirect=True)
async def test_frames_from_a_stranger_change_nothing(pair: Pair, endpoint: str) -> None:
    link, _, bound, worker = pair
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(endpoint.removeprefix("ipc://"))
        for frame in (
            b"stranger",
            b"garbage",
            encode_frame(Hello("gateway-1", 9, LINK_VERSION, LINK_VERSION, Credit(1, 1))),
            encode_frame(Hello("stranger", 1, LINK_VERSION, LINK_VERSION, Credit(1, 1))),
        ):
            stranger.sendall(len(frame).to_bytes(4, "big") + frame)
        assert await worker.ups.get() == "stranger"
    assert bound._end.malformed == 2
    link.send(signal(1))
    assert await worker.commands.get() == signal(1)


async def test_run_ends_with_close(pair: Pair) -> None:
    link = pair[0]
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    link.close()
    await running


async def test_cancelling_run_closes_the_link(pair: Pair) -> None:
    link, _, _, worker = pair
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await worker.downs.get() == "gateway-1"


async def test_an_endpoint_cannot_be_bound_in_a_directory_that_is_gone() -> None:
    with pytest.raises(ConfigError):
        make_endpoint("ipc:///nonexistent/worker.sock", Recorder())


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.1:5555", "inproc://x", "ipc://@x", "x"],
)
def test_unsafe_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_tcp_on_loopback_is_allowed(endpoint: str) -> None:
    check_endpoint(endpoint)


def test_a_socket_in_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        check_endpoint(f"ipc://{tmp_path}/s")
    tmp_path.chmod(0o700)
    check_endpoint(f"ipc://{tmp_path}/s")
