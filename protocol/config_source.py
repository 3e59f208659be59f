"""YAML read with positions: values, and the line that each of them stands on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml

from protocol.errors import ConfigError

Location = tuple[str | int, ...]
"""Where a value lies: the keys and list indexes that lead to it from the top."""

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000
_PLAIN_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file; its string form is what people are shown."""

    file: Path
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.field}: {self.reason}" if self.field else f"{place}: {self.reason}"


@dataclass(frozen=True)
class Source:
    """A parsed YAML file."""

    file: Path
    value: Any
    lines: dict[Location, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """Repeated keys and variables that are not set; the file cannot be used with any."""

    def problem(self, location: Location, reason: str) -> Problem:
        """`reason` at `location`, or at the nearest part around it that exists."""
        nearest = location
        while nearest and nearest not in self.lines:
            nearest = nearest[:-1]
        return Problem(self.file, self.lines.get(nearest, 1), _dotted(location), reason)

    def problems_of(
        self, error: pydantic.ValidationError, below: Location = (), known: tuple[str, ...] = ()
    ) -> list[Problem]:
        """What pydantic found in the part of the file at `below`.

        `known` are the names that a mistyped option may have meant.
        """
        return [
            self.problem((*below, *location), reason)
            for location, reason in reasons_of(error, known)
        ]


def reasons_of(
    error: pydantic.ValidationError, known: tuple[str, ...] = ()
) -> list[tuple[Location, str]]:
    """What pydantic found, in words that follow a field's name, and where below what it checked.

    `known` are the names that a mistyped option may have meant.
    """
    return [
        (tuple(part for part in detail["loc"] if part != "[key]"), _reason(detail, known))
        for detail in error.errors(include_url=False)
    ]


def read_source(path: Path, environment: Mapping[str, str]) -> Source:
    """Parse the YAML file `path`, replacing `${NAME}` values from `environment`.

    Raises ConfigError when it cannot be read or is not a YAML map.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    try:
        loader = yaml.SafeLoader(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_yaml_reason(error)}") from None
    try:
        node = loader.get_single_node()
        reader = _Reader(path, environment, loader)
        value = {} if node is None else reader.read(node, (), ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{path}:{line}: {_yaml_reason(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_yaml_reason(error)}") from None
    except RecursionError:
        line = loader.get_mark().line + 1
        raise ConfigError(f"{path}:{line}: is nested too deeply") from None
    finally:
        loader.dispose()
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:1: must be a map of sections (gateway, stages, pipelines)")
    return Source(path, value, reader.lines, tuple(reader.problems))


class _Reader:
    """Turns YAML nodes into values and notes their lines."""

    def __init__(self, file: Path, environment: Mapping[str, str], loader: yaml.SafeLoader) -> None:
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []
        self._file = file
        self._environment = environment
        self._loader = loader
        self._nodes = 0

    def read(self, node: yaml.Node, location: Location, ancestors: tuple[yaml.Node, ...]) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or node in ancestors:
            problem = "a part contains itself, or there are too many parts"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
            raise yaml.MarkedYAMLError(problem="unknown tag", problem_mark=node.start_mark)
        self.lines.setdefault(location, node.start_mark.line + 1)
        ancestors = (*ancestors, node)
        if isinstance(node, yaml.MappingNode):
            return self._read_map(node, location, ancestors)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.read(child, (*location, index), ancestors)
                for index, child in enumerate(node.value)
            ]
        value = self._loader.construct_object(node)
        return self._substitute(value, node, location)

    def _read_map(
        self, node: yaml.MappingNode, location: Location, ancestors: tuple[yaml.Node, ...]
    ) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            line = key_node.start_mark.line + 1
            if key_node.value in seen:
                reason = f"is given twice; first in line {seen[key_node.value]}"
                self._complain(line, (*location, key_node.value), reason)
            seen[key_node.value] = line
        self._loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(key_node.start_mark.line + 1, location, "a key must be plain text")
                continue
            # `on`, `1` and the like are names here, whatever YAML would make of them.
            key = key_node.value
            self.lines[(*location, key)] = key_node.start_mark.line + 1
            result[key] = self.read(value_node, (*location, key), ancestors)
        return result

    def _substitute(self, value: Any, node: yaml.Node, location: Location) -> Any:
        match = _VARIABLE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        if match[1] not in self._environment:
            line = node.start_mark.line + 1
            self._complain(line, location, f"environment variable {match[1]} is not set")
            return ""
        return self._environment[match[1]]

    def _complain(self, line: int, location: Location, reason: str) -> None:
        self.problems.append(Problem(self._file, line, _dotted(location), reason))


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _yaml_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        context = f"{error.context}: " if error.context else ""
        return f"is not valid YAML: {context}{error.problem}"
    return f"is not valid YAML: {str(error).splitlines()[0]}"


def _reason(detail: Any, known: tuple[str, ...]) -> str:
    """pydantic's words, made to follow a field name."""
    kind: str = detail["type"]
    if kind == "extra_forbidden":
        meant = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        return "unknown option" + (f"; did you mean {meant[0]}?" if meant else "")
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        return f"needs at least {detail['ctx']['min_length']}"
    if kind in ("model_type", "dict_type"):
        return "must be a map of options"
    if kind == "byte_size":
        return "must be a number of bytes, or one with a unit, such as 512MiB"
    message: str = detail["msg"].removeprefix("Value error, ")
    return re.sub(r"^Input should be", "must be", message)
