from __future__ import annotations

import pytest

from gateway.pipelines import catalogue
from protocol.config import Config
from sessions.pipeline import Control, Play

CONFIG = Config.model_validate(
    {
        "stages": {"late": {"engine": "codec"}, "speak": {"engine": "codec"}},
        "pipelines": {
            "voice": {
                "kind": "duplex",
                "required": True,
                "aliases": ["gpt-realtime"],
                "outputs": {"audio": "speak"},
                "limits": {
                    "sessions": 3,
                    "sessions_per_tenant": 2,
                    "waiting": 6,
                    "wait_s": 2.5,
                    "idle_s": 1.5,
                    "stall_s": 7,
                    "grace_s": 2,
                    "turn_s": 5,
                    "replay_bytes": "1MiB",
                },
                "defaults": {"instructions": "Hi.", "voice": "amy"},
                "voices": {"joe": ["alloy", "marin"], "amy": []},
            },
            "other": {"kind": "duplex", "outputs": {"audio": "speak", "text": "late"}},
        },
    }
)


def test_a_model_names_a_pipeline_or_an_alias_of_one() -> None:
    made = catalogue(CONFIG)
    assert made.aliases == {"voice": "voice", "gpt-realtime": "voice", "other": "other"}
    assert made.required == {"voice"}
    assert list(made.pipelines) == ["voice", "other"]


def test_a_voice_answers_to_its_aliases() -> None:
    pipeline = catalogue(CONFIG).pipelines["voice"]
    assert pipeline.voices == {"joe": "joe", "alloy": "joe", "marin": "joe", "amy": "amy"}
    assert (pipeline.voice, pipeline.instructions) == ("amy", "Hi.")


def test_a_pipeline_without_voices_leaves_the_choice_to_its_engine() -> None:
    pipeline = catalogue(CONFIG).pipelines["other"]
    assert pipeline.voices == {pipeline.voice: pipeline.voice}


@pytest.mark.parametrize("durability", ["none", "park", "turn"])
def test_a_priority_holds_whether_or_not_sessions_are_parked(durability: str) -> None:
    section = {
        "kind": "world",
        "outputs": {"frames": "world"},
        "priority": 7,
        "durability": durability,
    }
    config = Config.model_validate(
        {"stages": {"world": {"engine": "synthetic"}}, "pipelines": {"game": section}}
    )
    pipeline = catalogue(config).pipelines["game"]
    assert (pipeline.priority, pipeline.parks) == (7, durability != "none")


def test_limits_are_told_in_ms() -> None:
    limits = catalogue(CONFIG).pipelines["voice"].limits
    assert (limits.sessions, limits.idle_ms, limits.stall_ms) == (3, 1_500, 7_000)
    assert limits.sessions_per_tenant == 2
    assert catalogue(CONFIG).pipelines["other"].limits.sessions_per_tenant is None
    assert (limits.grace_ms, limits.turn_ms, limits.replay_bytes) == (2_000, 5_000, 1024 * 1024)
    assert (limits.waiting, limits.wait_ms) == (6, 2_500)
    assert catalogue(CONFIG).pipelines["other"].limits.waiting == 0


def test_all_pipelines_are_opened_in_the_order_of_the_file() -> None:
    pipelines = catalogue(CONFIG).pipelines
    assert pipelines["voice"].opening_order == ("speak",)
    assert pipelines["other"].opening_order == ("late", "speak")


def test_the_control_loop_of_robots_is_told_in_ms() -> None:
    arm = {
        "kind": "robot",
        "outputs": {"actions": "act"},
        "control": {"rate_hz": 20, "safe_action": {"actions": [0, 1]}},
    }
    config = Config.model_validate(
        {"stages": {"act": {"engine": "vla", "policy": "a:B"}}, "pipelines": {"arm": arm}}
    )
    control = catalogue(config).pipelines["arm"].control
    assert control == Control(50.0, 20.0, {"actions": (0.0, 1.0)})


def test_the_rate_of_worlds_is_passed_on() -> None:
    world = {"kind": "world", "outputs": {"frames": "dream"}, "play": {"rate_hz": 24}}
    config = Config.model_validate(
        {"stages": {"dream": {"engine": "world", "random": 1}}, "pipelines": {"world": world}}
    )
    assert catalogue(config).pipelines["world"].play == Play(24.0)
