"""The robot's program runs where nothing of ours is installed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.evaluation.fleet import PROGRAM
from antiphon.evaluation.plan import Condition, Order
from tests.official_client.environment import openpi_python

MODULES = sorted(PROGRAM.glob("*.py"))
ALLOWED = {"numpy", "openpi_client", *(path.stem for path in MODULES)} | sys.stdlib_module_names


def imported(nodes: list[ast.stmt]) -> Iterator[str]:
    """The top-level modules that run-time code imports."""
    for node in nodes:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imported(node.orelse)
            case ast.Import():
                yield from (name.name.partition(".")[0] for name in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case _:
                for inner in ast.iter_child_nodes(node):
                    if isinstance(inner, ast.stmt):
                        yield from imported([inner])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_it_imports_numpy_the_official_client_and_itself(path: Path) -> None:
    assert set(imported(ast.parse(path.read_text()).body)) <= ALLOWED


SIMULATION = """
class Without: pass
class Still: tasks, rate_hz = ["a"], 0
class Idle: tasks, rate_hz = [], 10
class Broken:
    tasks, rate_hz = ["a"], 10
    def __init__(self, task, seed): raise RuntimeError("no\\nscreen")
class Blind:
    tasks, rate_hz, max_steps = ["a"], 10, 5
    def __init__(self, task, seed): pass
    def reset(self, seed): pass
"""


@pytest.mark.parametrize(
    ("simulation", "reason"),
    [
        ("nothing:World", "No module named 'nothing'"),
        ("worlds:Nothing", "has no attribute 'Nothing'"),
        ("worlds:Without", "worlds:Without is no simulation: "),
        ("worlds:Still", "a rate_hz above 0"),
        ("worlds:Idle", "it needs tasks"),
        ("worlds:Broken", "worlds:Broken cannot be played: RuntimeError: no screen"),
        ("worlds:Blind", "'Blind' object has no attribute 'observe'"),
        ("ruined:World", "ruined: SyntaxError"),
        (None, "is no recording"),
    ],
)
def test_what_is_no_simulation_is_refused_in_one_line(
    simulation: str | None, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "worlds.py").write_text(SIMULATION)
    (tmp_path / "ruined.py").write_bytes(b"\x00\x00\x00\x01class World")
    recorded = None if simulation else tmp_path / "ruined.py"
    order = Order("http://127.0.0.1:1", "arm", None, openpi_python(), simulation, recorded, None,
                  1, 0, 1.0, None, "hold", 200.0, 1.0, None)  # fmt: skip
    result = subprocess.run(
        [order.python, PROGRAM],
        input=json.dumps(order.robot(Condition(), 0)) + "\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, "")
    said = json.loads(result.stdout)
    assert said["event"] == "refused"
    assert reason in said["message"]
    assert "\n" not in said["message"]
