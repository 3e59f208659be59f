"""A session that is open and silent: does anything wake except for heartbeats?

    python -m loadtest.idle [--seconds 10] [--check]

Counts how often each process of the voice product gives up the processor by itself
(voluntary context switches of all its threads), with one session open and nothing said.
Prints one JSON object. A heartbeat a second in each direction between the gateway and a
worker wakes the loop and the transport's thread at both ends: with --check the exit status
is 1 when a process wakes more often than that explains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from antiphon.talk.realtime_client import RealtimeClient
from loadtest.machine import description
from loadtest.resident_prefix import until
from tests.deployment import Deployment

PER_LINK_S = 8.0
"""Wakes a second that one link's heartbeats cost a process: send, receive, in two threads."""
SLACK_S = 2.0
SETTLE_S = 5.0
"""What opening a session starts (its prompt is read in advance) has ended by then."""


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with Deployment() as deployment:
        pids = {**deployment.children(), "supervisor": deployment.process.pid}
        rates = asyncio.run(wakes(deployment.base_url, pids, options.seconds))
    links = {"gateway": len(rates) - 2, "supervisor": 0}
    allowed = {name: links.get(name, 1) * PER_LINK_S + SLACK_S for name in rates}
    missed = [name for name, rate in rates.items() if rate > allowed[name]]
    result = {
        "machine": description(),
        "wakes_per_s": rates,
        "allowed_per_s": allowed,
        "missed": missed,
    }
    print(json.dumps(result, indent=2))
    return 1 if options.check and missed else 0


async def wakes(url: str, pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Voluntary context switches a second of each process while a session is silent."""
    async with RealtimeClient.open(url) as client:
        await until(client, "session.created")
        await asyncio.sleep(SETTLE_S)
        before = {name: switches(pid) for name, pid in pids.items()}
        await asyncio.sleep(seconds)
        return {
            name: round((switches(pid) - before[name]) / seconds, 1) for name, pid in pids.items()
        }


def switches(pid: int) -> int:
    """Voluntary context switches of all threads of a process."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


if __name__ == "__main__":
    sys.exit(main())
