"""Dependencies between the packages point one way, and the machines do no I/O.

The code is parsed, not imported, so an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "protocol": set(),
    "sessions": {"protocol"},
    "gateway": {"protocol", "sessions"},
    "workers": {"protocol", "sessions"},
    "antiphon": {"protocol", "sessions", "gateway", "workers"},
}
"""Which of our packages each of them may use, beside itself."""

ENGINE_LIBRARIES = {
    "ctranslate2",
    "diffusers",
    "draccus",
    "huggingface_hub",
    "lerobot",
    "llama_cpp",
    "onnxruntime",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "xllamacpp",
}
"""Heavy libraries of engines: in `workers/engines` only."""

EFFECTS = {
    "asyncio",
    "concurrent",
    "datetime",
    "http",
    "httpx",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "uuid",
    "zmq",
}
"""Modules that read a clock, make randomness, wait or talk to the outside."""

ADAPTERS = Path("sessions/adapters")
"""The only part of `sessions` that may have effects."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import in a file."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            yield node.lineno, node.module


def offences(package: str, forbidden: set[str], *, outside: Path | None = None) -> list[str]:
    """`FILE:LINE: MODULE` for each import of a forbidden top-level module."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in modules(package)
        if outside is None or not path.relative_to(ROOT).is_relative_to(outside)
        for line, module in imports(path)
        if module.partition(".")[0] in forbidden
    ]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_depend_one_way(package: str) -> None:
    assert modules(package), f"{package} is empty"
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[package] - {package} | {"tests"}
    assert offences(package, forbidden) == []


def test_the_client_needs_what_it_says_and_nothing_of_the_server() -> None:
    client = "clients/python/antiphon_client"
    declared = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text())["project"]
    needs = {re.split(r"\W", need)[0] for need in declared["dependencies"]}
    used = {
        module.partition(".")[0] for path in modules(client) for _, module in imports(path)
    } - sys.stdlib_module_names
    assert used == needs | {"antiphon_client"}


CLIENT_MACHINES = ["arrays", "control", "errors", "steps", "stream"]


@pytest.mark.parametrize("machine", CLIENT_MACHINES)
def test_the_machines_of_the_client_have_no_effects(machine: str) -> None:
    path = ROOT / f"clients/python/antiphon_client/{machine}.py"
    assert {module for _, module in imports(path)} & EFFECTS == set()


def test_session_machines_have_no_effects() -> None:
    assert offences("sessions", EFFECTS, outside=ADAPTERS) == []


@pytest.mark.parametrize("package", ["protocol", "sessions", "gateway", "antiphon"])
def test_engine_libraries_stay_out_of(package: str) -> None:
    assert offences(package, ENGINE_LIBRARIES) == []


def test_only_engines_in_workers_use_engine_libraries() -> None:
    assert offences("workers", ENGINE_LIBRARIES, outside=Path("workers/engines")) == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    assert offences(package, {"pickle", "marshal", "shelve", "dill", "cloudpickle"}) == []
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}"
        for path in modules(package)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"eval", "exec"}
    ]
    assert calls == []


def test_an_offence_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sessions").mkdir()
    source = "def late() -> None:\n    import torch.nn\n    from time import monotonic\n"
    (tmp_path / "sessions" / "machine.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert offences("sessions", ENGINE_LIBRARIES) == ["sessions/machine.py:2: torch.nn"]
    assert offences("sessions", EFFECTS) == ["sessions/machine.py:3: time"]
