"""Every error code that the code can raise is explained in docs/errors.md, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "sessions", "gateway", "workers")
CODE = re.compile(r"[a-z]+(_[a-z]+)*")
ROW = re.compile(r"^\| `([a-z_]+)` \|", re.MULTILINE)


def codes(tree: ast.AST) -> Iterator[str]:
    """The texts that become a `code`: assigned, passed or defaulted under that name."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                yield from _texts(value)
            case ast.keyword(arg="code", value=value):
                yield from _texts(value)
            case ast.Call(func=ast.Name(id="ErrorInfo"), args=[first, *_]):
                yield from _texts(first)
            case ast.FunctionDef(args=arguments):
                names = [argument.arg for argument in arguments.args]
                for name, value in zip(reversed(names), reversed(arguments.defaults), strict=False):
                    if name == "code":
                        yield from _texts(value)


def _texts(value: ast.expr) -> Iterator[str]:
    for node in ast.walk(value):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and CODE.fullmatch(node.value)
        ):
            yield node.value


def documented() -> list[str]:
    """The codes that docs/errors.md explains."""
    return ROW.findall((ROOT / "docs" / "errors.md").read_text())


def raised() -> dict[str, Path]:
    """Each code with a file that raises it."""
    return {
        code: path.relative_to(ROOT)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for code in codes(ast.parse(path.read_text()))
    }


def test_every_code_is_explained() -> None:
    explained = documented()
    assert sorted(explained) == sorted(set(explained))
    found = raised()
    assert {code: path for code, path in found.items() if code not in explained} == {}
    assert set(explained) - found.keys() == set()


def test_codes_are_found_where_they_are_written() -> None:
    text = """
class Gone(Exception):
    code = "gone"
def get(name, code="default_code"): ...
raise Gone("x", code="chosen" if "a b" in x else "other")
ErrorInfo("made", kind, "words")
other = "not_a_code"
"""
    assert set(codes(ast.parse(text))) == {"gone", "default_code", "chosen", "other", "made"}
