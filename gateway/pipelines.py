"""From the configuration to the pipelines that sessions run on."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.config import Config, PipelineConfig
from sessions.pipeline import Control, Delivery, Edge, Kind, Limits, Pipeline, Play


@dataclass(frozen=True)
class Catalogue:
    """What this deployment serves.

    `pipelines` is by name, in the order of the file: the first one is the default.
    `aliases` maps every name that a client's `model` may be to a pipeline; without
    those that are `required` the gateway is not ready.
    """

    pipelines: dict[str, Pipeline]
    aliases: dict[str, str]
    required: frozenset[str]


def catalogue(config: Config) -> Catalogue:
    """The pipelines of a checked configuration."""
    aliases = {name: name for name in config.pipelines}
    for name, section in config.pipelines.items():
        aliases.update(dict.fromkeys(section.aliases, name))
    return Catalogue(
        {
            name: _pipeline(name, section, tuple(config.stages))
            for name, section in config.pipelines.items()
        },
        aliases,
        frozenset(name for name, section in config.pipelines.items() if section.required),
    )


def _pipeline(name: str, section: PipelineConfig, order: tuple[str, ...]) -> Pipeline:
    """`order` is that of the stages in the file: one for all pipelines."""
    limits = section.limits
    voices = {voice: voice for voice in section.voices}
    for voice, aliases in section.voices.items():
        voices.update(dict.fromkeys(aliases, voice))
    default_voice = section.defaults.voice or next(iter(section.voices), "default")
    voices.setdefault(default_voice, default_voice)
    return Pipeline(
        name=name,
        stages=section.stages,
        opening_order=tuple(stage for stage in order if stage in section.stages),
        edges=tuple(
            Edge(edge.source, edge.target, edge.payload, Delivery(edge.delivery.value))
            for edge in section.edges
        ),
        connectors=section.edge_connectors,
        outputs={modality.value: stage for modality, stage in section.outputs.items()},
        limits=Limits(
            sessions=limits.sessions,
            sessions_per_tenant=limits.sessions_per_tenant,
            waiting=limits.waiting,
            wait_ms=int(limits.wait_s * 1000),
            idle_ms=int(limits.idle_s * 1000),
            max_age_ms=int(limits.max_age_s * 1000),
            grace_ms=int(limits.grace_s * 1000),
            replay_bytes=int(limits.replay_bytes),
            lead_ms=limits.lead_ms,
            stall_ms=int(limits.stall_s * 1000),
            turn_ms=int(limits.turn_s * 1000),
        ),
        instructions=section.defaults.instructions,
        voice=default_voice,
        voices=voices,
        kind=Kind(section.kind),
        state=section.state or "",
        priority=section.priority,
        parks=section.durability != "none",
        durable=section.durability == "turn",
        control=Control(
            section.control.within_ms, section.control.rate_hz, section.control.safe_action
        ),
        play=Play(section.play.rate_hz),
    )
