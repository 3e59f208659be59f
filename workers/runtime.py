"""The worker process: `python -m workers.runtime --spec-fd N`.

What it serves comes as JSON (`workers.spec.WorkerSpec`) over an inherited pipe, because
engine options may hold keys, which do not belong on a command line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable

import msgspec
import pydantic
import structlog
import uvloop

from protocol.errors import ConfigError, ModelFileError
from protocol.exit_status import ExitStatus
from protocol.logs import configure_logging
from workers.engine import Engine
from workers.engine_registry import engine_class
from workers.spec import WorkerSpec, WorkerStarted
from workers.worker import Worker

_log = structlog.get_logger(__name__)


def create_engine(spec: WorkerSpec) -> Engine:
    """The engine of `spec`, not loaded yet.

    The engine is a name registered in `antiphon.engines`, or `MODULE:CLASS`. Raises
    ConfigError when there is none or its options are wrong.
    """
    engine = engine_class(spec.engine)
    try:
        options = engine.Options.model_validate(spec.options)
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'options'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(f"stage {spec.stage}: {problems}") from None
    return engine.create(options)


async def _serve(spec: WorkerSpec, on_ready: Callable[[], None]) -> None:
    worker = Worker(spec, create_engine(spec))
    structlog.contextvars.bind_contextvars(
        stage=spec.stage, worker=spec.name, incarnation=worker.incarnation
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.stop)
    loop.add_signal_handler(signal.SIGINT, worker.stop)
    await worker.serve(on_ready)
    _log.info("stopped")


def main(arguments: list[str] | None = None) -> ExitStatus:
    """Serve until SIGTERM; returns the exit status of the process."""
    options = _parser().parse_args(arguments)
    configure_logging("worker")
    say = _Announcement(options.ready_fd)
    try:
        with open(options.spec_fd, "rb") as pipe:
            spec = msgspec.json.decode(pipe.read(), type=WorkerSpec)
        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_serve(spec, lambda: say(WorkerStarted(True))))
    except (msgspec.DecodeError, ConfigError) as error:
        say(WorkerStarted(False, str(error)))
        return ExitStatus.CONFIG
    except ModelFileError as error:
        say(WorkerStarted(False, str(error)))
        return ExitStatus.MODEL
    except Exception:
        _log.exception("worker_failed")
        return ExitStatus.FAILED
    return ExitStatus.OK


class _Announcement:
    """Says one line to the supervisor, or to people where there is none."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def __call__(self, started: WorkerStarted) -> None:
        if self._fd is None:
            print(started.error or "ready", file=sys.stderr, flush=True)
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, msgspec.json.encode(started) + b"\n")
        os.close(self._fd)
        self._fd = None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers.runtime", description=__doc__)
    parser.add_argument("--name", help="shown in the list of processes, nothing else")
    parser.add_argument(
        "--spec-fd", type=int, required=True, metavar="N", help="read what to serve from here"
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="write one line of JSON here when loaded"
    )
    return parser


def _exit(status: int) -> None:
    """End now: a native thread of an engine must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main())
