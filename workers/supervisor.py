"""The supervisor: `python -m workers.supervisor -c FILE`.

A small process without traffic and without engines. Its children are the gateway and
the workers that the config names; each is started again with back-off when it ends, the
death of one touches no other, and none outlives it, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from protocol.config import (
    Config,
    GatewayConfig,
    ParkingConfig,
    check_binding,
    load_config,
)
from protocol.device_bytes import HOST
from protocol.errors import AntiphonError, ConfigError
from protocol.exit_status import ExitStatus
from protocol.logs import configure_logging
from workers.child import Child, RestartPolicy, StartFailed
from workers.memory_shares import parking_bytes, share_of_memory
from workers.runtime_directory import private_directory, runtime_directory
from workers.snapshots import SnapshotPlace
from workers.spec import WorkerSpec, WorkerStarted

_log = structlog.get_logger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
"""Files in it lie in memory."""

_IN_USE = "in-use"
"""A file in the disk directory that is locked for as long as the deployment runs."""


class GatewayStarted(msgspec.Struct, frozen=True):
    """The line that a gateway writes when it is ready: where it really listens."""

    host: str
    port: int


class Supervisor:
    """A deployment's children.

    `config_path` is handed to the gateway, which reads it itself; `overrides` are its
    further arguments.
    """

    def __init__(
        self,
        config: Config,
        config_path: Path,
        directory: Path,
        overrides: Sequence[str] = (),
        policy: RestartPolicy | None = None,
        snapshots: Sequence[SnapshotPlace] = (),
    ) -> None:
        self._announced = False
        self._tls = config.gateway.tls_cert is not None or "--tls-cert" in overrides
        specs = worker_specs(config, directory, snapshots)
        self.workers = [
            self._worker(spec, config.stages[spec.stage].python, policy) for spec in specs
        ]
        addresses = [
            {"name": spec.name, "stage": spec.stage, "endpoint": spec.endpoint} for spec in specs
        ]
        self._arguments = ["--config", str(config_path)]
        self._arguments += ["--workers", msgspec.json.encode(addresses).decode(), *overrides]
        self.gateway = Child(
            "gateway", "gateway.main", self._arguments, policy=policy, on_line=self._gateway_ready
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the children until `stop` is set, then end the gateway and after it the workers.

        Raises StartFailed when a first start fails for good.
        """
        lifeline, held = os.pipe()
        stopping = asyncio.create_task(stop.wait())
        keeping = [
            asyncio.create_task(child.keep(lifeline)) for child in (*self.workers, self.gateway)
        ]
        try:
            done, _ = await asyncio.wait({stopping, *keeping}, return_when=asyncio.FIRST_COMPLETED)
            await self.gateway.stop()
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(worker.stop())
            for task in done - {stopping}:
                task.result()
        finally:
            for task in (stopping, *keeping):
                task.cancel()
            await asyncio.gather(stopping, *keeping, return_exceptions=True)
            # From here on no child can live, whatever happened above.
            os.close(held)
            os.close(lifeline)

    def _worker(self, spec: WorkerSpec, python: Path | None, policy: RestartPolicy | None) -> Child:
        def on_line(line: bytes) -> None:
            started = msgspec.json.decode(line, type=WorkerStarted)
            if started.ready:
                child.started = True

        child = Child(
            spec.name,
            "workers.runtime",
            ["--name", spec.name],
            spec=msgspec.json.encode(spec),
            policy=policy,
            on_line=on_line,
            python=sys.executable if python is None else str(python),
        )
        return child

    def _gateway_ready(self, line: bytes) -> None:
        self.gateway.started = True
        started = msgspec.json.decode(line, type=GatewayStarted)
        # A gateway that returns does so at the address that clients know, not on any free port.
        self.gateway.arguments = [*self._arguments, "--port", str(started.port)]
        if not self._announced:
            self._announced = True
            print(f"Antiphon is ready: {self._url(started)}", flush=True)

    def _url(self, started: GatewayStarted) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(started.host, started.host)
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"http{'s' if self._tls else ''}://{host}:{started.port}/"


def worker_specs(
    config: Config, directory: Path, snapshots: Sequence[SnapshotPlace] = ()
) -> list[WorkerSpec]:
    """One spec a worker; its endpoint stays the same however often it is started again.

    Each replica of a stage may have to take all sessions of the pipelines that use it: the
    others may be lost. Raises ConfigError for budgets that this machine does not have.
    """
    deployment = uuid.uuid4().hex
    share = share_of_memory(config)
    users = {
        stage: [pipeline for pipeline in config.pipelines.values() if stage in pipeline.stages]
        for stage in config.stages
    }
    return [
        WorkerSpec(
            name=f"{stage}-{replica}",
            stage=stage,
            engine=section.engine,
            endpoint=f"ipc://{directory}/{number}-{replica}.sock",
            deployment=deployment,
            options=section.options,
            sessions=sum(pipeline.limits.sessions for pipeline in users[stage]),
            budget={HOST: share, **{d: int(size) for d, size in section.budget.items()}},
            head_room=section.head_room,
            tenant_share=section.tenant_share,
            cores=section.cores,
            shares_memory=HOST not in section.budget,
            snapshots=list(snapshots),
        )
        for number, (stage, section) in enumerate(config.stages.items())
        for replica in range(section.replicas)
    ]


@contextmanager
def _snapshot_places(parking: ParkingConfig) -> Iterator[list[SnapshotPlace]]:
    """Where workers park sessions: in memory, which is given back at the end, then on disk.

    Raises ConfigError for a disk directory that cannot be used.
    """
    places = []
    with ExitStack() as held:
        if (memory := parking_bytes(parking)) and _SHARED_MEMORY.is_dir():
            directory = held.enter_context(private_directory(_SHARED_MEMORY))
            places.append(SnapshotPlace(str(directory), memory, "parking.memory"))
        if parking.disk is not None:
            directory = parking.disk.expanduser().absolute()
            held.enter_context(_held_disk(directory))
            places.append(SnapshotPlace(str(directory), int(parking.disk_bytes), "parking.disk"))
        yield places


@contextmanager
def _held_disk(directory: Path) -> Iterator[None]:
    """The directory is this deployment's alone: another would remove what it finds there.

    Raises ConfigError for one that is in use, or cannot be used.
    """
    field = "parking.disk"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_mode & 0o077:
            raise ConfigError(f"{field}: others than its owner can use {directory}", field=field)
        lock = (directory / _IN_USE).open("w")
    except OSError as error:
        raise ConfigError(f"{field}: {error}", field=field) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = f"another deployment parks its sessions in {directory}"
            raise ConfigError(f"{field}: {reason}", field=field) from None
        yield


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when nothing could listen on `host` and `port` now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}. Stop what uses it, or choose another "
            "with --port or ANTIPHON_PORT",
            field="gateway.port",
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """Run a deployment until SIGTERM, SIGINT or SIGHUP; returns the exit status."""
    options = _parser().parse_args(arguments)
    configure_logging("supervisor")
    try:
        config = load_config(options.config)
        gateway = _overridden(config.gateway, options)
        check_binding(gateway, insecure=options.insecure)
        check_port(gateway.host, gateway.port)
        with runtime_directory() as directory, _snapshot_places(config.parking) as snapshots:
            supervisor = Supervisor(
                config, options.config, directory, _overrides(options), snapshots=snapshots
            )
            asyncio.run(_run(supervisor))
    except StartFailed as error:
        _complain(f"{error.name} cannot start: {_reason(error)}")
        return error.status
    except AntiphonError as error:
        _complain(error.message)
        return ExitStatus.CONFIG if isinstance(error, ConfigError) else ExitStatus.FAILED
    return ExitStatus.OK


async def _run(supervisor: Supervisor) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Under nohup a hang-up is ignored, and stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    await supervisor.run(stop)


def _reason(error: StartFailed) -> str:
    try:
        said = msgspec.json.decode(error.message, type=WorkerStarted).error
    except msgspec.DecodeError:
        said = error.message
    return said or f"it ended with status {error.status}, its reason is above"


def _overridden(config: GatewayConfig, options: argparse.Namespace) -> GatewayConfig:
    given: dict[str, Any] = {
        name: value
        for name in ("host", "port", "tls_cert", "tls_key")
        if (value := getattr(options, name)) is not None
    }
    return config.model_copy(update=given)


def _overrides(options: argparse.Namespace) -> list[str]:
    """The gateway's arguments for what was given to the supervisor."""
    arguments = ["--insecure"] if options.insecure else []
    for name in ("host", "port", "tls_cert", "tls_key"):
        value = getattr(options, name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def _complain(message: str) -> None:
    print(f"antiphon: {message}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.supervisor", description=__doc__)
    parser.add_argument("-c", "--config", type=Path, required=True, metavar="FILE")
    parser.add_argument("--host", help="overrides gateway.host")
    parser.add_argument("--port", type=int, help="overrides gateway.port; 0: any free one")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    parser.add_argument(
        "--insecure", action="store_true", help="listen off loopback without any keys"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
