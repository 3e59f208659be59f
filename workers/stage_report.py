"""What an environment says of a stage: whether its engine is there, and takes the options.

`python -m workers.stage_report` answers for the environment that it runs in: what is asked
comes on standard input, since options may hold keys, and the report goes to standard output.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any

import msgspec
import pydantic

from protocol.config import StageConfig
from protocol.config_source import Location, reasons_of
from protocol.errors import ConfigError
from protocol.payloads import PayloadType
from protocol.schema import PayloadSchema
from workers.engine_registry import engine_class


class StageQuestion(msgspec.Struct, frozen=True):
    """A stage's engine, and the options that it is to take."""

    engine: str
    options: dict[str, Any]


class EngineForm(msgspec.Struct, frozen=True):
    """What an engine takes and makes, as `workers.engine.Engine` has it."""

    inputs: frozenset[PayloadType]
    outputs: frozenset[PayloadType]
    takes: tuple[PayloadSchema, ...]
    produces: tuple[PayloadSchema, ...]


class StageReport(msgspec.Struct, frozen=True):
    """The engine's form, None where there is none, and the problems, each with its place below
    the stage. `version` is that of the installed distribution, empty where none is."""

    version: str
    engine: EngineForm | None
    problems: tuple[tuple[Location, str], ...] = ()


def report_stage(question: StageQuestion) -> StageReport:
    """The report on a stage in this process's environment. Imports its engine."""
    version = installed_version()
    try:
        engine = engine_class(question.engine)
    except ConfigError as error:
        return StageReport(version, None, ((("engine",), error.message),))
    problems: list[tuple[Location, str]] = []
    try:
        engine.Options.model_validate(question.options)
    except pydantic.ValidationError as error:
        known = (*StageConfig.model_fields, *engine.Options.model_fields)
        problems = reasons_of(error, known)
    form = EngineForm(engine.inputs, engine.outputs, engine.takes, engine.produces)
    return StageReport(version, form, tuple(problems))


def installed_version() -> str:
    """The version of the distribution in this environment, empty where it is not installed."""
    try:
        return importlib.metadata.version("antiphon")
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Read a question, write the report."""
    # What engines print while they are imported is no part of it.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=StageQuestion)
    report = msgspec.json.encode(report_stage(question))
    with open(answer, "wb") as pipe:
        pipe.write(report)


if __name__ == "__main__":
    main()
