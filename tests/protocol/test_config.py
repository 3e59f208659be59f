"""What a config file may say, and how its mistakes are pointed at."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pydantic
import pytest

from protocol.config import (
    Config,
    ControlConfig,
    Delivery,
    GatewayConfig,
    LimitsConfig,
    Modality,
    OpenPiConfig,
    ParkingConfig,
    PipelineConfig,
    StageConfig,
    check_binding,
    load_config,
)
from protocol.edges import ConnectorKind
from protocol.errors import ConfigError
from protocol.payloads import PayloadType

ROOT = Path(__file__).parent.parent.parent

GOOD = """\
gateway: {host: 127.0.0.1, port: 8080}
directory: memory
stages:
  listen: {engine: speech-in, vad: silero}
  think: {engine: ar, model: gemma-3-270m, replicas: 2}
  speak:
    engine: codec
    voice: piper-joe
pipelines:
  voice:
    kind: duplex
    required: true
    aliases: [gpt-realtime]
    edges:
      - {from: listen, to: think, payload: text, delivery: full}
      - {from: think, to: speak, payload: text, delivery: chunk}
    outputs: {text: think, audio: speak}
    limits: {sessions: 3, idle_s: 300, max_age_s: 3600, grace_s: 30}
    defaults: {voice: joe}
    voices:
      joe: [alloy, marin]
"""


WORLD = """\
stages:
  world: {engine: steps}
  paint: {engine: frames}
pipelines:
  game:
    kind: world
    edges:
      - {from: world, to: paint, payload: latents, delivery: chunk}
    outputs: {frames: paint}
    state: world
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "voice.yaml"
    path.write_text(text)
    return path


def load(folder: Path, text: str, environment: dict[str, str] | None = None) -> Config:
    return load_config(write(folder, text), environment or {})


def problems(folder: Path, text: str) -> list[str]:
    """What is wrong with `text`, a line a problem, without the file's name."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    lines = caught.value.message.splitlines()
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:") for line in lines]


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_a_whole_config_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.gateway.port == 8080
    assert config.stages["think"].replicas == 2
    assert config.stages["think"].options == {"model": "gemma-3-270m"}
    assert config.stages["speak"].options == {"voice": "piper-joe"}
    voice = config.pipelines["voice"]
    assert voice.stages == ("listen", "think", "speak")
    assert voice.entry == "listen"
    assert voice.outputs == {Modality.TEXT: "think", Modality.AUDIO: "speak"}
    assert voice.limits.sessions == 3
    assert voice.limits.lead_ms == 2000
    edge = voice.edges[1]
    assert (edge.source, edge.target, edge.payload) == ("think", "speak", PayloadType.TEXT)
    assert edge.delivery is Delivery.CHUNK


def test_the_example_is_valid() -> None:
    config = load_config(ROOT / "examples" / "voice.yaml", {})
    assert next(iter(config.pipelines)) == "voice"
    assert config.pipelines["voice"].required


def test_stages_come_after_the_ones_that_feed_them(tmp_path: Path) -> None:
    first, second = (line for line in GOOD.splitlines() if "from:" in line)
    swapped = GOOD.replace(f"{first}\n{second}", f"{second}\n{first}")
    assert swapped != GOOD
    assert load(tmp_path, swapped).pipelines["voice"].stages == ("listen", "think", "speak")


def test_a_value_can_come_from_the_environment(tmp_path: Path) -> None:
    text = changed("port: 8080", 'port: 8080, keys: ["${VOICE_KEY}"]')
    config = load(tmp_path, text, {"VOICE_KEY": "a-long-enough-key"})
    assert config.gateway.keys == ("a-long-enough-key",)
    assert problems(tmp_path, text) == [
        "1: gateway.keys[0]: environment variable VOICE_KEY is not set"
    ]


def test_keys_do_not_show(tmp_path: Path) -> None:
    config = load(tmp_path, changed("port: 8080", "port: 8080, keys: [a-long-enough-key]"))
    assert config.gateway.keys == ("a-long-enough-key",)
    assert "a-long-enough-key" not in repr(config)
    (problem,) = problems(tmp_path, changed("port: 8080", "port: 8080, keys: [secret key]"))
    assert "secret key" not in problem


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("port: 8080", "port: 99999", "1: gateway.port: must be less than or equal to 65535"),
        ("port: 8080", "prt: 8080", "1: gateway.prt: unknown option; did you mean port?"),
        ("port: 8080", "tls_key: k.pem", "1: gateway: tls_cert and tls_key belong together"),
        ("port: 8080", "origins: ['*']", "1: gateway.origins[0]: must be an origin such as"),
        ("directory: memory", "directory: disk", "2: directory: must be 'memory'"),
        ("replicas: 2", "replicas: two", "5: stages.think.replicas: must be a valid integer"),
        ("grace_s: 30", "grace_s: -1", "18: pipelines.voice.limits.grace_s: must be greater"),
        ("    engine: codec\n", "", "6: stages.speak.engine: is missing"),
        ("kind: duplex", "kind: simplex", "11: pipelines.voice.kind: must be 'duplex'"),
        ("from: listen", "from: hear", "15: pipelines.voice.edges[0].from: there is no stage hear"),
        ("to: speak", "to: talk", "16: pipelines.voice.edges[1].to: there is no stage talk"),
        (
            "to: think, payload: text",
            "to: think, payload: texts",
            "15: pipelines.voice.edges[0].payload: must be 'text'",
        ),
        ("audio: speak", "audio: sing", "17: pipelines.voice.outputs.audio: there is no stage"),
        ("audio: speak", "video: speak", "17: pipelines.voice.outputs.video: must be 'text'"),
        (
            "outputs: {text: think, audio: speak}",
            "outputs: {text: think}",
            "16: pipelines.voice.edges[1].to: speak leads to no output",
        ),
        (
            "[gpt-realtime]",
            "[gpt-realtime, gpt-realtime]",
            "13: pipelines.voice.aliases[1]: gpt-realtime already names pipeline voice",
        ),
        ("[gpt-realtime]", "[voice]", "13: pipelines.voice.aliases[0]: voice already names"),
        ("[alloy, marin]", "[alloy, joe]", "21: pipelines.voice.voices.joe[1]: joe already names"),
        ("{voice: joe}", "{voice: jim}", "19: pipelines.voice.defaults.voice: jim is not in"),
        (
            "listen, to: think",
            "listen, to: speak",
            "14: pipelines.voice.edges: input can enter at one stage only",
        ),
        (
            "port: 8080}",
            "port: 8080, openpi: {port: 8080, model: voice}}",
            "1: gateway.openpi.port: the gateway itself has this port",
        ),
        (
            "port: 8080}",
            "port: 8080, openpi: {model: gpt-realtime}}",
            "1: gateway.openpi.model: gpt-realtime is of kind duplex, and robots need one of kind",
        ),
        (
            "port: 8080}",
            "port: 8080, openpi: {model: arm}}",
            "1: gateway.openpi.model: there is no pipeline arm",
        ),
        ("  think:", "  spare: {engine: ar}\n  think:", "5: stages.spare: no pipeline uses"),
        (
            "    limits:",
            "    connectors: {speak->listen: shm}\n    limits:",
            "18: pipelines.voice.connectors.speak->listen: no edge is called speak->listen",
        ),
        (
            "    limits:",
            "    connectors: {think->speak: shm}\n    limits:",
            "18: pipelines.voice.connectors.think->speak: text between stages is cut",
        ),
        (
            "limits: {sessions: 3",
            "limits: {sessions: 3, sessions_per_tenant: 4",
            "18: pipelines.voice.limits.sessions_per_tenant: more than the 3 of all tenants",
        ),
        ("limits: {sessions: 3", "limits: {stall_s: 0", "18: pipelines.voice.limits.stall_s"),
        ("limits: {sessions: 3", "limits: {waiting: -1", "18: pipelines.voice.limits.waiting"),
        ("limits: {sessions: 3", "limits: {wait_s: 0", "18: pipelines.voice.limits.wait_s"),
        (
            "limits: {sessions: 3",
            "limits: {wait_s: 5, sessions: 3",
            "18: pipelines.voice.limits.wait_s: nobody waits: set limits.waiting",
        ),
        ("replicas: 2", "cores: 0", "5: stages.think.cores"),
        ("replicas: 2", "cores: all", "5: stages.think.cores"),
    ],
)
def test_a_mistake_is_pointed_at(tmp_path: Path, old: str, new: str, problem: str) -> None:
    found = problems(tmp_path, changed(old, new))
    assert [line for line in found if line.startswith(problem)], found


def test_turns_are_not_stored_where_nothing_can_be(tmp_path: Path) -> None:
    text = changed("    limits:", "    durability: turn\n    limits:") + "parking: {memory: 0}\n"
    assert problems(tmp_path, text) == [
        "18: pipelines.voice.durability: nothing can be stored: parking.memory is 0 and there is no"
        " parking.disk"
    ]


def test_a_cycle_is_shown(tmp_path: Path) -> None:
    back = "      - {from: speak, to: listen, payload: audio}\n    outputs:"
    assert problems(tmp_path, changed("    outputs:", back)) == [
        "14: pipelines.voice.edges: the edges form a cycle: listen -> think -> speak -> listen"
    ]


def test_all_mistakes_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = changed("port: 8080", "port: no port").replace("sessions: 3", "sessions: 0")
    text = text.replace("replicas: 2", "replicas: 2, replicas: 3")
    lines = [problem.partition(":")[0] for problem in problems(tmp_path, text)]
    assert lines == ["1", "5", "18"]


def test_a_repeated_key_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD + "directory: memory\n") == [
        "22: directory: is given twice; first in line 2"
    ]


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = changed("  think: {engine: ar,", "  think: &ar {engine: ar,").replace(
        "speech-in, vad: silero}", "speech-in}"
    )
    text = text.replace("    engine: codec\n", "    <<: *ar\n    engine: codec\n")
    text = text.replace("  listen: {engine: speech-in}\n", "")
    text = text.replace("  speak:\n", "  listen: {engine: speech-in}\n  speak:\n", 1)
    speak = load(tmp_path, text).stages["speak"]
    assert (speak.engine, speak.replicas) == ("codec", 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages: [\n", "2: is not valid YAML"),
        ("a: &a [*a]\n", "1: is not valid YAML: a part contains itself"),
        ("- 1\n", "1: must be a map"),
        ("", "1: stages: is missing"),
        ("a: !!python/object:os.system {}\n", "1: is not valid YAML: unknown tag"),
        ("{}: 1\n", "1: a key must be plain text"),
        ("gateway: {}\na: " + "[" * 20_000 + "\n", "2: is nested too deeply"),
    ],
)
def test_what_is_not_a_config_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    assert any(line.startswith(problem) for line in problems(tmp_path, text))


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("stimme: hör".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.0.1", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_binding(GatewayConfig(host=host), insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_off_loopback_needs_keys_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.keys is empty"):
        check_binding(GatewayConfig(host=host), insecure=False)
    check_binding(GatewayConfig(host=host, keys=("a-long-enough-key",)), insecure=False)
    check_binding(GatewayConfig(host=host), insecure=True)


def test_connectors_are_by_payload_unless_said_otherwise(tmp_path: Path) -> None:
    plain = load(tmp_path, GOOD).pipelines["voice"].edge_connectors
    assert plain == {
        "client->listen": "shm",
        "listen->client": "inline",
        "listen->think": "inline",
        "think->speak": "inline",
        "think->client": "inline",
        "speak->client": "shm",
    }
    chosen = changed("    limits:", "    connectors: {speak->client: inline}\n    limits:")
    assert load(tmp_path, chosen).pipelines["voice"].edge_connectors["speak->client"] == "inline"


def test_a_world_pipeline_names_the_stage_that_keeps_its_state(tmp_path: Path) -> None:
    pipeline = load(tmp_path, WORLD).pipelines["game"]
    assert (pipeline.kind, pipeline.state, pipeline.entry) == ("world", "world", "world")
    assert pipeline.edge_connectors["client->world"] is ConnectorKind.SHM
    assert pipeline.edge_connectors["paint->client"] is ConnectorKind.SHM


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ("state: painter", "10: pipelines.game.state: painter is no stage of this pipeline"),
        ("voices: {joe: []}", "10: pipelines.game.voices: only a duplex pipeline has voices"),
        (
            "defaults: {voice: joe}",
            "10: pipelines.game.defaults: only a duplex pipeline has defaults",
        ),
        (
            "limits: {lead_ms: 500}",
            "10: pipelines.game.limits.lead_ms: only a duplex pipeline has a lead",
        ),
    ],
)
def test_an_option_that_means_nothing_to_the_kind_is_refused(
    tmp_path: Path, new: str, problem: str
) -> None:
    found = problems(tmp_path, WORLD.replace("state: world", new))
    assert [line for line in found if line.startswith(problem)], found


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "outputs: {text: think, audio: speak}",
            "outputs: {audio: speak}",
            "17: pipelines.voice.outputs: a duplex pipeline has the outputs text and audio",
        ),
        (
            "kind: duplex",
            "kind: duplex\n    state: think",
            "12: pipelines.voice.state: a duplex pipeline has no state of steps",
        ),
    ],
)
def test_a_duplex_pipeline_speaks_and_has_no_steps(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    found = problems(tmp_path, changed(old, new))
    assert [line for line in found if line.startswith(problem)], found


def test_robots_may_have_a_port_of_their_own() -> None:
    robots = load_config(ROOT / "examples" / "robots.yaml", {})
    assert robots.gateway.openpi is not None
    assert (robots.gateway.openpi.port, robots.gateway.openpi.model) == (8000, "tabletop")
    assert GatewayConfig().openpi is None


def test_the_example_of_a_world_is_played_at_a_rate_of_its_own() -> None:
    world = load_config(ROOT / "examples" / "world.yaml", {}).pipelines["world"]
    assert (world.kind, world.play.rate_hz) == ("world", 12.0)


def numbers() -> list[tuple[type[pydantic.BaseModel], str]]:
    """Every option of a section that is a number or a size."""
    found: list[tuple[type[pydantic.BaseModel], str]] = []
    for section in (
        GatewayConfig,
        OpenPiConfig,
        StageConfig,
        LimitsConfig,
        PipelineConfig,
        ParkingConfig,
        ControlConfig,
    ):
        for name, option in section.model_fields.items():
            kinds = (option.annotation, *get_args(option.annotation))
            while any(get_args(kind) for kind in kinds):
                kinds = tuple(part for kind in kinds for part in get_args(kind) or (kind,))
            if {int, float, pydantic.ByteSize} & {k for k in kinds if isinstance(k, type)}:
                found.append((section, name))
    return found


@pytest.mark.parametrize(
    ("section", "name"), numbers(), ids=[f"{s.__name__}.{n}" for s, n in numbers()]
)
def test_true_is_no_number(section: type[pydantic.BaseModel], name: str) -> None:
    value: Any = {"cpu": True} if name == "budget" else True
    with pytest.raises(pydantic.ValidationError) as caught:
        section.model_validate({name: value})
    (why,) = [e["msg"] for e in caught.value.errors() if e["loc"][0] == name]
    assert "must be a number, not true or false" in why


def test_all_numbers_are_known() -> None:
    names = {name for _, name in numbers()}
    assert {"port", "replicas", "budget", "head_room", "memory", "disk_bytes"} <= names
    assert {"priority", "idle_s", "replay_bytes", "sessions_per_tenant"} <= names


def test_the_store_of_parked_state_has_a_size(tmp_path: Path) -> None:
    text = GOOD + "parking: {memory: true}\n"
    (problem,) = problems(tmp_path, text)
    assert "parking.memory: must be a number, not true or false" in problem


def test_states_are_stored_after_each_turn_where_there_is_a_next_one(tmp_path: Path) -> None:
    durable = changed("    required: true\n", "    required: true\n    durability: turn\n")
    assert load(tmp_path, durable).pipelines["voice"].durability == "turn"
    once = WORLD.replace("kind: world", "kind: one-shot").replace(
        "state: world", "durability: turn"
    )
    (problem,) = problems(tmp_path, once)
    assert "pipelines.game.durability: a one-shot session ends with its turn" in problem


ROBOT = """\
stages:
  act: {engine: vla, policy: "a:B"}
pipelines:
  arm:
    kind: robot
    outputs: {actions: act}
    control: {rate_hz: 20, safe_action: hold}
"""


def test_a_robot_is_answered_within_a_period_of_its_rate_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    assert load(tmp_path, ROBOT).pipelines["arm"].control.within_ms == 50.0
    slower = ROBOT.replace("rate_hz: 20", "rate_hz: 20, deadline_ms: 80")
    assert load(tmp_path, slower).pipelines["arm"].control.within_ms == 80.0
    without = ROBOT.replace("rate_hz: 20, ", "")
    assert load(tmp_path, without).pipelines["arm"].control.within_ms is None


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("zero", "zero"),
        ("[0, 1.5]", (0.0, 1.5)),
        ("[[0, 1], [2, 3]]", ((0.0, 1.0), (2.0, 3.0))),
        ("{actions: [0, 1], gripper: zero}", {"actions": (0.0, 1.0), "gripper": "zero"}),
    ],
)
def test_a_safe_action_is_a_word_an_action_a_chunk_or_one_of_these_for_each_array(
    tmp_path: Path, written: str, meant: object
) -> None:
    config = load(tmp_path, ROBOT.replace("safe_action: hold", f"safe_action: {written}"))
    assert config.pipelines["arm"].control.safe_action == meant


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("hold", "jump", "must be hold, zero, a list of numbers, or a list of such lists"),
        ("hold", "[]", "must be hold, zero, a list of numbers, or a list of such lists"),
        ("hold", "[1, true]", "must be hold, zero, a list of numbers, or a list of such lists"),
        ("hold", "[[1], [1, 2]]", "must have rows of one length"),
        ("hold", "[.inf]", "must be finite"),
        ("hold", "[1.0e+39]", "numbers of 32 bits"),
        ("hold", "{gripper: zero}", "must say what becomes of actions"),
    ],
)
def test_a_safe_action_that_is_none_is_pointed_at(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    (line,) = problems(tmp_path, ROBOT.replace(f"safe_action: {old}", f"safe_action: {new}"))
    assert line.startswith("7: pipelines.arm.control.safe_action: ")
    assert problem in line


def test_only_robots_have_a_control_loop(tmp_path: Path) -> None:
    text = WORLD.replace("state: world", "control: {rate_hz: 20}")
    (problem,) = problems(tmp_path, text)
    assert "pipelines.game.control: only a robot pipeline has a control loop" in problem


def test_a_world_is_played_at_its_rate(tmp_path: Path) -> None:
    played = WORLD.replace("state: world", "play: {rate_hz: 12.5}")
    assert load(tmp_path, played).pipelines["game"].play.rate_hz == 12.5
    assert load(tmp_path, WORLD).pipelines["game"].play.rate_hz == 10.0
    (problem,) = problems(tmp_path, WORLD.replace("state: world", "play: {rate_hz: 0}"))
    assert "pipelines.game.play.rate_hz" in problem
    (problem,) = problems(
        tmp_path, ROBOT.replace("control: {", "play: {rate_hz: 5}\n    control: {")
    )
    assert "pipelines.arm.play: only a world pipeline is played" in problem
