"""One child process of the supervisor, started again whenever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from protocol.exit_status import ExitStatus

_log = structlog.get_logger(__name__)

_LINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class RestartPolicy:
    """How long to wait before a child is started again.

    The wait doubles from `first_s` to `ceiling_s` and starts over once a child has
    lived for `healthy_s`. `stop_s` is how long a child may take to end by itself.
    """

    first_s: float = 0.2
    ceiling_s: float = 10.0
    healthy_s: float = 30.0
    stop_s: float = 5.0

    def next_wait_s(self, wait_s: float, lived_s: float) -> float:
        """The wait after a child lived for `lived_s`, when the last one was `wait_s` (0: none)."""
        if wait_s == 0 or lived_s >= self.healthy_s:
            return self.first_s
        return min(wait_s * 2, self.ceiling_s)


class StartFailed(Exception):
    """A child could not do its first start, and never will until a person changes something."""

    def __init__(self, name: str, status: int, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.status = status
        self.message = message


class Child:
    """A process `python -m MODULE ARGUMENTS`, kept alive until `stop`.

    It gets `--ready-fd N` and, where there is a `spec`, `--spec-fd N` with the spec in
    it; `on_line(line)` is called with the line that it writes to the former. A change of
    `arguments` counts from its next start on. `python` is the interpreter that runs it.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        *,
        spec: bytes | None = None,
        policy: RestartPolicy | None = None,
        on_line: Callable[[bytes], None] = lambda _line: None,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self.started = False
        self._module = module
        self.arguments = arguments
        self._spec = spec
        self._policy = policy or RestartPolicy()
        self._on_line = on_line
        self._python = python
        self._line = b""
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id, None between two lives."""
        return self._process.pid if self._process else None

    async def keep(self, lifeline: int) -> None:
        """Run the child until `stop`, starting it again with back-off when it ends.

        `lifeline` is the pipe whose end ends the child. Raises StartFailed when the very
        first start fails for good. The child is gone when this returns or is cancelled.
        """
        loop = asyncio.get_running_loop()
        wait_s = 0.0
        try:
            while not self._stopping.is_set():
                begin = loop.time()
                status = await self._live(lifeline)
                if self._stopping.is_set():
                    return
                message = self._line.decode(errors="replace").strip()
                if not self.started and ExitStatus.is_final(status):
                    raise StartFailed(self.name, status, message)
                wait_s = self._policy.next_wait_s(wait_s, loop.time() - begin)
                _log.warning(
                    "child_ended",
                    child=self.name,
                    status=_describe(status),
                    message=message or None,
                    restart_in_s=wait_s,
                )
                await self._pause(wait_s)
        finally:
            self._kill()

    async def stop(self) -> None:
        """Ask the child to end, and end it when it takes too long; no more lives follow."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._policy.stop_s):
                await process.wait()
        except TimeoutError:
            _log.warning("child_killed", child=self.name, after_s=self._policy.stop_s)
            _signal(process, signal.SIGKILL)
            await process.wait()

    async def _live(self, lifeline: int) -> int:
        """One life of the child, from start to end; its exit status (negative: a signal)."""
        self._line = b""
        ready_read, ready_write = os.pipe()
        spec_read = self._spec_pipe()
        inherited = [lifeline, ready_write, *([spec_read] if spec_read is not None else [])]
        arguments = [*self.arguments, "--ready-fd", str(ready_write)]
        if spec_read is not None:
            arguments += ["--spec-fd", str(spec_read)]
        flags = ["-P"] if sys.flags.safe_path else []
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(self._python, *flags, "-m", "protocol.lifeline", str(lifeline)),
                *(self._module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=inherited,
                # A terminal's Ctrl-C is for the supervisor, which ends its children in order.
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            os.close(ready_read)
            self._line = f"{self._python} cannot be started: {error.strerror}".encode()
            return ExitStatus.CONFIG
        except BaseException:
            os.close(ready_read)
            raise
        finally:
            for fd in inherited[1:]:
                os.close(fd)
        _log.info("child_started", child=self.name, pid=process.pid)
        reading = asyncio.create_task(self._read_line(ready_read))
        if self._stopping.is_set():
            _signal(process, signal.SIGTERM)
        try:
            status = await process.wait()
            await reading
            return status
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if process.returncode is not None:
                self._process = None

    def _spec_pipe(self) -> int | None:
        if self._spec is None:
            return None
        read, write = os.pipe()
        try:
            # Far below what a pipe holds, so this never waits.
            os.set_blocking(write, False)
            if os.write(write, self._spec) != len(self._spec):
                raise ValueError(f"the options of {self.name} are too long")
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return read

    async def _read_line(self, fd: int) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
        )
        try:
            self._line = await reader.readline()
        except ValueError:
            self._line = b""
        finally:
            transport.close()
        if not self._line:
            return
        try:
            self._on_line(self._line)
        except ValueError:
            _log.error("malformed_line", child=self.name, line=self._line)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            _signal(self._process, signal.SIGKILL)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _describe(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else str(status)
