"""What a tick of many sessions costs. `python -m loadtest.ticks --help`.

Every tick the gateway sends each session's audio frame (20 ms, 960 bytes) to a worker in
another process, and gets one back. The round trip of a frame runs from the start of the
tick to its return; the processor time is the gateway's for a frame there and back.
Rounds of these alternate in one run:

- arena: the project's connector, a flow for each session, told through the arena;
- eventfd: frames in a shared segment at fixed places, one wake-up a tick, no bookkeeping:
  what the technique costs at least;
- zeromq: the same segment, one message a tick that names the frames;
- zeromq_frames: one message a frame, the frame inside, nothing else;
- zeromq_typed: one message a tick, in it the project's `Update` of each session with its
  frame, and back `Output`s: what the inline connector would cost at best, before the
  link's numbers and acknowledgements.

Eventfd, zeromq and zeromq_frames are held against the figures of the machines that targets
were set on. Where one misses by more than twice, up or down, or the machine was busy with
other things, the run is void.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop
import zmq

from loadtest.handover import figures, pin, void
from loadtest.machine import Disturbance, description
from protocol.arena import ArenaLimits, Arrival
from protocol.connectors import InlineDescriptor
from protocol.edges import COPIED_BYTES
from protocol.messages import Fence, Output, Update
from protocol.payloads import audio_payload
from protocol.shm_connector import ShmConnector, ShmFlow

FRAME_BYTES = 960
PLACE_BYTES = 1024
MOST_SESSIONS = 256
WINDOW_BYTES = 16384
PAUSE_S = 0.004
KINDS = ("arena", "eventfd", "zeromq", "zeromq_frames", "zeromq_typed")
ANCHOR_ROUND_TRIP_US = {"eventfd": (55.0, 64.0), "zeromq": (146.0, 188.0)}
"""With one session."""
ANCHOR_CPU_US = {"eventfd": 0.9, "zeromq": 3.0, "zeromq_frames": 5.6}
"""Of the gateway, for each frame, with 200 sessions."""


_encoder = msgspec.msgpack.Encoder()
_updates = msgspec.msgpack.Decoder(list[Update])
_outputs = msgspec.msgpack.Decoder(list[Output])


def segment(directory: str) -> mmap.mmap:
    """The baselines' shared memory: places for frames there, then for frames back."""
    with open(f"{directory}/places", "a+b") as file:
        file.truncate(2 * MOST_SESSIONS * PLACE_BYTES)
        return mmap.mmap(file.fileno(), 0)


# The worker's side


def serve_arena(control: Connection, directory: str) -> None:
    """Send each frame back on a flow of its session."""
    pin(1)
    assert control.recv() == "listening"

    async def run() -> None:
        limits = ArenaLimits(size_bytes=16 << 20)
        path = f"{directory}/worker"
        connector = ShmConnector(path, "worker", limits, copied_bytes=COPIED_BYTES)
        flows: dict[str, ShmFlow] = {}

        def arrived(arrival: Arrival) -> None:
            flow = flows.get(arrival.session)
            if flow is None:
                consumers = {"back": "gateway"}
                flow = connector.open(arrival.session, 0, consumers, WINDOW_BYTES)
                flows[arrival.session] = flow
            connector.put(arrival.payload, flow, tell=True)
            connector.release(arrival.descriptor)

        connector.on_arrival = arrived
        await connector.attach(f"{directory}/gateway")
        await connector.consumer("gateway", 30.0)
        control.send("ready")
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(control.fileno(), asked.set)
        await asked.wait()
        connector.close()

    uvloop.run(run())


def serve_eventfd(control: Connection, directory: str, woken_fd: int, wake_fd: int) -> None:
    """Copy all places in one step at each wake-up."""
    pin(1)
    places = np.frombuffer(segment(directory), np.uint8).reshape(2, MOST_SESSIONS, PLACE_BYTES)
    control.send("ready")
    while True:
        sessions = os.eventfd_read(woken_fd)
        if sessions > MOST_SESSIONS:
            return
        np.copyto(places[1, :sessions], places[0, :sessions])
        os.eventfd_write(wake_fd, 1)


def serve_typed(control: Connection, directory: str) -> None:
    """Send the frames of a message of updates back as outputs; two bytes end it."""
    pin(1)
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.connect(f"ipc://{directory}/typed")
        control.send("ready")
        while len(message := peer.recv()) != 2:
            outputs = [
                Output(update.fence.session, 0, update.sequence, update.payload)
                for update in _updates.decode(message)
            ]
            peer.send(_encoder.encode(outputs))


def serve_zeromq(control: Connection, directory: str) -> None:
    """Copy the places that a message names, or send a frame back; two bytes end it."""
    pin(1)
    places = np.frombuffer(segment(directory), np.uint8).reshape(2, MOST_SESSIONS, PLACE_BYTES)
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.connect(f"ipc://{directory}/zeromq")
        control.send("ready")
        while True:
            message = peer.recv()
            if len(message) == 2:
                return
            if len(message) != FRAME_BYTES:
                named = np.frombuffer(message, np.uint32)
                places[1, named] = places[0, named]
            peer.send(message)


# The gateway's side


class Gateway:
    """Sends ticks to the workers of each kind and times what comes back."""

    def __init__(self, directory: str, stack: ExitStack) -> None:
        self._directory = directory
        self._frame = np.arange(FRAME_BYTES, dtype=np.uint16).astype(np.uint8)
        self._bytes = self._frame.tobytes()
        self._payload = audio_payload(self._bytes, 24000)
        self._segment = segment(directory)
        self._view = memoryview(self._segment)
        self._wake_fd, self._woken_fd = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._missing = 0
        self._sequence = 0
        self._begun = 0.0
        self._samples: list[float] = []
        self._done = asyncio.Event()
        context = multiprocessing.get_context("fork")
        self._controls: dict[str, Connection] = {}
        workers: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
            "arena": (serve_arena, ()),
            "eventfd": (serve_eventfd, (self._wake_fd, self._woken_fd)),
            "zeromq": (serve_zeromq, ()),
            "zeromq_typed": (serve_typed, ()),
        }
        for kind, (serve, fds) in workers.items():
            near, far = context.Pipe()
            process = context.Process(target=serve, args=(far, directory, *fds), daemon=True)
            process.start()
            stack.callback(process.join)
            self._controls[kind] = near
        self._zmq = stack.enter_context(zmq.Context())
        self._peer = self._bound("zeromq", stack)
        self._typed = self._bound("typed", stack)

    def _bound(self, name: str, stack: ExitStack) -> zmq.Socket[bytes]:
        peer = stack.enter_context(self._zmq.socket(zmq.PAIR))
        peer.set(zmq.SNDHWM, 0)
        peer.set(zmq.RCVHWM, 0)
        peer.bind(f"ipc://{self._directory}/{name}")
        return peer

    async def start(self) -> None:
        """Wait for the workers."""
        limits = ArenaLimits(size_bytes=16 << 20)
        path = f"{self._directory}/gateway"
        self._connector = ShmConnector(
            path, "gateway", limits, copied_bytes=COPIED_BYTES, on_arrival=self._arrived
        )
        self._controls["arena"].send("listening")
        await self._connector.consumer("worker", 30.0)
        await self._connector.attach(f"{self._directory}/worker")
        for control in self._controls.values():
            assert control.recv() == "ready"
        loop = asyncio.get_running_loop()
        loop.add_reader(self._woken_fd, self._eventfd_back)
        loop.add_reader(int(self._peer.get(zmq.FD)), self._zeromq_back)
        loop.add_reader(int(self._typed.get(zmq.FD)), self._typed_back)
        consumers = {"there": "worker"}
        self._flows = [
            self._connector.open(f"session-{number}", 0, consumers, WINDOW_BYTES)
            for number in range(MOST_SESSIONS)
        ]
        pin(0)

    async def round(self, kind: str, sessions: int, ticks: int) -> tuple[list[float], float]:
        """Round trips of all frames in us, and the gateway's processor time a frame in us."""
        send = getattr(self, f"_{kind}")
        self._samples = []
        names = np.arange(sessions, dtype=np.uint32).tobytes()
        spent = 0.0
        for _ in range(ticks):
            self._missing = sessions
            self._done.clear()
            processor = time.process_time()
            self._begun = time.perf_counter()
            send(sessions, names)
            await self._done.wait()
            spent += time.process_time() - processor
            await asyncio.sleep(PAUSE_S)
        return self._samples, spent * 1e6 / (ticks * sessions)

    def end(self) -> None:
        """Tell the workers to end."""
        self._controls["arena"].send("end")
        os.eventfd_write(self._wake_fd, MOST_SESSIONS + 1)
        self._peer.send(b"xx")
        self._typed.send(b"xx")
        self._connector.close()

    def _back(self, frames: int) -> None:
        taken_us = (time.perf_counter() - self._begun) * 1e6
        self._samples.extend([taken_us] * frames)
        self._missing -= frames
        if not self._missing:
            self._done.set()

    def _arena(self, sessions: int, _: bytes) -> None:
        for flow in self._flows[:sessions]:
            self._connector.put(self._payload, flow, tell=True)

    def _arrived(self, arrival: Arrival) -> None:
        bytes(arrival.payload.data)
        self._connector.release(arrival.descriptor)
        self._back(1)

    def _write_places(self, sessions: int) -> None:
        for start in range(0, sessions * PLACE_BYTES, PLACE_BYTES):
            self._view[start : start + FRAME_BYTES] = self._bytes

    def _read_places(self, sessions: int) -> None:
        first = MOST_SESSIONS * PLACE_BYTES
        for start in range(first, first + sessions * PLACE_BYTES, PLACE_BYTES):
            bytes(self._view[start : start + FRAME_BYTES])

    def _eventfd(self, sessions: int, _: bytes) -> None:
        self._write_places(sessions)
        os.eventfd_write(self._wake_fd, sessions)

    def _eventfd_back(self) -> None:
        os.eventfd_read(self._woken_fd)
        self._read_places(self._missing)
        self._back(self._missing)

    def _zeromq(self, sessions: int, names: bytes) -> None:
        self._write_places(sessions)
        self._peer.send(names)
        self._zeromq_back()

    def _zeromq_frames(self, sessions: int, _: bytes) -> None:
        for _number in range(sessions):
            self._peer.send(self._bytes)
        self._zeromq_back()

    def _zeromq_typed(self, sessions: int, _: bytes) -> None:
        self._sequence += 1
        descriptor = InlineDescriptor(self._payload)
        updates = [
            Update(Fence(f"session-{number}", 1, "gateway"), self._sequence, descriptor)
            for number in range(sessions)
        ]
        self._typed.send(_encoder.encode(updates))
        self._typed_back()

    def _typed_back(self) -> None:
        while True:
            try:
                message = self._typed.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            for output in _outputs.decode(message):
                assert isinstance(output.payload, InlineDescriptor)
                bytes(output.payload.payload.data)
                self._back(1)

    def _zeromq_back(self) -> None:
        # Its descriptor signals once for everything, so everything is read.
        while True:
            try:
                message = self._peer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(message) == FRAME_BYTES:
                self._back(1)
            else:
                self._read_places(len(message) // 4)
                self._back(len(message) // 4)


def missed_anchors(results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """The baselines that are more than twice off what they were seen to be."""
    missed = []
    for kind, (low, high) in ANCHOR_ROUND_TRIP_US.items():
        if "1" in results:
            found = results["1"][kind]["round_trip"]["p50_us"]
            if not low / 2 <= found <= high * 2:
                missed.append(f"{kind}, 1 session: {found} us, anchor {low}-{high} us")
    for kind, anchor in ANCHOR_CPU_US.items():
        if "200" in results:
            found = results["200"][kind]["gateway_cpu_us"]
            if not anchor / 2 <= found <= anchor * 2:
                missed.append(f"{kind}, 200 sessions: {found} us a frame, anchor {anchor} us")
    return missed


async def measure(
    gateway: Gateway, numbers: list[int], rounds: int, ticks: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """All kinds, in turn, `rounds` times for each number of sessions."""
    await gateway.start()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for sessions in numbers:
        samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
        spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind in KINDS:
                taken, processor = await gateway.round(kind, sessions, ticks)
                if number:  # the first round warms up
                    samples[kind].extend(taken)
                    spent[kind].append(processor)
        results[str(sessions)] = {
            kind: {
                "round_trip": figures(samples[kind]),
                "gateway_cpu_us": round(sorted(spent[kind])[len(spent[kind]) // 2], 2),
            }
            for kind in KINDS
        }
    gateway.end()
    return results


def main() -> int:
    """Measure and print one JSON object. 0: done; 2: the run is void."""
    parser = argparse.ArgumentParser(description="Ticks of many sessions, gateway to worker.")
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 32, 200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ticks", type=int, default=60, help="ticks of a round")
    arguments = parser.parse_args()
    if max(arguments.sessions) > MOST_SESSIONS:
        parser.error(f"at most {MOST_SESSIONS} sessions")
    disturbance = Disturbance()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="antiphon-"))
        gateway = Gateway(directory, stack)
        results = uvloop.run(
            measure(gateway, arguments.sessions, arguments.rounds, arguments.ticks)
        )
    missed = missed_anchors(results)
    disturbed = disturbance.result()
    report = {
        "metric": "round trip of an audio frame, and the gateway's processor time for it",
        "machine": description(),
        "disturbance": disturbed,
        "results": results,
        "void": void(missed, disturbed),
    }
    json.dump(report, sys.stdout, indent=1)
    print()
    return 2 if report["void"] else 0


if __name__ == "__main__":
    sys.exit(main())
