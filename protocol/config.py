"""The configuration of a deployment: one YAML file, checked as a whole before anything starts.

A value that is exactly `${NAME}` is read from that environment variable, so that
keys need not lie in the file. Relative paths are relative to the working directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from protocol.addresses import is_loopback
from protocol.compute_use import AUTO_CORES
from protocol.config_graph import graph_contradictions
from protocol.config_source import Location, Problem, Source, read_source
from protocol.edges import CLIENT, ConnectorKind, default_connector, edge_name
from protocol.errors import ConfigError
from protocol.payloads import PayloadType
from protocol.safe_action import read_safe_action


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", value):
        raise ValueError("must be a name of letters, digits and . _ : - (at most 128)")
    return value


def _key(value: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]{8,512}", value):
        raise ValueError("must be 8 to 512 printable ASCII characters without spaces")
    return value


def _origin(value: str) -> str:
    if not re.fullmatch(r"https?://[^/\s*@?#]+", value):
        raise ValueError("must be an origin such as https://example.org:8443, without a path")
    return value.lower()


def _host(value: str) -> str:
    if not re.fullmatch(r"[^/\s*@?#]+", value):
        raise ValueError("must be a host name, with a port where it is not the default one")
    return value.lower()


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|[a-z]+:\d+", value):
        raise ValueError("must be cpu, or a kind of device and its number, such as cuda:0")
    return value


def _cores(value: Any) -> float:
    if value == "auto":
        return AUTO_CORES
    if not isinstance(_number(value), int | float) or not 0 < value <= 4096:
        raise ValueError("must be a number of cores above 0, or auto")
    return float(value)


def _interpreter(path: Path) -> Path:
    # Links stay: it is by its own place that an interpreter finds its environment.
    return path.expanduser().absolute()


def _path(value: Any) -> Any:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ValueError("must be a path")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _size(value: Any) -> Any:
    # pydantic reads what it can of 1.5.2GB, and takes it for 1 byte.
    if isinstance(value, str) and not re.fullmatch(r"\s*(\d*\.)?\d+\s*[a-zA-Z]*\s*", value):
        raise ValueError("must be a number of bytes, or one with a unit, such as 512MiB")
    return _number(value)


Name = Annotated[str, AfterValidator(_name)]
Device = Annotated[str, AfterValidator(_device)]
Key = Annotated[str, AfterValidator(_key)]
Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Size = Annotated[pydantic.ByteSize, BeforeValidator(_size)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenPiConfig(_Section):
    """A port for clients of OpenPI, at any path, that is open while the robot pipeline `model`
    is ready; on the address of the gateway, with its keys and certificate."""

    port: Annotated[Whole, Field(ge=0, le=65535)] = 8000
    model: Name


class GatewayConfig(_Section):
    """Where the gateway listens and whom it lets in.

    `keys` open sessions, `admin_keys` also read `/v1/admin`. With no keys everyone
    who reaches the port is let in, which `check_binding` allows on loopback only.
    `origins` and `hosts` are accepted beside the gateway's own. `openpi` is a port of its own
    for robots; with `cameras` operators may see what they see.
    """

    host: Annotated[str, StringConstraints(min_length=1)] = "127.0.0.1"
    port: Annotated[Whole, Field(ge=0, le=65535)] = 8080
    keys: tuple[Key, ...] = Field(default=(), repr=False)
    admin_keys: tuple[Key, ...] = Field(default=(), repr=False)
    origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    hosts: tuple[Annotated[str, AfterValidator(_host)], ...] = ()
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    openpi: OpenPiConfig | None = None
    cameras: bool = False


class StageConfig(BaseModel):
    """One stage: which engine, how many workers, and what each may have of its devices.

    `budget` is how many bytes of a device each worker may reserve, its model included: of
    "cpu" by default an equal share of this machine's memory, of another all that it has.
    Sessions leave the share `head_room` of it to running turns, and those of one tenant get
    at most `tenant_share` of the rest. With `cores` no more sessions are opened on a worker
    than it can serve at once with so many cores of the processor, or, with `auto` (-1 here),
    with what others leave of this machine. `python` is the interpreter that runs its workers,
    by default the one of this process: another environment may have other versions of what an
    engine is built on. Everything else in the section is an option of the engine, in `options`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    engine: Name
    replicas: Annotated[Whole, Field(ge=1, le=64)] = 1
    budget: dict[Device, Annotated[Size, Field(ge=1024 * 1024)]] = {}
    head_room: Annotated[Number, Field(ge=0, le=0.9)] = 0.05
    tenant_share: Annotated[Number, Field(ge=0.001, le=1)] = 1.0
    cores: Annotated[float, BeforeValidator(_cores)] | None = None
    python: Annotated[FilePath, AfterValidator(_interpreter)] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The engine's own options, as written."""
        return dict(self.model_extra or {})


class Delivery(StrEnum):
    """When an edge hands data over: piece by piece, or once the producer has ended."""

    CHUNK = "chunk"
    FULL = "full"


class EdgeConfig(_Section):
    """One typed edge. In YAML the ends are called `from` and `to`."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    payload: PayloadType
    delivery: Delivery = Delivery.FULL

    @property
    def whole(self) -> bool:
        """Whether it hands over nothing before its producer has ended."""
        return self.delivery is Delivery.FULL


class Modality(StrEnum):
    """What a client can get from a session; a duplex one has text and audio."""

    TEXT = "text"
    AUDIO = "audio"
    FRAMES = "frames"
    ACTIONS = "actions"

    @property
    def payload(self) -> PayloadType:
        """The payload type that an output stage of this modality makes."""
        return PayloadType(self.value)


class LimitsConfig(_Section):
    """Bounds of a pipeline's sessions.

    `sessions` at once, of which one tenant (one key) has at most `sessions_per_tenant`, if that
    is set. Where there is no room so many opens as `waiting` wait for some, in order, for up to
    `wait_s`; more are refused at once. `idle_s` without progress and `max_age_s` in all end a
    session; audio is sent at most `lead_ms` ahead of play-out, and a client that takes nothing of
    its answer for `stall_s` is let go. A session that can be resumed waits `grace_s` for a
    client that was cut off, and keeps the last `replay_bytes` of its output for it. A turn of
    which no stage gets anything done for `turn_s` fails.
    """

    sessions: Annotated[Whole, Field(ge=1, le=10_000)] = 8
    sessions_per_tenant: Annotated[Whole, Field(ge=1, le=10_000)] | None = None
    waiting: Annotated[Whole, Field(ge=0, le=1_000)] = 0
    wait_s: Annotated[Number, Field(gt=0, le=3_600)] = 30.0
    idle_s: Annotated[Number, Field(gt=0)] = 300.0
    max_age_s: Annotated[Number, Field(gt=0)] = 3600.0
    grace_s: Annotated[Number, Field(gt=0, le=86_400)] = 30.0
    replay_bytes: Annotated[Size, Field(ge=64 * 1024, le=1024**3)] = pydantic.ByteSize(
        2 * 1024 * 1024
    )
    lead_ms: Annotated[Whole, Field(ge=100, le=60_000)] = 2000
    stall_s: Annotated[Number, Field(gt=0, le=3_600)] = 30.0
    turn_s: Annotated[Number, Field(gt=0, le=86_400)] = 120.0


class ControlConfig(_Section):
    """What sessions of robots promise their loops, unless a client chooses otherwise.

    After the first fresh answer each observation is answered within `deadline_ms`, by default
    one period of `rate_hz`, and with `safe_action` where there is nothing fresh: `hold` gives
    the last action that was given again, `zero` zeros, a list of numbers that action, a list
    of such lists that chunk; a map says so for each array of an answer by its key. The rows of
    a chunk are played at `rate_hz`.
    """

    rate_hz: Annotated[Number, Field(gt=0, le=10_000)] | None = None
    deadline_ms: Annotated[Number, Field(gt=0, le=3_600_000)] | None = None
    safe_action: Annotated[Any, BeforeValidator(read_safe_action)] = None

    @property
    def within_ms(self) -> float | None:
        """The deadline that holds."""
        if self.deadline_ms is None and self.rate_hz is not None:
            return 1000.0 / self.rate_hz
        return self.deadline_ms


class PlayConfig(_Section):
    """How worlds are played: `rate_hz` frames a second."""

    rate_hz: Annotated[Number, Field(gt=0, le=240)] = 10.0


class DefaultsConfig(_Section):
    """What a session starts with until its client says otherwise."""

    instructions: str = ""
    voice: Name | None = None


class PipelineConfig(_Section):
    """Stages wired to one loop. A client's `model` names it, or one of its `aliases`.

    `voices` maps a voice of the speaking stage to other names that clients may use
    for it. `required` makes `/readyz` wait for this pipeline. `connectors` says for
    an edge, named `SOURCE->TARGET` with `client` for the client's end, how its payloads
    cross it: by default text, actions and what is delivered whole `inline`, the rest by `shm`.
    What comes with a command, as the inputs of a step do, is `inline` where it is small.
    Sessions of a lower `priority` are parked first to make room for others, and with
    `durability: none` none are; with `durability: turn` their state is stored after each turn
    besides. `state` names the stage that keeps the state of a world or robot, where it is not
    the first one. `control` is for robots, `play` for worlds.
    """

    kind: Literal["duplex", "world", "robot", "one-shot"]
    required: bool = False
    aliases: tuple[Name, ...] = ()
    edges: tuple[EdgeConfig, ...] = ()
    outputs: dict[Modality, Name]
    limits: LimitsConfig = LimitsConfig()
    defaults: DefaultsConfig = DefaultsConfig()
    control: ControlConfig = ControlConfig()
    play: PlayConfig = PlayConfig()
    voices: dict[Name, tuple[Name, ...]] = {}
    connectors: dict[str, ConnectorKind] = {}
    state: Name | None = None
    priority: Annotated[Whole, Field(ge=-1000, le=1000)] = 0
    durability: Literal["none", "park", "turn"] = "park"

    @property
    def edge_connectors(self) -> dict[str, ConnectorKind]:
        """How payloads cross each edge, those from and to the client included, by its name."""
        # Audio streams in, steps bring arrays, and requests for the most part text.
        taken = PayloadType.TEXT if self.kind == "one-shot" else PayloadType.AUDIO
        chosen = {
            edge_name(CLIENT, self.entry): default_connector(taken),
            edge_name(self.entry, CLIENT): default_connector(PayloadType.TEXT),
        }
        for modality, stage in self.outputs.items():
            chosen[edge_name(stage, CLIENT)] = default_connector(modality.payload)
        for edge in self.edges:
            kind = ConnectorKind.INLINE if edge.whole else default_connector(edge.payload)
            chosen[edge_name(edge.source, edge.target)] = kind
        return {edge: self.connectors.get(edge, kind) for edge, kind in chosen.items()}

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of its stages, each once, producers before their consumers."""
        order: list[str] = []
        waiting = list(dict.fromkeys(self._named_stages()))
        while waiting:
            ready = [
                stage
                for stage in waiting
                if all(e.source in order for e in self.edges if e.target == stage)
            ]
            order += ready or waiting
            waiting = [stage for stage in waiting if stage not in order]
        return tuple(order)

    @property
    def entry(self) -> str:
        """The stage that takes the client's input: the one that no edge leads to."""
        return self.stages[0]

    def _named_stages(self) -> Iterator[str]:
        for edge in self.edges:
            yield edge.source
            yield edge.target
        yield from self.outputs.values()


class ParkingConfig(_Section):
    """Where the state of sessions goes that make room for others.

    `memory` bytes of the host's memory (by default an eighth of it, 1 GiB at most) come first,
    then a directory `disk`, if there is one, with at most `disk_bytes` in it. With no room in
    either a session is not parked.
    """

    memory: Annotated[Size, Field(ge=0)] | None = None
    disk: FilePath | None = None
    disk_bytes: Annotated[Size, Field(ge=1)] = pydantic.ByteSize(10 * 1024**3)

    @model_validator(mode="after")
    def _bytes_of_a_disk(self) -> Self:
        if "disk_bytes" in self.model_fields_set and self.disk is None:
            raise ValueError("disk_bytes is of a disk, and no `disk` is named")
        return self

    @property
    def stores(self) -> bool:
        """Whether there is anywhere to put a state."""
        return self.memory != 0 or self.disk is not None


class Config(_Section):
    """A whole deployment. A client that names no pipeline gets the first one."""

    gateway: GatewayConfig = GatewayConfig()
    directory: Literal["memory"] = "memory"
    parking: ParkingConfig = ParkingConfig()
    stages: dict[Name, StageConfig] = Field(min_length=1)
    pipelines: dict[Name, PipelineConfig] = Field(min_length=1)


_OPTIONS = tuple(
    field.alias or name
    for section in (
        Config,
        GatewayConfig,
        OpenPiConfig,
        ParkingConfig,
        PipelineConfig,
        EdgeConfig,
        LimitsConfig,
        DefaultsConfig,
        ControlConfig,
        PlayConfig,
    )
    for name, field in section.model_fields.items()
)
"""Every option that a section knows, for guessing what a mistyped one meant."""


@dataclass(frozen=True)
class ConfigFile:
    """A config together with the text it came from, so that later checks can point at lines."""

    config: Config
    source: Source


def load_config(path: Path, environment: Mapping[str, str] | None = None) -> Config:
    """The config in the YAML file `path`; `environment` is `os.environ` if None.

    Raises ConfigError whose message has one line for each problem, as
    `FILE:LINE: FIELD: REASON`.
    """
    return read_config(path, environment).config


def read_config(path: Path, environment: Mapping[str, str] | None = None) -> ConfigFile:
    """As `load_config`, and keeps the positions in the file."""
    source = read_source(path, os.environ if environment is None else environment)
    problems = list(source.problems)
    try:
        config = Config.model_validate(source.value)
    except pydantic.ValidationError as error:
        known = {problem.field for problem in problems}
        found = source.problems_of(error, known=_OPTIONS)
        problems += [problem for problem in found if problem.field not in known]
        raise config_error(problems) from None
    problems += [source.problem(location, reason) for location, reason in _contradictions(config)]
    if problems:
        raise config_error(problems)
    return ConfigFile(config, source)


def config_error(problems: list[Problem]) -> ConfigError:
    """One error that lists `problems` (at least one) in the order of the file."""
    ordered = sorted(problems, key=lambda problem: problem.line)
    return ConfigError("\n".join(map(str, ordered)), field=ordered[0].field or None)


def check_binding(gateway: GatewayConfig, *, insecure: bool) -> None:
    """Refuse an open door: raises ConfigError off loopback without keys, unless `insecure`.

    Half of a certificate and its key is refused too: it would not be served by.
    """
    if (gateway.tls_cert is None) != (gateway.tls_key is None):
        raise ConfigError(
            "a TLS certificate and its key belong together: give both --tls-cert and --tls-key, "
            "or both in the config",
            field="gateway.tls_cert",
        )
    if is_loopback(gateway.host) or gateway.keys or insecure:
        return
    raise ConfigError(
        f"gateway.host is {gateway.host}, which other machines can reach, and gateway.keys is "
        "empty: anyone could use this server. Set keys, or start with --insecure",
        field="gateway.keys",
    )


def _contradictions(config: Config) -> Iterator[tuple[Location, str]]:
    """What is wrong between fields that are each well-formed."""
    if (config.gateway.tls_cert is None) != (config.gateway.tls_key is None):
        yield ("gateway",), "tls_cert and tls_key belong together: set both or none"
    yield from _openpi_contradictions(config)
    names = dict.fromkeys(config.pipelines, "a pipeline")
    for name, pipeline in config.pipelines.items():
        location: Location = ("pipelines", name)
        for index, alias in enumerate(pipeline.aliases):
            if alias in names:
                reason = f"{alias} already names {names[alias]}"
                yield (*location, "aliases", index), reason
            names.setdefault(alias, f"pipeline {name}")
        yield from _kind_contradictions(location, pipeline)
        yield from _voice_contradictions(location, pipeline)
        if "wait_s" in pipeline.limits.model_fields_set and not pipeline.limits.waiting:
            yield (*location, "limits", "wait_s"), "nobody waits: set limits.waiting as well"
        if pipeline.durability == "turn" and not config.parking.stores:
            reason = "nothing can be stored: parking.memory is 0 and there is no parking.disk"
            yield (*location, "durability"), reason
        sessions, of_one = pipeline.limits.sessions, pipeline.limits.sessions_per_tenant
        if of_one is not None and of_one > sessions:
            where = (*location, "limits", "sessions_per_tenant")
            yield where, f"more than the {sessions} of all tenants together"
        yield from graph_contradictions(location, pipeline, config.stages)
    used = {stage for pipeline in config.pipelines.values() for stage in pipeline.stages}
    for stage in config.stages:
        if stage not in used:
            yield ("stages", stage), "no pipeline uses this stage"


def _openpi_contradictions(config: Config) -> Iterator[tuple[Location, str]]:
    openpi = config.gateway.openpi
    if openpi is None:
        return
    if openpi.port and openpi.port == config.gateway.port:
        yield ("gateway", "openpi", "port"), "the gateway itself has this port"
    served = [
        pipeline
        for name, pipeline in config.pipelines.items()
        if openpi.model in (name, *pipeline.aliases)
    ]
    if not served:
        yield ("gateway", "openpi", "model"), f"there is no pipeline {openpi.model}"
    elif served[0].kind != "robot":
        reason = f"{openpi.model} is of kind {served[0].kind}, and robots need one of kind robot"
        yield ("gateway", "openpi", "model"), reason


def _kind_contradictions(
    location: Location, pipeline: PipelineConfig
) -> Iterator[tuple[Location, str]]:
    """Options that mean nothing for the pipeline's kind, and outputs that it must have."""
    if pipeline.state is not None:
        if pipeline.kind not in ("world", "robot"):
            yield (*location, "state"), f"a {pipeline.kind} pipeline has no state of steps"
        elif pipeline.state not in pipeline.stages:
            yield (*location, "state"), f"{pipeline.state} is no stage of this pipeline"
    if pipeline.kind != "robot" and "control" in pipeline.model_fields_set:
        yield (*location, "control"), "only a robot pipeline has a control loop"
    if pipeline.kind != "world" and "play" in pipeline.model_fields_set:
        yield (*location, "play"), "only a world pipeline is played"
    if pipeline.kind == "duplex":
        if set(pipeline.outputs) != {Modality.TEXT, Modality.AUDIO}:
            yield (*location, "outputs"), "a duplex pipeline has the outputs text and audio"
        return
    given = pipeline.model_fields_set
    if pipeline.kind == "one-shot" and pipeline.durability == "turn":
        reason = "a one-shot session ends with its turn: there is nothing to go on from"
        yield (*location, "durability"), reason
    for option in ("voices", "defaults"):
        if option in given:
            yield (*location, option), f"only a duplex pipeline has {option}"
    if "lead_ms" in pipeline.limits.model_fields_set:
        yield (*location, "limits", "lead_ms"), "only a duplex pipeline has a lead"


def _voice_contradictions(
    location: Location, pipeline: PipelineConfig
) -> Iterator[tuple[Location, str]]:
    names = {voice: voice for voice in pipeline.voices}
    for voice, aliases in pipeline.voices.items():
        for index, alias in enumerate(aliases):
            if alias in names:
                reason = f"{alias} already names voice {names[alias]}"
                yield (*location, "voices", voice, index), reason
            names.setdefault(alias, voice)
    chosen = pipeline.defaults.voice
    if chosen is not None and chosen not in names:
        yield (*location, "defaults", "voice"), f"{chosen} is not in voices"
