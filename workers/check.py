"""Checks of a config that need the engines: that they exist, take the options and fit the edges."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from protocol.compute_use import AUTO_CORES
from protocol.config import ConfigFile, PipelineConfig, StageConfig, config_error
from protocol.config_source import Location, Problem
from protocol.edges import edge_name
from protocol.errors import ConfigError
from protocol.payloads import PayloadType
from protocol.schema import check_edge, schema_of
from workers.environment import ask
from workers.memory_shares import share_of_memory
from workers.processor_time import sample
from workers.stage_report import EngineForm, StageQuestion, StageReport, report_stage


def check_stages(file: ConfigFile) -> None:
    """Raises ConfigError, one line a problem, unless every stage's engine can do its part."""
    engines: dict[str, EngineForm] = {}
    problems: list[Problem] = []
    for name, stage in file.config.stages.items():
        location: Location = ("stages", name)
        try:
            report = _report(stage)
        except ConfigError as error:
            problems.append(file.source.problem((*location, "python"), error.message))
            continue
        problems += [
            file.source.problem((*location, *where), reason) for where, reason in report.problems
        ]
        if report.engine is not None:
            engines[name] = report.engine
    for name, pipeline in file.config.pipelines.items():
        for location, reason in _mismatches(("pipelines", name), pipeline, engines):
            problems.append(file.source.problem(location, reason))
    if problems:
        raise config_error(problems)


def check_machine(file: ConfigFile) -> None:
    """Raises ConfigError, one line a problem, where this machine cannot be what a config wants:
    it has less memory or fewer cores, or parking.disk cannot be used. Nothing is made or
    changed."""
    problems: list[Problem] = []
    try:
        share_of_memory(file.config)
    except ConfigError as error:
        field = error.field or ""
        message = error.message.removeprefix(f"{field}: ")
        problems.append(file.source.problem(tuple(field.split(".")), message))
    there = sample(AUTO_CORES).cores or 0.0
    for name, stage in file.config.stages.items():
        if stage.cores is not None and stage.cores > there:
            too_many = f"{stage.cores:g} cores are more than this machine has ({there:g})"
            problems.append(file.source.problem(("stages", name, "cores"), too_many))
    disk = file.config.parking.disk
    if disk is not None and (reason := unusable(disk.expanduser().absolute())) is not None:
        problems.append(file.source.problem(("parking", "disk"), reason))
    if problems:
        raise config_error(problems)


def unusable(directory: Path) -> str | None:
    """Why no snapshots can be kept there, as far as can be seen without trying."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        parent = next(parent for parent in directory.parents if parent.exists())
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK) and not _of_kernel(parent):
            return None
        return f"{directory} cannot be made in {parent}"
    except (OSError, ValueError) as error:
        return f"{directory} cannot be used: {error}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is no directory"
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return f"others than its owner can use {directory}"
    return None


def _of_kernel(directory: Path) -> bool:
    """Whether nothing can be made there though the permissions say so."""
    return any(directory.is_relative_to(tree) for tree in ("/proc", "/sys"))


def _report(stage: StageConfig) -> StageReport:
    """What the stage's environment says of it. Raises ConfigError where that has no workers."""
    question = StageQuestion(stage.engine, stage.options)
    return report_stage(question) if stage.python is None else ask(stage.python, question)


def _mismatches(
    location: Location, pipeline: PipelineConfig, engines: dict[str, EngineForm]
) -> Iterator[tuple[Location, str]]:
    for index, edge in enumerate(pipeline.edges):
        field = (*location, "edges", index, "payload")
        source, target = engines.get(edge.source), engines.get(edge.target)
        if source and edge.payload not in source.outputs:
            yield field, f"{edge.source} makes {_listed(source.outputs)}, not {edge.payload}"
        if target and edge.payload not in target.inputs:
            yield field, f"{edge.target} takes {_listed(target.inputs)}, not {edge.payload}"
        made = schema_of(source.produces, edge.payload) if source else None
        taken = schema_of(target.takes, edge.payload) if target else None
        if made is not None and taken is not None:
            try:
                check_edge(edge_name(edge.source, edge.target), made, taken)
            except ConfigError as error:
                yield field, error.message
    for modality, stage in pipeline.outputs.items():
        engine = engines.get(stage)
        if engine and modality.payload not in engine.outputs:
            field = (*location, "outputs", modality.value)
            yield field, f"{stage} makes {_listed(engine.outputs)}, not {modality.payload}"


def _listed(types: frozenset[PayloadType]) -> str:
    return " and ".join(sorted(types)) or "nothing"
