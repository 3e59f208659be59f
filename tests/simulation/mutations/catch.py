"""Break a copy of the machines, and look whether the simulation sees it.

`python -m tests.simulation.mutations.catch [NAME...]` tells what catches which.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.mutations.faults_in_machines import MUTATIONS, Mutation

ROOT = Path(__file__).parents[3]
PACKAGES = ("gateway", "protocol", "sessions", "workers", "tests/simulation")
TIMEOUT_S = 100.0


@dataclass(frozen=True)
class Catch:
    """What became of one mutation. `by` is the failure that showed it, None for none."""

    mutation: Mutation
    by: str | None
    seconds: float


def mutated(mutation: Mutation, target: Path) -> None:
    """Write a copy of the machines and of the simulation to `target`, broken in one place.

    Raises ValueError when the text to be replaced does not occur exactly once.
    """
    for package in PACKAGES:
        only_code = shutil.ignore_patterns("__pycache__", "engines", "surfaces", "console")
        shutil.copytree(ROOT / package, target / package, ignore=only_code)
    (target / "tests/__init__.py").touch()
    path = target / mutation.file
    source = path.read_text()
    if (times := source.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: the text occurs {times} times in {mutation.file}")
    path.write_text(source.replace(mutation.old, mutation.new))


def catch(mutation: Mutation, *command: str) -> Catch:
    """Run the seeds, or another command, against the broken copy until one fails."""
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="antiphon-mutation-") as directory:
        mutated(mutation, Path(directory))
        seeds = ("tests.simulation", "--seeds", mutation.seeds, "--jobs", "1")
        try:
            done = subprocess.run(
                [sys.executable, "-m", *(command or seeds)],
                cwd=directory,
                env={"PYTHONPATH": directory},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Catch(mutation, None, time.perf_counter() - started_s)
    by = None
    if done.returncode != 0:
        failures = [
            line for line in done.stdout.splitlines() if line.startswith(("seed ", "walk: "))
        ]
        last = done.stdout.strip().splitlines()[-2:] or done.stderr.strip().splitlines()[-1:]
        by = (failures or last)[-1]
        if not failures:
            raise AssertionError(f"{mutation.name}: {done.stdout[-500:]}{done.stderr[-2000:]}")
    return Catch(mutation, by, time.perf_counter() - started_s)


def catch_all(names: list[str] | None = None) -> list[Catch]:
    """Try the mutations, two at a time."""
    wanted = [m for m in MUTATIONS if not names or m.name in names]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(catch, wanted))


def main() -> int:
    """Print what catches what; the exit status."""
    caught = catch_all(sys.argv[1:])
    for result in caught:
        print(f"{result.seconds:6.1f} s  {result.mutation.name}: {(result.by or 'NOT SEEN')[:160]}")
    return 0 if all(result.by for result in caught) else 1


if __name__ == "__main__":
    sys.exit(main())
