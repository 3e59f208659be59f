"""The robot's program runs where nothing of ours is installed."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.evaluation.fleet import PROGRAM

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
