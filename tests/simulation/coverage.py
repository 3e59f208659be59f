"""`python -m tests.simulation.coverage`: how much of the machines the simulation reaches.

Runs the worlds that put every invariant to the test, and nothing else: neither the walk nor
the sweeps, nor any unit test. Statements and branches count alike. Exits with 1 when a group is
below its bar, and with 2 when the simulation itself has failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation.many import EVENTS

ROOT = Path(__file__).parents[2]
DATA = ROOT / "build/simulation-coverage"


@dataclass(frozen=True)
class Group:
    """Files that have to be reached to `bar` percent, taken together."""

    name: str
    bar: float
    patterns: tuple[str, ...]

    def files(self) -> list[str]:
        """Its files, as the report names them."""
        found = (path for pattern in self.patterns for path in sorted(ROOT.glob(pattern)))
        return [path.relative_to(ROOT).as_posix() for path in found]


GROUPS = (
    Group("sessions", 95.0, ("sessions/**/*.py",)),
    Group("orchestrator core", 85.0, ("sessions/orchestrator.py",)),
    Group("link", 85.0, ("protocol/link.py", "protocol/link_state.py", "protocol/stream.py")),
    Group(
        "worker core",
        85.0,
        tuple(
            f"workers/{name}.py"
            for name in (
                "control",
                "session_control",
                "turn_control",
                "step_order",
                "input_order",
                "retention",
                "rooms",
            )
        ),
    ),
)


@dataclass
class Reach:
    """How many statements and branches there are, and how many of them were reached."""

    statements: int = 0
    statements_reached: int = 0
    branches: int = 0
    branches_reached: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        """Count a file."""
        self.statements += summary["num_statements"]
        self.statements_reached += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_reached += summary["covered_branches"]

    @property
    def percent(self) -> float:
        """Statements and branches that were reached."""
        there = self.statements + self.branches
        return 100 * (self.statements_reached + self.branches_reached) / there if there else 100.0

    def line(self, name: str) -> str:
        """For people."""
        return (
            f"{self.percent:6.1f} %  {self.statements_reached:5}/{self.statements:<5} statements"
            f"  {self.branches_reached:5}/{self.branches:<5} branches  {name}"
        )


def measured(events: int) -> dict[str, Any]:
    """What a run of so many events reaches, by file. Raises SystemExit where the run fails."""
    DATA.mkdir(parents=True, exist_ok=True)
    for old in DATA.iterdir():
        old.unlink()
    report = DATA / "report.json"
    command = [sys.executable, "-m", "coverage"]
    files = ",".join(name for group in GROUPS for name in group.files())
    world = ["-m", "tests.simulation", "--events", str(events)]
    # By package and not by file: what is never imported is to be seen as well.
    packages = ",".join(sorted({Path(name).parts[0] for group in GROUPS for name in group.files()}))
    for step in (
        ["run", "--source", packages, *world],
        ["combine", "--quiet"],
        ["json", "--quiet", "--include", files, "-o", str(report)],
    ):
        if subprocess.run([*command, *step], cwd=ROOT, check=False).returncode:
            print(f"coverage: {step[0]} has failed")
            raise SystemExit(2)
    found: dict[str, Any] = json.loads(report.read_text())["files"]
    return found


def lines(files: dict[str, Any]) -> Iterable[str]:
    """A table for people: groups, their files, and what was missed of those below the bar."""
    for group in GROUPS:
        yield _whole(group, files).line(f"{group.name}, at least {group.bar:g} %")
        for name in group.files():
            reach = Reach()
            reach.add(files[name]["summary"])
            yield "  " + reach.line(name)
            if reach.percent < group.bar:
                yield from _missed(files[name])


def _whole(group: Group, files: dict[str, Any]) -> Reach:
    reach = Reach()
    for name in group.files():
        reach.add(files[name]["summary"])
    return reach


def _missed(file: dict[str, Any]) -> Iterable[str]:
    missed = file["missing_lines"]
    if missed:
        yield f"{'':20}lines {', '.join(map(str, missed))}"
    # A branch from or to a line that was missed says nothing new.
    branches = [(a, b) for a, b in file["missing_branches"] if not {a, abs(b)} & set(missed)]
    if branches:
        named = (f"{a} to {b if b > 0 else 'the end'}" for a, b in branches)
        yield f"{'':20}branches {', '.join(named)}"


def below(files: dict[str, Any]) -> list[str]:
    """The groups that are below their bars."""
    return [group.name for group in GROUPS if _whole(group, files).percent < group.bar]


def main() -> int:
    """Measure, print, and hold it against the bars; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.coverage", description=__doc__
    )
    parser.add_argument("--events", type=int, default=EVENTS, help="run worlds until so much")
    files = measured(parser.parse_args().events)
    print("\n".join(lines(files)))
    missed = below(files)
    for name in missed:
        print(f"below its bar: {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
