"""What kind of world a seed makes: its pipeline, its size, how bad things are."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from protocol.device_bytes import HOST
from protocol.edges import CLIENT, ConnectorKind, edge_name
from protocol.link_events import LinkSettings
from protocol.payloads import PayloadType
from protocol.stream import StreamLimits
from sessions.ledger import Budget
from sessions.pipeline import Control, Delivery, Edge, Kind, Limits, Pipeline
from tests.simulation.network import Weather
from workers.control_events import ControlLimits
from workers.retention import RetentionLimits

LINK = LinkSettings(heartbeat_ms=2_000.0, silence_ms=7_000.0, refused_ms=3_000.0)
CONTROL = ControlLimits(cancel_ms=2_000.0, room_ms=3_000.0, owner_gone_ms=6_000.0)
LIMITS = Limits(
    sessions=4,
    idle_ms=20_000,
    max_age_ms=300_000,
    stall_ms=8_000,
    restore_ms=10_000,
    open_ms=6_000,
    close_ms=4_000,
    grace_ms=6_000,
)
PARKS = frozenset({"think", "speak", "world"})
"""The stages whose sessions can be parked."""
OUT_OF_BYTES = frozenset({"capacity_exceeded", "tenant_share_exceeded"})
"""What is said to who finds no room on a device now."""
SMALL_UNIT_BYTES = 12_000
"""So little that output finds no room either."""
GONE_MS = 60_000.0
"""After this nothing is left of a session that has ended, whatever happened meanwhile."""


@dataclass(frozen=True)
class EngineFaults:
    """Probabilities: of an operation, a turn, a piece of input."""

    refuse_open: float = 0.0
    fail_close: float = 0.0
    refuse_configure: float = 0.0
    fail_turn: float = 0.0
    fail_input: float = 0.0
    give_up_turn: float = 0.0
    stubborn: float = 0.0
    hang: float = 0.0
    overflow: float = 0.0
    slow_operation: float = 0.0
    slow_commit: float = 0.0
    deaf: float = 0.0
    """Turns that do not wait when they are told to."""
    slow_park: float = 0.0
    store_full: float = 0.0
    spoil_snapshot: float = 0.0


@dataclass(frozen=True)
class Places:
    """How many sessions the bytes of one worker are enough for.

    A session takes `unit_bytes` of `device`, or twice that where its settings say so and it
    can have that. With `pooled` the engine has set them aside when it was loaded.
    """

    parkable: int
    """On a stage whose sessions can be parked; others have one more."""
    unit_bytes: int = 1024 * 1024
    device: str = HOST
    pooled: bool = False
    tenant_share: float = 1.0

    def of(self, stage: str) -> int:
        """The places of a worker of this stage."""
        return self.parkable + (stage not in PARKS)

    def budget(self, stage: str) -> Budget:
        """One unit is the engine's; as much as all that is for output."""
        total_bytes = 2 * self.unit_bytes * (self.of(stage) + 1)
        return Budget(total_bytes, 0.5, self.tenant_share)


@dataclass(frozen=True)
class DirectoryFaults:
    """Probabilities of a call: to be answered late, with `unknown`, or not for long; and that
    a session's name is another's already."""

    slow: float = 0.0
    unknown: float = 0.0
    silent: float = 0.0
    taken: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The world of one seed. Times are means, in virtual ms."""

    pipeline: Pipeline
    gateways: int
    replicas: int
    local: bool
    """Whether the end of a process is seen by its peers at once."""
    arena: bool
    """Whether stream input goes beside the link."""
    weather: Weather
    engine: EngineFaults
    clients: int
    fault_every_ms: float
    link: LinkSettings = LINK
    control: ControlLimits = CONTROL
    rude: float = 0.1
    """The share of verbs that are refused, or repeat what was said."""
    lose_input: float = 0.0
    directory: DirectoryFaults = DirectoryFaults()
    fickle: float = 0.0
    """The share of what clients do that is coming, going and asking again."""
    places: Places | None = None
    """What the bytes of each worker are enough for; None: for any number."""
    session_cores: float = 0.0
    """What a session takes of the one core of its worker; 0: nobody counts that."""
    priorities: tuple[int | None, ...] = (0,)
    """That of the sessions of each gateway, in turn."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of the pipeline."""
        return self.pipeline.stages

    @property
    def tight(self) -> bool:
        """Whether limits are so low that they are met."""
        return self.control is not CONTROL


def pipeline_of(stages: str, connectors: bool, limits: Limits = LIMITS) -> Pipeline:
    """A voice pipeline: `plain`, or `chain` where the voice is two stages."""
    text, codes = PayloadType.TEXT, PayloadType.CODEC_CODES
    edges = [Edge("listen", "think", text, Delivery.FULL)]
    if stages == "plain":
        names: tuple[str, ...] = ("listen", "think", "speak")
        edges.append(Edge("think", "speak", text, Delivery.CHUNK))
    else:
        names = ("listen", "think", "voice", "speak")
        delivery = Delivery.CHUNK if stages == "chain" else Delivery.FULL
        edges.append(Edge("think", "voice", text, Delivery.CHUNK))
        edges.append(Edge("voice", "speak", codes, delivery))
    kinds = {}
    if connectors:
        kinds[edge_name(CLIENT, "listen")] = ConnectorKind.SHM
        if "voice" in names:
            kinds[edge_name("voice", "speak")] = ConnectorKind.SHM
    return Pipeline(
        name=stages,
        stages=names,
        edges=tuple(edges),
        outputs={"text": "think", "audio": "speak"},
        connectors=kinds,
        limits=limits,
        instructions="Be brief.",
        voice="joe",
        voices={"joe": "joe", "amy": "amy"},
    )


def loop_of(stages: str, limits: Limits = LIMITS) -> Pipeline:
    """A world: alone, or between a stage that encodes what goes in and one that decodes what
    comes out."""
    if stages == "world":
        return Pipeline(stages, ("world",), (), {"frames": "world"}, limits=limits, kind=Kind.WORLD)
    edges = (
        Edge("encode", "world", PayloadType.LATENTS, Delivery.FULL),
        Edge("world", "decode", PayloadType.LATENTS, Delivery.CHUNK),
    )
    return Pipeline(
        stages,
        ("encode", "world", "decode"),
        edges,
        {"frames": "decode"},
        limits=limits,
        kind=Kind.ROBOT,
        state="world",
    )


def request_of(limits: Limits = LIMITS) -> Pipeline:
    """Answers in text and speech, one a session."""
    edges = (Edge("think", "speak", PayloadType.TEXT, Delivery.CHUNK),)
    outputs = {"text": "think", "audio": "speak"}
    stages = ("think", "speak")
    return Pipeline("request", stages, edges, outputs, limits=limits, kind=Kind.ONE_SHOT)


def calm(stages: str = "plain") -> Profile:
    """A world without faults, with one client."""
    return Profile(
        pipeline=pipeline_of(stages, False),
        gateways=1,
        replicas=1,
        local=True,
        arena=False,
        weather=Weather(),
        engine=EngineFaults(),
        clients=1,
        fault_every_ms=0.0,
        rude=0.0,
    )


def profile_of(seed: int) -> Profile:
    """The world of a seed."""
    chance = random.Random(f"profile {seed}")
    gateways = chance.choice([1, 2])
    arena = chance.random() < 0.5
    bad = chance.random() < 0.6
    sick = chance.random() < 0.7
    tight = chance.random() < 0.3
    weather = Weather()
    if bad:
        weather = Weather(
            drop=chance.choice([0.0, 0.02, 0.1]),
            duplicate=chance.choice([0.0, 0.02, 0.1]),
            spoil=chance.choice([0.0, 0.01]),
            spread_ms=chance.choice([0.0, 2.0, 30.0, 200.0]),
        )
    engine = EngineFaults()
    if sick:
        engine = EngineFaults(
            refuse_open=chance.choice([0.0, 0.1]),
            refuse_configure=chance.choice([0.0, 0.3, 1.0]),
            fail_turn=chance.choice([0.0, 0.1, 0.3]),
            fail_input=chance.choice([0.0, 0.03]),
            give_up_turn=chance.choice([0.0, 0.03]),
            stubborn=chance.choice([0.0, 0.1, 0.3]),
            hang=chance.choice([0.0, 0.0, 0.05, 0.3]),
            overflow=chance.choice([0.0, 0.3]),
            slow_operation=chance.choice([0.0, 0.3]),
            slow_commit=chance.choice([0.0, 0.3]),
            deaf=chance.choice([0.0, 0.1]),
            slow_park=chance.choice([0.0, 0.5]),
            store_full=chance.choice([0.0, 0.0, 0.2]),
            spoil_snapshot=chance.choice([0.0, 0.0, 0.2]),
        )
    # Engines that hang are seen to be wedged only while somebody waits for them.
    limits = LIMITS
    if engine.hang:
        limits = replace(limits, idle_ms=60_000, turn_ms=chance.choice([20_000, 50_000]))
    limits = replace(limits, sessions=chance.choice([3, 4, 4]))
    limits = replace(limits, replay_bytes=chance.choice([1_500, 8_000, 200_000, 2_000_000]))
    directory = DirectoryFaults()
    if chance.random() < 0.5:
        directory = DirectoryFaults(
            slow=chance.choice([0.2, 1.0]),
            unknown=chance.choice([0.0, 0.1, 0.4]),
            silent=chance.choice([0.0, 0.02]),
            taken=chance.choice([0.0, 0.05]),
        )
    kind = chance.choice(["plain", "plain", "chain", "whole", "world", "encoded", "request"])
    if kind in ("world", "encoded"):
        pipeline = loop_of(kind, limits)
    elif kind == "request":
        pipeline = request_of(limits)
    else:
        pipeline = pipeline_of(kind, arena, limits)
    control, link = CONTROL, LINK
    if tight:
        # A voice that begins when all has been thought needs all of that to be kept.
        pieces = 64 if kind == "whole" else 2
        control = ControlLimits(
            sessions=5,
            turns_per_session=4,
            turns=8,
            waiting_commands=8,
            held_inputs=8,
            cancel_ms=2_000.0,
            room_ms=3_000.0,
            owner_gone_ms=6_000.0,
            fed_payloads=3,
            lanes=8,
            remembered_answers=32,
            remembered_turns=4,
            remembered_fences=8,
            retention=RetentionLimits(
                bytes=20_000,
                pieces=pieces,
                hard_bytes=200_000,
                hard_pieces=pieces + 4,
                age_ms=9_000.0,
            ),
        )
        window = StreamLimits(
            window_messages=16,
            window_bytes=64 * 1024,
            queue_messages=96,
            queue_bytes=512 * 1024,
            high_messages=24,
            high_bytes=128 * 1024,
            low_messages=6,
            low_bytes=32 * 1024,
        )
        link = LinkSettings(
            heartbeat_ms=2_000.0,
            silence_ms=7_000.0,
            refused_ms=3_000.0,
            acknowledge_messages=4,
            gateways=gateways,
            ordered=window,
        )
    queues = random.Random(f"queue {seed}")
    if queues.random() < 0.5:
        limits = replace(limits, waiting=queues.choice([1, 4]), wait_ms=8_000)
        pipeline = replace(pipeline, limits=limits)
    chosen = random.Random(f"durability {seed}")
    if kind != "request" and chosen.random() < 0.5:
        pipeline = replace(pipeline, durable=True)
        engine = replace(engine, store_full=chosen.choice([engine.store_full, 0.5]))
    loops = random.Random(f"control {seed}")
    if pipeline.kind is Kind.ROBOT and loops.random() < 0.8:
        safe_action = loops.choice(["hold", "zero", "hold", None])
        control_loop = Control(loops.choice([60.0, 1_000.0]), safe_action=safe_action)
        pipeline = replace(pipeline, control=control_loop)
    if sick:
        engine = replace(engine, fail_close=chosen.choice([0.0, 0.3]))
    return Profile(
        pipeline=pipeline,
        gateways=gateways,
        replicas=chance.choice([1, 1, 2]),
        local=chance.random() < 0.6,
        arena=arena,
        weather=weather,
        engine=engine,
        clients=1 if engine.hang > 0.1 else chance.choice([1, 2, 3, 6, 8]),
        fault_every_ms=chance.choice([0.0, 700.0, 2_500.0, 6_000.0]),
        control=control,
        link=link,
        directory=directory,
        fickle=0.0 if engine.hang > 0.1 else chance.choice([0.0, 0.1, 0.3, 0.5]),
        rude=chance.choice([0.05, 0.1, 0.3]),
        lose_input=chance.choice([0.0, 0.02]) if arena else 0.0,
        places=places_of(chance),
        session_cores=0.3 if queues.random() < 0.3 else 0.0,
        priorities=chance.choice([(0,), (0,), (1, 0), (0, None)]),
    )


def places_of(chance: random.Random) -> Places | None:
    """In many worlds a few."""
    if chance.random() < 0.4:
        return None
    pooled = chance.random() < 0.3
    parkable = chance.choice([1, 2, 2, 3])
    return Places(
        parkable=parkable,
        unit_bytes=chance.choice([1024 * 1024, 1024 * 1024, SMALL_UNIT_BYTES]),
        device="cuda:0" if pooled else HOST,
        pooled=pooled,
        # That of a small worker would have no room for anybody.
        tenant_share=chance.choice([1.0, 0.7]) if parkable > 2 else 1.0,
    )
