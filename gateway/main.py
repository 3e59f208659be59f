"""The gateway process: `python -m gateway.main --config FILE --workers JSON`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import structlog
import uvloop

from gateway.app import build_app, build_policy_app
from gateway.cameras import Cameras
from gateway.host import GatewayHost
from gateway.metrics import GatewayMetrics
from gateway.pipelines import catalogue
from gateway.server import (
    POLICY_WS_MAX_BYTES,
    GatewayServer,
    bind,
    check_tls,
    listen,
    server_config,
)
from gateway.surfaces.openpi import PolicyPort
from protocol.allocator import keep_freed_memory
from protocol.config import Config, GatewayConfig, check_binding, load_config
from protocol.errors import AntiphonError, ConfigError
from protocol.exit_status import ExitStatus
from protocol.logs import configure_logging
from sessions.pipeline import Kind

log = structlog.get_logger(__name__)


class WorkerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker of a stage listens, as the supervisor tells it."""

    name: str
    stage: str
    endpoint: str


def main(arguments: list[str] | None = None) -> ExitStatus:
    """Run the gateway until it is told to stop; the exit status of the process."""
    options = _parser().parse_args(arguments)
    configure_logging("gateway")
    try:
        config = load_config(options.config)
        gateway = _overridden(config.gateway, options)
        check_binding(gateway, insecure=options.insecure)
        check_tls(gateway.tls_cert, gateway.tls_key)
        workers = msgspec.json.decode(options.workers, type=list[WorkerAddress])
        listener = listen(gateway.host, gateway.port)
        policy_listener = None
        if gateway.openpi is not None:
            policy_listener = bind(gateway.host, gateway.openpi.port, "gateway.openpi.port")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                _serve(
                    config,
                    gateway,
                    workers,
                    listener,
                    policy_listener,
                    options.ready_fd,
                    options.lifeline_fd,
                )
            )
    except msgspec.DecodeError as error:
        print(f"gateway: --workers: {error}", file=sys.stderr)
        return ExitStatus.CONFIG
    except AntiphonError as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return ExitStatus.CONFIG if isinstance(error, ConfigError) else ExitStatus.FAILED
    return ExitStatus.OK


async def _serve(
    config: Config,
    gateway: GatewayConfig,
    workers: list[WorkerAddress],
    listener: socket.socket,
    policy_listener: socket.socket | None,
    ready_fd: int | None,
    lifeline_fd: int | None,
) -> None:
    loop = asyncio.get_running_loop()
    named = catalogue(config)
    if any(pipeline.kind is Kind.ROBOT for pipeline in named.pipelines.values()):
        keep_freed_memory()
    metrics = GatewayMetrics(named.pipelines)
    host = GatewayHost(
        named.pipelines,
        named.aliases,
        named.required,
        [(worker.name, worker.stage, worker.endpoint) for worker in workers],
        metrics,
        Cameras() if gateway.cameras else None,
    )

    async def drain() -> None:
        host.drain()
        await host.drained()

    server = GatewayServer(
        build_app(host, gateway, metrics), drain, gateway.tls_cert, gateway.tls_key
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if lifeline_fd is not None:
        _stop_at_end_of(lifeline_fd, server, loop)
    bound, port = listener.getsockname()[:2]
    log.info("listening", host=bound, port=port, tls=gateway.tls_cert is not None)
    gc.collect()
    gc.freeze()
    try:
        async with asyncio.TaskGroup() as tasks:
            saying = policies = None
            open_too = asyncio.Event()
            if policy_listener is not None:
                policy_port = _policy_port(host, gateway, metrics, policy_listener, open_too)
                policies = tasks.create_task(policy_port.serve())
            if gateway.openpi is None or host.resolve(gateway.openpi.model) not in named.required:
                open_too.set()
            if ready_fd is not None:
                saying = tasks.create_task(_say_ready(host, open_too, ready_fd, bound, port))
            await server.serve(sockets=[listener])
            for task in (saying, policies):
                if task is not None:
                    task.cancel()
    finally:
        host.close()
        log.info("stopped")


def _policy_port(
    host: GatewayHost,
    gateway: GatewayConfig,
    metrics: GatewayMetrics,
    listener: socket.socket,
    opened: asyncio.Event,
) -> PolicyPort:
    assert gateway.openpi is not None
    pipeline = host.resolve(gateway.openpi.model)
    app = build_policy_app(host, gateway, metrics, pipeline)
    config = server_config(app, POLICY_WS_MAX_BYTES, gateway.tls_cert, gateway.tls_key)
    return PolicyPort(host, pipeline, listener, config, opened.set)


async def _say_ready(
    host: GatewayHost, open_too: asyncio.Event, fd: int, bound: str, port: int
) -> None:
    """Write one line to the pipe `fd` once `/readyz` answers 200, and another port is open."""
    try:
        await host.ready()
        await open_too.wait()
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps({"host": bound, "port": port}).encode() + b"\n")
    finally:
        os.close(fd)


def _stop_at_end_of(fd: int, server: GatewayServer, loop: asyncio.AbstractEventLoop) -> None:
    """Stop when the other end of the pipe `fd` is closed: the supervisor has gone."""

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            log.info("supervisor_gone")
            server.stop()

    loop.add_reader(fd, readable)


def _overridden(config: GatewayConfig, options: argparse.Namespace) -> GatewayConfig:
    given = {
        name: value
        for name in ("host", "port", "tls_cert", "tls_key")
        if (value := getattr(options, name)) is not None
    }
    return config.model_copy(update=given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gateway.main", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--workers",
        default="[]",
        metavar="JSON",
        help='the workers: [{"name": ..., "stage": ..., "endpoint": ...}, ...]',
    )
    parser.add_argument("--host", help="overrides gateway.host")
    parser.add_argument("--port", type=int, help="overrides gateway.port; 0: any free one")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    parser.add_argument(
        "--insecure", action="store_true", help="listen off loopback without any keys"
    )
    parser.add_argument(
        "--ready-fd",
        type=int,
        metavar="N",
        help='write one line {"host": ..., "port": ...} here once /readyz is 200',
    )
    parser.add_argument(
        "--lifeline-fd", type=int, metavar="N", help="stop when this pipe is at its end"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
