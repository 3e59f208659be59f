"""What it costs to hand a payload to another process. `python -m loadtest.handover --help`.

One payload is in flight at a time. A hand-over begins when the producer has the bytes and
ends when it knows that the consumer, another process, has read them and let go. The
consumer reads every byte and times that, so that each figure is told with the reading and
without. What was read lies in the reader's cache, and writing there again costs the
producer more; `--reading ends`, the first and the last byte alone, shows by how much.

Rounds of the arena and of what it is compared with alternate in one run:

- memcpy: the bytes copied within one process, the limit of anything that copies once;
- ring: a persistent shared-memory segment and a token through a pipe, both ends blocking,
  with none of the arena's bookkeeping: what its technique costs at least;
- ring_on_loops: the same where both ends wait in an event loop, as servers do: what is
  above it is the arena's own;
- zeromq: ipc, copy=False, an acknowledgement back;
- segment: a named shared-memory segment, created and unlinked for each payload.

The figures of memcpy, zeromq and segment are held against those of the machines that the
targets were set on, and so is the ring's with `--reading ends`: that is how the figures of
rings were measured that the targets were derived from. Where one misses its anchor by more
than twice, up or down, the run is void. So is one on a machine that was busy with other
things; the producer's processor time, and the tenth of the hand-overs that was disturbed
least (p10), say something there too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop
import zmq

from loadtest.machine import Disturbance, description
from protocol.arena import ArenaLimits, Arrival
from protocol.arrays import array_payload
from protocol.payloads import PayloadType
from protocol.shm_connector import ShmConnector

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 16 << 20}
ANCHORS_US = {
    "memcpy": {"1 KB": 0.3, "64 KB": 1.0, "1 MB": 19.0, "16 MB": 590.0},
    "zeromq": {"1 KB": 57.0, "64 KB": 88.0, "1 MB": 200.0, "16 MB": 3300.0},
    "segment": {"1 KB": 149.0, "64 KB": 227.0, "1 MB": 1100.0, "16 MB": 16000.0},
}
RING_ANCHORS_US = {"1 KB": 28.5, "64 KB": 32.0, "1 MB": 65.0, "16 MB": 800.0}
"""With two bytes read of each payload."""
MOST_WAITING = 0.1
TARGETS_US = {"1 KB": 35.0, "1 MB": 80.0}
TARGET_OVER_MEMCPY = {"16 MB": 2.0}

RING_DIRECTORY = "/dev/shm"
"""Memory, not a disk."""

KINDS = ("arena", "memcpy", "ring", "ring_on_loops", "zeromq", "segment")

Bytes = npt.NDArray[np.uint8]
Samples = dict[str, list[float]]


def read_all(values: Bytes) -> float:
    """Read every byte; how long that took in us."""
    begun = time.perf_counter()
    np.bitwise_xor.reduce(values.view(np.uint64))
    return (time.perf_counter() - begun) * 1e6


def read_ends(values: Bytes) -> float:
    """Read the first and the last byte; how long that took in us."""
    begun = time.perf_counter()
    np.bitwise_xor.reduce(values[:: values.size - 1])
    return (time.perf_counter() - begun) * 1e6


READERS: dict[str, Callable[[Bytes], float]] = {"all": read_all, "ends": read_ends}


def pin(core: int) -> None:
    """Keep this process on one core, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[core]})


# Consumers, each a process of its own


def consume_arena(control: Connection, directory: str, how: str) -> None:
    """Read what arrives in place; answer with the reading times when asked."""
    pin(1)
    read = READERS[how]
    reading: list[float] = []
    assert control.recv() == "listening"

    async def run() -> None:
        connector = ShmConnector(f"{directory}/consumer", "consumer")

        def arrived(arrival: Arrival) -> None:
            reading.append(read(np.frombuffer(arrival.payload.data, np.uint8)))
            connector.release(arrival.descriptor)

        connector.on_arrival = arrived
        await connector.attach(f"{directory}/producer")
        control.send("ready")
        asked = asyncio.Event()
        asyncio.get_running_loop().add_reader(control.fileno(), asked.set)
        while True:
            await asked.wait()
            asked.clear()
            if control.recv() == "end":
                break
            control.send(reading[:])
            reading.clear()
        connector.close()

    uvloop.run(run())


def consume_ring(control: Connection, directory: str, how: str) -> None:
    """Read the slot that the token names."""
    pin(1)
    read = READERS[how]
    reading: list[float] = []
    with open(f"{directory}/ring", "r+b") as file, mmap.mmap(file.fileno(), 0) as ring:
        control.send("ready")
        while True:
            message = control.recv_bytes()
            if message == b"end":
                return
            if message == b"times":
                control.send(reading[:])
                reading.clear()
                continue
            size = int.from_bytes(message, "little")
            values = np.frombuffer(ring, np.uint8, size)
            reading.append(read(values))
            del values
            control.send_bytes(b"k")


def consume_ring_on_loop(control: Connection, directory: str, how: str) -> None:
    """As `consume_ring`, woken by an event loop."""
    pin(1)
    read = READERS[how]
    reading: list[float] = []

    async def run() -> None:
        ended = asyncio.Event()

        def woken() -> None:
            message = control.recv_bytes()
            if message == b"end":
                ended.set()
            elif message == b"times":
                control.send(reading[:])
                reading.clear()
            else:
                values = np.frombuffer(ring, np.uint8, int.from_bytes(message, "little"))
                reading.append(read(values))
                control.send_bytes(b"k")

        asyncio.get_running_loop().add_reader(control.fileno(), woken)
        control.send("ready")
        await ended.wait()

    with open(f"{directory}/ring", "r+b") as file, mmap.mmap(file.fileno(), 0) as ring:
        uvloop.run(run())


def consume_zeromq(control: Connection, directory: str, how: str) -> None:
    """Read what arrives in the library's buffer, and acknowledge it."""
    pin(1)
    read = READERS[how]
    reading: list[float] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as peer:
        peer.connect(f"ipc://{directory}/zeromq")
        control.send("ready")
        while True:
            frame = peer.recv(copy=False)
            if len(frame) == 1:
                control.send(reading[:])
                reading.clear()
            elif len(frame) == 2:
                return
            else:
                reading.append(read(np.frombuffer(frame.buffer, np.uint8)))
                peer.send(b"k")


def consume_segments(control: Connection, _: str, how: str) -> None:
    """Map each named segment, read it, unlink it."""
    pin(1)
    read = READERS[how]
    reading: list[float] = []
    control.send("ready")
    while True:
        message = control.recv_bytes()
        if message == b"end":
            return
        if message == b"times":
            control.send(reading[:])
            reading.clear()
            continue
        segment = untracked(shared_memory.SharedMemory(message.decode()))
        assert segment.buf is not None
        values = np.frombuffer(segment.buf, np.uint8)
        reading.append(read(values))
        del values
        segment.close()
        os.unlink(f"/dev/shm/{segment.name}")
        control.send_bytes(b"k")


def untracked(segment: shared_memory.SharedMemory) -> shared_memory.SharedMemory:
    """The segment without the standard library's tracker, whose cost is not the point."""
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    return segment


def ended(
    process: multiprocessing.process.BaseProcess, failure: type[BaseException] | None, *_: object
) -> None:
    """Wait for a consumer that was told to end; after a failure nobody has told it."""
    if failure is not None:
        process.terminate()
    process.join()


# The producer


class Run:
    """All consumers, and rounds of payloads of one size to each."""

    def __init__(self, directory: str, how: str, stack: ExitStack) -> None:
        self._read = READERS[how]
        self._directory = directory
        context = multiprocessing.get_context("spawn")
        self._controls: dict[str, Connection] = {}
        with open(f"{directory}/ring", "w+b") as file:
            file.truncate(max(SIZES.values()))
            self._ring = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        for kind, consume in {
            "arena": consume_arena,
            "ring": consume_ring,
            "ring_on_loops": consume_ring_on_loop,
            "zeromq": consume_zeromq,
            "segment": consume_segments,
        }.items():
            near, far = context.Pipe()
            process = context.Process(target=consume, args=(far, directory, how), daemon=True)
            process.start()
            stack.push(partial(ended, process))
            self._controls[kind] = near
        self._zmq = stack.enter_context(zmq.Context())
        self._socket = stack.enter_context(self._zmq.socket(zmq.PAIR))
        self._socket.bind(f"ipc://{directory}/zeromq")

    async def start(self) -> None:
        """Wait for the consumers; none of them shares the producer's core."""
        limits = ArenaLimits(size_bytes=64 << 20, session_cap_bytes=64 << 20)
        self.connector = ShmConnector(f"{self._directory}/producer", "producer", limits)
        self._controls["arena"].send("listening")
        await self.connector.consumer("consumer", 30.0)
        for control in self._controls.values():
            assert control.recv() == "ready"
        self._flow = self.connector.open("s", 1, {"edge": "consumer"}, 32 << 20)
        pin(0)

    async def round(self, kind: str, source: Bytes, payloads: int) -> Samples:
        """Hand over `payloads` copies; the time of each in us, with and without reading."""
        if kind == "memcpy":
            return self._memcpy(source, payloads)
        if kind == "arena":
            taken = await self._arena(source, payloads)
            self._controls[kind].send("times")
        elif kind == "zeromq":
            taken = self._each(payloads, lambda: self._zeromq(source))
            self._socket.send(b"t")
        elif kind == "ring_on_loops":
            taken = await self._slots_on_loop(source, payloads)
            self._controls[kind].send_bytes(b"times")
        elif kind == "ring":
            taken = self._each(payloads, lambda: self._slot(source))
            self._controls[kind].send_bytes(b"times")
        else:
            taken = self._each(payloads, lambda: self._segment(source))
            self._controls[kind].send_bytes(b"times")
        reading = self._controls[kind].recv()
        assert len(reading) == payloads
        return {
            "with_reading": taken,
            "hand_over": [one - read for one, read in zip(taken, reading, strict=True)],
        }

    def end(self) -> None:
        """Tell the consumers to end."""
        self._controls["arena"].send("end")
        self._socket.send(b"xx")
        self._controls["ring"].send_bytes(b"end")
        self._controls["ring_on_loops"].send_bytes(b"end")
        self._controls["segment"].send_bytes(b"end")
        self.connector.close()

    def _each(self, payloads: int, hand_over: Callable[[], None]) -> list[float]:
        taken = []
        for _ in range(payloads):
            begun = time.perf_counter()
            hand_over()
            taken.append((time.perf_counter() - begun) * 1e6)
        return taken

    def _memcpy(self, source: Bytes, payloads: int) -> Samples:
        target = np.zeros_like(source)
        copied, both = [], []
        for _ in range(payloads):
            begun = time.perf_counter()
            np.copyto(target, source)
            copied.append((time.perf_counter() - begun) * 1e6)
            both.append(copied[-1] + self._read(target))
        return {"with_reading": both, "hand_over": copied}

    async def _arena(self, source: Bytes, payloads: int) -> list[float]:
        taken = []
        payload = array_payload(PayloadType.FRAMES, source)
        for _ in range(payloads):
            begun = time.perf_counter()
            self.connector.put(payload, self._flow, tell=True)
            await self.connector.drained(self._flow)
            taken.append((time.perf_counter() - begun) * 1e6)
        return taken

    def _slot(self, source: Bytes) -> None:
        np.copyto(self._ring[: source.size], source)
        control = self._controls["ring"]
        control.send_bytes(source.size.to_bytes(4, "little"))
        control.recv_bytes()

    async def _slots_on_loop(self, source: Bytes, payloads: int) -> list[float]:
        control = self._controls["ring_on_loops"]
        loop = asyncio.get_running_loop()
        token = source.size.to_bytes(4, "little")
        taken = []

        def acknowledged() -> None:
            control.recv_bytes()
            answer.set_result(None)

        loop.add_reader(control.fileno(), acknowledged)
        for _ in range(payloads):
            begun = time.perf_counter()
            answer = loop.create_future()
            np.copyto(self._ring[: source.size], source)
            control.send_bytes(token)
            await answer
            taken.append((time.perf_counter() - begun) * 1e6)
        loop.remove_reader(control.fileno())
        os.set_blocking(control.fileno(), True)  # the loop made it otherwise
        return taken

    def _zeromq(self, source: Bytes) -> None:
        self._socket.send(source.data, copy=False, track=False)
        self._socket.recv()

    def _segment(self, source: Bytes) -> None:
        segment = untracked(shared_memory.SharedMemory(create=True, size=source.size))
        assert segment.buf is not None
        values = np.frombuffer(segment.buf, np.uint8)
        np.copyto(values, source)
        del values
        segment.close()
        control = self._controls["segment"]
        control.send_bytes(segment.name.encode())
        control.recv_bytes()


def figures(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile in us, and the 10th, which is disturbed least."""
    ordered = sorted(samples)
    return {
        "p10_us": round(ordered[len(ordered) // 10], 2),
        "p50_us": round(statistics.median(ordered), 2),
        "p99_us": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "n": len(ordered),
    }


def missed_anchors(results: dict[str, dict[str, dict[str, Any]]], how: str) -> list[str]:
    """The baselines that are more than twice off what the targets were set on."""
    missed = []
    known = ANCHORS_US if how == "all" else ANCHORS_US | {"ring": RING_ANCHORS_US}
    for kind, anchors in known.items():
        for size, anchor in anchors.items():
            if size in results:
                found = results[size][kind]["hand_over"]["p50_us"]
                if not anchor / 2 <= found <= anchor * 2:
                    missed.append(f"{kind} at {size}: {found} us, anchor {anchor} us")
    return missed


def void(missed: list[str], disturbed: dict[str, float | None]) -> list[str]:
    """Why a run says nothing; empty when it does."""
    waiting = disturbed["waiting"]
    if waiting is not None and waiting > MOST_WAITING:
        return [*missed, f"the machine was busy: tasks waited for a core {waiting:.0%} of the time"]
    return missed


def judged(results: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each target with what was found."""
    found: dict[str, dict[str, Any]] = {}
    for size, target in TARGETS_US.items():
        if size in results:
            value = results[size]["arena"]["hand_over"]["p50_us"]
            found[size] = {"us": value, "target_us": target, "met": value <= target}
    for size, target in TARGET_OVER_MEMCPY.items():
        if size in results:
            value = round(
                results[size]["arena"]["hand_over"]["p50_us"]
                / results[size]["memcpy"]["hand_over"]["p50_us"],
                2,
            )
            found[size] = {"over_memcpy": value, "target": target, "met": value <= target}
    return found


async def measure(run: Run, sizes: list[str], rounds: int, budget_bytes: int) -> dict[str, Any]:
    """All kinds, in turn, `rounds` times for each size."""
    await run.start()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for size in sizes:
        source = np.random.default_rng(1).integers(0, 256, SIZES[size], np.uint8)
        payloads = max(5, min(200, budget_bytes // SIZES[size]))
        samples: dict[str, Samples] = {}
        spent: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for kind in KINDS:
                processor = time.process_time()
                found = await run.round(kind, source, payloads)
                processor = time.process_time() - processor
                if not number:  # the first round warms up
                    continue
                spent.setdefault(kind, []).append(processor * 1e6 / payloads)
                for name, values in found.items():
                    samples.setdefault(kind, {}).setdefault(name, []).extend(values)
        results[size] = {
            kind: {name: figures(values) for name, values in of_kind.items()}
            | {"producer_cpu_us": round(statistics.median(spent[kind]), 2)}
            for kind, of_kind in samples.items()
        }
    run.end()
    return results


def main() -> int:
    """Measure and print one JSON object. 0: targets met; 1: missed; 2: the run is void."""
    parser = argparse.ArgumentParser(description="Hand-over of payloads between processes.")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--reading", choices=READERS, default="all", help="what is read")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--round-mib", type=int, default=160, help="bytes of a round and kind")
    arguments = parser.parse_args()
    disturbance = Disturbance()
    with ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="antiphon-", dir=RING_DIRECTORY)
        )
        run = Run(directory, arguments.reading, stack)
        results = uvloop.run(
            measure(run, arguments.sizes, arguments.rounds, arguments.round_mib << 20)
        )
    missed, targets = missed_anchors(results, arguments.reading), judged(results)
    disturbed = disturbance.result()
    report = {
        "metric": "hand-over, one payload in flight",
        "reading": arguments.reading,
        "machine": description(),
        "disturbance": disturbed,
        "results": results,
        "targets": targets,
        "void": void(missed, disturbed),
    }
    json.dump(report, sys.stdout, indent=1)
    print()
    if report["void"]:
        return 2
    return 0 if all(target["met"] for target in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
