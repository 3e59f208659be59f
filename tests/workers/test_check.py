"""A config is checked against the engines it names, which are synthetic here."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any, ClassVar

import pydantic
import pytest

from loadtest.synthetic_voice import SyntheticDecode
from protocol.config import read_config
from protocol.errors import ConfigError
from protocol.payloads import PayloadType
from protocol.schema import PayloadSchema
from tests.end_to_end.test_chain import CONFIG as CHAIN
from workers import engine_registry
from workers.check import check_stages
from workers.engine import EmitEvent, Engine, EngineSession
from workers.engine_registry import engine_class

ROOT = Path(__file__).parent.parent.parent


class EarOptions(pydantic.BaseModel):
    """Options of the synthetic listener."""

    model_config = pydantic.ConfigDict(extra="forbid")
    rate_hz: int = 16_000


class Ear(Engine):
    """Takes audio, makes text; nothing of it runs in these tests."""

    Options: ClassVar[type[pydantic.BaseModel]] = EarOptions
    inputs = frozenset({PayloadType.AUDIO})
    outputs = frozenset({PayloadType.TEXT})

    @classmethod
    def create(cls, options: Any) -> Engine:
        raise AssertionError("a check creates no engine")

    async def load(self) -> None:
        raise AssertionError("a check loads nothing")

    def open(self, session: str, settings: dict[str, Any], emit: EmitEvent) -> EngineSession:
        raise AssertionError("a check opens nothing")

    async def shutdown(self) -> None:
        raise AssertionError("a check loads nothing")


class Mouth(Ear):
    """Takes text, makes audio."""

    inputs = frozenset({PayloadType.TEXT})
    outputs = frozenset({PayloadType.AUDIO})


GOOD = """\
stages:
  hear: {engine: ear, rate_hz: 16000}
  say: {engine: mouth}
pipelines:
  echo:
    kind: duplex
    edges:
      - {from: hear, to: say, payload: text}
    outputs: {text: hear, audio: say}
"""


@pytest.fixture(autouse=True)
def synthetic_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "ear": f"{__name__}:Ear",
        "mouth": f"{__name__}:Mouth",
        "extra": "no_such_library.engine:Engine",
        "option": f"{__name__}:EarOptions",
    }
    entries = EntryPoints(
        EntryPoint(name, value, engine_registry.ENTRY_POINTS) for name, value in values.items()
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)


def problems(folder: Path, old: str, new: str) -> list[str]:
    assert GOOD.count(old) == 1
    path = folder / "echo.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        check_stages(read_config(path, {}))
    return [line.removeprefix(f"{path}:") for line in caught.value.message.splitlines()]


def test_a_config_that_fits_passes(tmp_path: Path) -> None:
    path = tmp_path / "echo.yaml"
    path.write_text(GOOD)
    check_stages(read_config(path, {}))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("ear, rate", "eer, rate", "2: stages.hear.engine: there is no engine eer; installed are"),
        ("rate_hz: 16000", "rate_hz: x", "2: stages.hear.rate_hz: must be a valid integer"),
        (
            "rate_hz: 16000",
            "rate_ms: 1",
            "2: stages.hear.rate_ms: unknown option; did you mean rate_hz?",
        ),
        (
            "rate_hz: 16000",
            "replica: 1",
            "2: stages.hear.replica: unknown option; did you mean replicas?",
        ),
        (
            "payload: text",
            "payload: audio",
            "8: pipelines.echo.edges[0].payload: hear makes text, not audio",
        ),
        (
            "text: hear, audio: say",
            "text: say, audio: say",
            "9: pipelines.echo.outputs.text: say makes audio, not text",
        ),
        ("engine: mouth", "engine: ear", "8: pipelines.echo.edges[0].payload: say takes audio"),
    ],
)
def test_a_mismatch_is_pointed_at(tmp_path: Path, old: str, new: str, problem: str) -> None:
    found = problems(tmp_path, old, new)
    assert [line for line in found if line.startswith(problem)], found


def test_an_engine_whose_library_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="extra cannot be loaded: No module named"):
        engine_class("extra")


def test_an_entry_that_is_no_engine_is_said() -> None:
    with pytest.raises(ConfigError, match="option is not an Engine"):
        engine_class("option")


def test_dtypes_of_both_ends_are_held_against_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN.replace("DELIVERY", "chunk"))
    check_stages(read_config(path))
    floats = PayloadSchema(PayloadType.CODEC_CODES, "<f4")
    monkeypatch.setattr(SyntheticDecode, "takes", (floats,))
    with pytest.raises(ConfigError, match="edge talk->decode carries dtype <i4"):
        check_stages(read_config(path))
