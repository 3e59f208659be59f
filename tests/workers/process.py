"""A worker process with the synthetic engine, and a gateway's link to it, for tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protocol.connectors import InlineDescriptor
from protocol.link_events import LinkSettings
from protocol.link_frames import WorkerInfo
from protocol.messages import (
    Answer,
    Command,
    Fence,
    Open,
    Output,
    Report,
    Run,
    Signal,
    TurnEnded,
    WorkerStatus,
)
from protocol.payloads import text_payload
from protocol.worker_link import WorkerLink
from workers.spec import WorkerSpec, WorkerStarted

ROOT = Path(__file__).parents[2]
SYNTHETIC = "tests.synthetic_engine:SyntheticEngine"
GATEWAY = "gateway-1"

R = TypeVar("R", bound=Report)


class WorkerProcess:
    """`workers.runtime` as the supervisor starts it. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        options: dict[str, Any],
        engine: str = SYNTHETIC,
        budget: dict[str, int] | None = None,
        **rest: Any,
    ) -> None:
        self.endpoint = f"ipc://{directory}/worker.sock"
        self.spec = WorkerSpec(
            "think-0", "think", engine, self.endpoint, "test", options, budget=budget or {}, **rest
        )

    def __enter__(self) -> WorkerProcess:
        self._log = tempfile.TemporaryFile()
        spec_read, spec_write = os.pipe()
        ready_read, ready_write = os.pipe()
        life_read, self._lifeline = os.pipe()
        os.write(spec_write, msgspec.json.encode(self.spec))
        os.close(spec_write)
        arguments = ["--name", "think-0", "--spec-fd", str(spec_read), "--ready-fd"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "protocol.lifeline", str(life_read)),
                *("workers.runtime", *arguments, str(ready_write)),
            ],
            cwd=ROOT,
            pass_fds=(spec_read, ready_write, life_read),
            stderr=self._log,
        )
        for fd in (spec_read, ready_write, life_read):
            os.close(fd)
        self._ready = open(ready_read, "rb")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()
        self._ready.close()
        self.end_supervisor()

    async def started(self) -> WorkerStarted | None:
        """The line that it writes when it is loaded or never will be; None without one."""
        line = await asyncio.to_thread(self._ready.readline)
        return msgspec.json.decode(line, type=WorkerStarted) if line else None

    async def ended(self) -> tuple[int, str]:
        """Its exit status and what it wrote to standard error."""
        status = await asyncio.to_thread(self.process.wait)
        self._log.seek(0)
        return status, self._log.read().decode()

    def end_supervisor(self) -> None:
        """Close the supervisor's end of the lifeline."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


@dataclass
class Gateway:
    """A gateway's side: sends commands, keeps the reports until they are asked for."""

    endpoint: str
    incarnation: str = GATEWAY
    settings: LinkSettings | None = None
    ups: asyncio.Queue[WorkerInfo] = field(default_factory=asyncio.Queue)
    downs: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    statuses: asyncio.Queue[WorkerStatus] = field(default_factory=asyncio.Queue)
    reports: list[Report] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _commands: int = 0

    def __post_init__(self) -> None:
        self.link = WorkerLink(
            self.endpoint,
            self.incarnation,
            on_report=self._on_report,
            on_up=lambda _worker, info: self.ups.put_nowait(info),
            on_down=self.downs.put_nowait,
            settings=self.settings,
        )

    async def linked(self) -> Gateway:
        """Wait until the worker is there and ready."""
        if not (await self.ups.get()).ready:
            while not (await self.statuses.get()).ready:
                pass
        return self

    def fence(self, session: str = "s", epoch: int = 1) -> Fence:
        return Fence(session, epoch, self.incarnation)

    def send(self, command: Command) -> None:
        self.link.send(command)

    async def wanted(self, wanted: Callable[[Report], bool]) -> Report:
        """The oldest report that is `wanted`, taken out; waits for it."""
        while True:
            for report in self.reports:
                if wanted(report):
                    self.reports.remove(report)
                    return report
            self._changed.clear()
            await self._changed.wait()

    async def next(self, kind: type[R]) -> R:
        """The oldest report of a kind, taken out; waits for it."""
        report = await self.wanted(lambda report: isinstance(report, kind))
        assert isinstance(report, kind)
        return report

    async def answer(self, command: str) -> Answer:
        """The answer to a command id."""
        report = await self.wanted(lambda r: isinstance(r, Answer) and r.command == command)
        assert isinstance(report, Answer)
        return report

    async def open(self, session: str = "s", **settings: Any) -> Answer:
        """Open a session and wait for the answer."""
        name = self._name()
        self.send(Open(self.fence(session), name, settings))
        return await self.answer(name)

    async def signal(self, name: str, session: str = "s") -> Answer:
        """Signal a session and wait for the answer."""
        command = self._name()
        self.send(Signal(self.fence(session), command, name))
        return await self.answer(command)

    def run(self, turn: int, do: str, *texts: str, session: str = "s", **rest: Any) -> None:
        """Start a turn of the synthetic engine."""
        inputs = [InlineDescriptor(text_payload(text)) for text in texts]
        last = rest.pop("last", True)
        self.send(Run(self.fence(session), turn, "default", {"do": do, **rest}, list(inputs), last))

    async def output(self) -> str:
        """The text of the next output piece."""
        descriptor = (await self.next(Output)).payload
        assert isinstance(descriptor, InlineDescriptor)
        return descriptor.payload.data.decode()

    async def ended(self, turn: int) -> TurnEnded:
        """The end of a turn."""
        report = await self.wanted(lambda r: isinstance(r, TurnEnded) and r.turn == turn)
        assert isinstance(report, TurnEnded)
        return report

    def _on_report(self, report: Report) -> None:
        if isinstance(report, WorkerStatus):
            self.statuses.put_nowait(report)
            return
        self.reports.append(report)
        self._changed.set()

    def _name(self) -> str:
        self._commands += 1
        return f"command-{self._commands}"
