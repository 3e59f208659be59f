"""A real deployment under test: `antiphon serve` with its own port, directory and log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

VOICE_CONFIG = Path("examples/voice.yaml")
READY = re.compile(r"Antiphon is ready: (http\S+)/")
START_S = 120
STOP_S = 20
CHANGE_S = 60
LOOK_S = 0.02
LOG_LINES = 4_000
MARK = "ANTIPHON_TEST_DEPLOYMENT"


class Deployment:
    """One `antiphon serve`. `log` holds the last lines of all its processes.

    `key` is sent with every request.
    """

    def __init__(
        self,
        config: Path = VOICE_CONFIG,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        key: str | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.base_url = ""
        self._announced = threading.Event()
        self._mark = uuid.uuid4().hex
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        command = [str(python), "-m", "antiphon", "serve", "-c", str(config), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "ANTIPHON_LOG_FORMAT": "json",
                MARK: self._mark,
                **(environment or {}),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Deployment:
        try:
            self.wait_until_announced()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_announced(self) -> None:
        """Wait for the line that says where it is ready."""
        self._announced.wait(START_S)
        assert self.base_url, "not ready:\n" + "\n".join(self.log)

    @property
    def ws_url(self) -> str:
        """The address for WebSockets."""
        return "ws" + self.base_url.removeprefix("http")

    @property
    def port(self) -> int:
        """Where the gateway listens."""
        return int(self.base_url.rpartition(":")[2])

    def get(self, path: str, **headers: str) -> httpx.Response:
        """GET `path`, with further headers."""
        # The address may be that of a certificate of the test's own.
        return httpx.get(
            self.base_url + path, timeout=10, headers=self._headers | headers, verify=False
        )

    def until(self, holds: Callable[[], object]) -> None:
        """Look until `holds` holds. The server is asked: it does not tell by itself."""
        deadline = time.monotonic() + CHANGE_S
        while not holds():
            assert time.monotonic() < deadline, "\n".join(["no change", *self.log])
            time.sleep(LOOK_S)

    def until_ready(self, ready: bool = True) -> None:
        """Wait until /readyz says so; a gateway that does not answer is not ready."""
        self.until(lambda: (self._status("/readyz") == 200) is ready)

    def _status(self, path: str) -> int | None:
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels, as the text has it."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def workers(self) -> list[dict[str, Any]]:
        """What the admin API says of the workers."""
        answer: list[dict[str, Any]] = self.get("/v1/admin/workers").json()["workers"]
        return answer

    def children(self) -> dict[str, int]:
        """The latest pid of each child by name, as the supervisor logged it."""
        pids = {}
        for line in list(self.log):
            if '"child_started"' in line:
                entry = json.loads(line)
                pids[entry["child"]] = entry["pid"]
        return pids

    def kill(self, child: str) -> int:
        """kill -9 a child; its pid."""
        pid = self.children()[child]
        os.kill(pid, signal.SIGKILL)
        return pid

    def processes(self) -> set[int]:
        """The pids of all living processes of this deployment, found by their environment."""
        mark = f"{MARK}={self._mark}".encode()
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.add(int(process.name))
            except OSError:
                continue  # It has ended, or is another user's.
        return found

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(STOP_S)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                if (match := READY.search(line)) is not None:
                    self.base_url = match[1]
                    self._announced.set()
        self._announced.set()
