"""Checks of a config that need the engines: that they exist, take the options and fit the edges."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator

import pydantic

from protocol.config import ConfigFile, PipelineConfig, config_error
from protocol.config_source import Location, Problem
from protocol.edges import edge_name
from protocol.errors import ConfigError
from protocol.payloads import PayloadType
from protocol.schema import PayloadSchema, check_edge
from workers.engine import Engine

ENTRY_POINTS = "antiphon.engines"


def engine_class(name: str) -> type[Engine]:
    """The engine registered as `name`, or in a module as `MODULE:CLASS`.

    Imports its module, but loads no model. Raises ConfigError when there is none or its
    module cannot be imported.
    """
    registered = importlib.metadata.entry_points(group=ENTRY_POINTS)
    module, colon, attribute = name.partition(":")
    if not colon and name not in registered.names:
        known = ", ".join(sorted(registered.names)) or "none"
        raise ConfigError(f"there is no engine {name}; installed are {known}", field="engine")
    try:
        if colon:
            engine = getattr(importlib.import_module(module), attribute)
        else:
            engine = registered[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {name} cannot be loaded: {error}", field="engine") from None
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise ConfigError(f"engine {name} is not an Engine but {engine!r}", field="engine")
    return engine


def check_stages(file: ConfigFile) -> None:
    """Raises ConfigError, one line a problem, unless every stage's engine can do its part."""
    engines: dict[str, type[Engine]] = {}
    problems: list[Problem] = []
    for name, stage in file.config.stages.items():
        location: Location = ("stages", name)
        try:
            engine = engines[name] = engine_class(stage.engine)
            engine.Options.model_validate(stage.options)
        except ConfigError as error:
            problems.append(file.source.problem((*location, "engine"), error.message))
        except pydantic.ValidationError as error:
            known = ("engine", "replicas", *engine.Options.model_fields)
            problems += file.source.problems_of(error, location, known)
    for name, pipeline in file.config.pipelines.items():
        for location, reason in _mismatches(("pipelines", name), pipeline, engines):
            problems.append(file.source.problem(location, reason))
    if problems:
        raise config_error(problems)


def schema_of(schemas: tuple[PayloadSchema, ...], payload: PayloadType) -> PayloadSchema | None:
    """What an engine says of its payloads of a type."""
    return next((schema for schema in schemas if schema.type is payload), None)


def _mismatches(
    location: Location, pipeline: PipelineConfig, engines: dict[str, type[Engine]]
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
