"""Fail if any test was skipped that `tests/allowed_skips.txt` does not list with its reason.

Usage: check_skips.py FOLDER [LIST]. Reads the JUnit reports in FOLDER. A line of the list
is `MODULE::TEST  REASON`; `#` starts a comment.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ALLOWED = Path(__file__).parent.parent / "tests" / "allowed_skips.txt"


def allowed_skips(text: str) -> dict[str, str]:
    """Test id -> reason. Raises ValueError for a line without a reason."""
    allowed = {}
    for line in text.splitlines():
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        if len(words) == 1:
            raise ValueError(f"{words[0]} is allowed to be skipped without a reason")
        allowed[words[0]] = words[1].strip()
    return allowed


def skipped_tests(report: Path) -> list[tuple[str, str]]:
    """(test id, reason given) of each skipped test in a JUnit report."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            test = f"{case.get('classname')}::{case.get('name')}"
            found.append((test, skipped.get("message", "")))
    return found


def main(folder: Path, allowed_list: Path = ALLOWED) -> int:
    """0 if every skip is allowed, else 1."""
    reports = sorted(folder.glob("*.xml"))
    if not reports:
        print(f"no reports in {folder}", file=sys.stderr)
        return 1
    try:
        allowed = allowed_skips(allowed_list.read_text())
    except ValueError as error:
        print(f"{allowed_list}: {error}", file=sys.stderr)
        return 1
    refused = [
        (test, reason)
        for report in reports
        for test, reason in skipped_tests(report)
        if test.partition("[")[0] not in allowed and test not in allowed
    ]
    for test, reason in refused:
        print(f"skipped without leave: {test}: {reason}", file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
