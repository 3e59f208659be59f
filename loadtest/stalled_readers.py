"""Clients that stop reading in the middle of long replies, beside clients that read.

    python -m loadtest.stalled_readers [--stalled 200] [--check]

Synthetic engines. Each stalled client has a reply of more than 20 MB due and reads
nothing of it. Prints one JSON object: growth of the gateway's and the workers' memory,
and the time from `response.create` to the first audio of others before and meanwhile.
With --check the exit status is 1 when the gateway grows by more than the egress limit
for each stalled client, or the others' p99 by more than half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect

from antiphon.talk.realtime_client import RealtimeClient, endpoint
from gateway.egress import LIMIT_BYTES
from loadtest.machine import Disturbance, description, resident_mib
from loadtest.resident_prefix import until
from tests.deployment import Deployment

CONFIG = """
stages:
  listen: {engine: "loadtest.synthetic_voice:SyntheticListen"}
  think: {engine: "loadtest.synthetic_voice:SyntheticThink", clauses: 50}
  speak: {engine: "loadtest.synthetic_voice:SyntheticSpeak", clause_ms: 10000}
pipelines:
  long:
    kind: duplex
    required: true
    edges:
      - {from: listen, to: think, payload: text, delivery: full}
      - {from: think, to: speak, payload: text, delivery: chunk}
    outputs: {text: think, audio: speak}
    limits: {sessions: 1000, lead_ms: 60000}
    defaults: {voice: tone}
    voices: {tone: []}
"""
REPLY_BYTES = 50 * 10_000 * 48
RECEIVE_BYTES = 64 * 1024
OTHERS = 8
ROUNDS = 25


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stalled", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "stalled.yaml"
        config.write_text(CONFIG)
        with Deployment(config, environment={"PYTHONPATH": "."}) as deployment:
            result = asyncio.run(measure(deployment, options.stalled))
    bound_mib = options.stalled * LIMIT_BYTES / 2**20
    missed = []
    if result["growth_mib"]["gateway"] > bound_mib:
        missed.append("growth_mib.gateway")
    if result["meanwhile_ms"]["p99"] > 1.5 * result["before_ms"]["p99"]:
        missed.append("meanwhile_ms.p99")
    result["bound_mib"] = bound_mib
    result["missed"] = missed
    print(json.dumps(result, indent=2))
    return 1 if options.check and missed else 0


async def measure(deployment: Deployment, stalled: int) -> dict[str, Any]:
    """The same readers before and while `stalled` others read nothing."""
    url = deployment.base_url
    pids = deployment.children()
    async with AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(RealtimeClient.open(url, model="long"))
            for _ in range(OTHERS)
        ]
        for reader in readers:
            await until(reader, "session.created")
        await rounds(readers, 5)
        before_mib = {name: resident_mib(pid) for name, pid in pids.items()}
        disturbance = Disturbance()
        before = await rounds(readers, ROUNDS)
        for _ in range(stalled):
            connection = await stack.enter_async_context(
                connect(
                    endpoint(url, "long"),
                    compression=None,
                    max_queue=1,
                    proxy=None,
                    close_timeout=0,
                    sock=narrow_socket(url),
                )
            )
            await ask_and_stop_reading(connection)
        await until_all_are_stalled(deployment)
        meanwhile = await rounds(readers, ROUNDS)
        growth = {
            name: round(resident_mib(pid) - before_mib[name], 1) for name, pid in pids.items()
        }
        due = deployment.metrics()["antiphon_egress_queue_bytes"]
    return {
        "machine": description(),
        "disturbance": disturbance.result(),
        "stalled": stalled,
        "reply_bytes": REPLY_BYTES,
        "before_ms": spread(before),
        "meanwhile_ms": spread(meanwhile),
        "growth_mib": growth,
        "queued_for_clients_mib": round(due / 2**20, 1),
    }


def narrow_socket(url: str) -> socket.socket:
    """A connection whose kernel takes little for a program that does not read."""
    where = urlsplit(url)
    assert where.hostname is not None
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    narrow.connect((where.hostname, where.port))
    narrow.setblocking(False)
    return narrow


async def until_all_are_stalled(deployment: Deployment) -> None:
    """Wait until the gateway sends nothing: every socket that is not read is full."""
    sent = -1.0
    while True:
        name = 'antiphon_frames_total{direction="sent",surface="realtime"}'
        now = (await asyncio.to_thread(deployment.metrics))[name]
        if now == sent:
            return
        sent = now
        await asyncio.sleep(1.0)


async def ask_and_stop_reading(connection: ClientConnection) -> None:
    """Ask for a long reply, see it begin, and never read again."""
    await connection.send(_event(type="response.create"))
    async for frame in connection:
        event = json.loads(frame)
        if event["type"] == "response.output_audio.delta":
            return
        if event["type"] == "response.done":
            raise RuntimeError(f"no reply began: {event['response']['status_details']}")


async def rounds(readers: list[RealtimeClient], count: int) -> list[float]:
    """Each reader `count` times: from asking to the first audio, then cancelled. In ms."""
    times: list[float] = []

    async def one(reader: RealtimeClient) -> None:
        for _ in range(count):
            asked = time.monotonic()
            await reader.send({"type": "response.create"})
            first = await until(reader, "response.output_audio.delta")
            times.append((first.at - asked) * 1000.0)
            await reader.send({"type": "response.cancel"})
            await until(reader, "response.done")

    async with asyncio.TaskGroup() as group:
        for reader in readers:
            group.create_task(one(reader))
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median and p99."""
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(len(ordered) * 0.99) - 1], 2),
        "count": len(ordered),
    }


def _event(**fields: Any) -> str:
    return json.dumps(fields)


if __name__ == "__main__":
    sys.exit(main())
