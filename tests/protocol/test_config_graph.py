"""Which graphs of stages a config may not have, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.config import load_config
from protocol.errors import ConfigError

FIRST_EDGE_LINE = 4


def problems(folder: Path, edges: list[str], connectors: str = "{}") -> list[str]:
    """What is wrong with a pipeline of `edges`, each `FROM TO PAYLOAD DELIVERY`.

    Text comes out of the first edge's target, audio out of the last stage that no edge
    leaves. A line a problem, without the file's name.
    """
    rows = [edge.split() for edge in edges]
    stages = dict.fromkeys(stage for row in rows for stage in row[:2])
    lines = ["pipelines:", "  p:", "    edges:"]
    for source, target, payload, delivery in rows:
        lines.append(
            f"      - {{from: {source}, to: {target}, payload: {payload}, delivery: {delivery}}}"
        )
    last = [stage for stage in stages if all(stage != row[0] for row in rows)][-1]
    lines.append(f"    outputs: {{text: {rows[0][1]}, audio: {last}}}")
    lines.append(f"    connectors: {connectors}")
    lines.append("    kind: duplex")
    lines.append(f"stages: {{{', '.join(f'{stage}: {{engine: e}}' for stage in stages)}}}")
    path = folder / "graph.yaml"
    path.write_text("\n".join(lines))
    try:
        load_config(path, {})
    except ConfigError as error:
        return [line.removeprefix(f"{path}:") for line in error.message.splitlines()]
    return []


WAITS_FOR_EACH_OTHER = {
    "the join waits for the stage that its window stops": [
        "hear think text full",
        "think speak text full",
        "think talk hidden_states chunk",
        "talk speak codec_codes chunk",
    ],
    "the window lies before the last edge, and so does the full one": [
        "hear think text full",
        "think plan tokens full",
        "plan speak tokens chunk",
        "think talk hidden_states chunk",
        "talk speak codec_codes chunk",
    ],
    "the window is at once behind the common stage": [
        "hear think text full",
        "think plan tokens full",
        "plan speak tokens full",
        "think speak hidden_states chunk",
    ],
}


@pytest.mark.parametrize("edges", WAITS_FOR_EACH_OTHER.values(), ids=WAITS_FOR_EACH_OTHER.keys())
def test_a_join_that_would_wait_for_a_stage_that_waits_for_it_is_refused(
    tmp_path: Path, edges: list[str]
) -> None:
    found = problems(tmp_path, edges)
    assert found
    assert all("neither would go on" in problem for problem in found)


def test_both_edges_and_the_line_are_named(tmp_path: Path) -> None:
    edges = ["hear think text full", "think speak text full", "think talk latents chunk"]
    edges.append("talk speak codec_codes chunk")
    both = problems(tmp_path, edges)
    assert both == [
        f"{FIRST_EDGE_LINE + index}: pipelines.p.edges[{index}]: speak waits for all of "
        f"think->speak, which is delivered in full, while the window of {window} may not hold "
        "all that comes meanwhile: neither would go on. Deliver both in full"
        for index, window in ((2, "think->talk"), (3, "talk->speak"))
    ]


def test_the_stage_that_waits_is_named_not_one_behind_it(tmp_path: Path) -> None:
    edges = ["hear think text full", "mix speak codec_codes chunk", "think plan tokens full"]
    edges += ["plan mix latents chunk", "think mix hidden_states chunk"]
    (problem,) = problems(tmp_path, edges)
    assert "mix waits for all of think->plan" in problem
    assert "the window of think->mix" in problem


SOUND = {
    "both sides are delivered in full": [
        "hear think text full",
        "think speak text full",
        "think talk hidden_states full",
        "talk speak codec_codes full",
    ],
    "the last edge takes all, so that no window stops the stage before it": [
        "hear think text full",
        "think speak text full",
        "think talk hidden_states chunk",
        "talk speak codec_codes full",
    ],
    "the common stage has ended before the window begins": [
        "hear think text full",
        "think speak text full",
        "think talk hidden_states full",
        "talk speak codec_codes chunk",
    ],
    "both sides come piece by piece": [
        "hear think text full",
        "think speak latents chunk",
        "think talk hidden_states chunk",
        "talk speak codec_codes chunk",
    ],
    "text waits at the gateway and stops nobody": [
        "hear think text full",
        "think speak latents full",
        "think talk text chunk",
        "talk speak codec_codes chunk",
    ],
    "a chain": [
        "hear think text full",
        "think talk hidden_states chunk",
        "talk speak codec_codes chunk",
    ],
    "the sides meet in no stage": [
        "hear think text full",
        "think talk hidden_states full",
        "think speak codec_codes chunk",
    ],
}


@pytest.mark.parametrize("edges", SOUND.values(), ids=SOUND.keys())
def test_other_joins_are_sound(tmp_path: Path, edges: list[str]) -> None:
    found = problems(tmp_path, edges)
    assert not [problem for problem in found if "neither would go on" in problem]


def test_messages_have_no_window(tmp_path: Path) -> None:
    edges = ["hear think text full", "think plan tokens full", "plan speak tokens full"]
    edges.append("think speak hidden_states chunk")
    assert problems(tmp_path, edges, "{think->speak: inline}") == []


def test_two_edges_may_not_bring_a_stage_the_same_type(tmp_path: Path) -> None:
    edges = ["hear think text full", "think plan text full", "think speak text full"]
    edges.append("plan speak text chunk")
    assert problems(tmp_path, edges) == [
        "7: pipelines.p.edges[3].payload: speak could not tell the text of plan->speak from that "
        "of think->speak: only one edge may bring it text"
    ]


def test_two_edges_may_bring_a_stage_different_types(tmp_path: Path) -> None:
    edges = ["hear think text full", "think plan text full", "think speak text full"]
    edges.append("plan speak tokens full")
    assert problems(tmp_path, edges) == []
