"""From the configuration to the pipelines that sessions run on."""

from __future__ import annotations

from protocol.config import Config, PipelineConfig
from sessions.pipeline import Delivery, Edge, Limits, Pipeline


def pipelines_of(config: Config) -> dict[str, Pipeline]:
    """The pipelines by name, in the order of the file: the first one is the default."""
    return {name: _pipeline(name, section) for name, section in config.pipelines.items()}


def aliases_of(config: Config) -> dict[str, str]:
    """Every name that a client's `model` may be, with the pipeline that it names."""
    names = {name: name for name in config.pipelines}
    for name, section in config.pipelines.items():
        names.update(dict.fromkeys(section.aliases, name))
    return names


def required_of(config: Config) -> frozenset[str]:
    """The pipelines without which the gateway is not ready."""
    return frozenset(name for name, section in config.pipelines.items() if section.required)


def _pipeline(name: str, section: PipelineConfig) -> Pipeline:
    limits = section.limits
    voices = {voice: voice for voice in section.voices}
    for voice, aliases in section.voices.items():
        voices.update(dict.fromkeys(aliases, voice))
    default_voice = section.defaults.voice or next(iter(section.voices), "default")
    voices.setdefault(default_voice, default_voice)
    return Pipeline(
        name=name,
        stages=section.stages,
        edges=tuple(
            Edge(edge.source, edge.target, edge.payload, Delivery(edge.delivery.value))
            for edge in section.edges
        ),
        outputs={modality.value: stage for modality, stage in section.outputs.items()},
        limits=Limits(
            sessions=limits.sessions,
            idle_ms=int(limits.idle_s * 1000),
            max_age_ms=int(limits.max_age_s * 1000),
            lead_ms=limits.lead_ms,
        ),
        instructions=section.defaults.instructions,
        voice=default_voice,
        voices=voices,
    )
