"""The table of field cases names tests that are there, and every case has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.field_cases import SHOWN

ROOT = Path(__file__).parents[2]
CASES = [*range(1, 12), *range(17, 21), *range(25, 34), *range(39, 42)]


def names_in(path: Path) -> set[str]:
    """The names of the test functions in a file."""
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, functions)}


def test_every_test_that_the_table_names_is_there() -> None:
    named = [name for names in SHOWN.values() for name in names]
    missing = [
        name
        for name in named
        if name.rpartition("::")[2] not in names_in(ROOT / name.partition("::")[0])
    ]
    assert missing == []


def test_every_case_has_a_test() -> None:
    here = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    numbers = {int(number) for number in re.findall(r"def test_f(\d+)_", here)}
    numbers |= {int(case.removeprefix("F")) for case in (*SHOWN,)}
    assert numbers == set(CASES)
