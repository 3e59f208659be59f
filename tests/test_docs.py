"""What the docs point to is there, and what they show can be run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.commands import eval as eval_command
from antiphon.commands import talk
from antiphon.main import EPILOG
from protocol.config import read_config
from workers.check import check_stages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("", "gateway", "protocol", "sessions", "workers", "tests/simulation")
"""Where a file lies that a page names without its folder."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


def broken(page: Path) -> Iterator[str]:
    """What `page` points to and is not there."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            yield link
    for path in re.findall(r"`([\w./-]+\.(?:py|yaml|mjs|md))`", text):
        if not any((ROOT / folder / path).exists() for folder in FOLDERS):
            yield path


@pages
def test_what_a_page_points_to_is_there(page: Path) -> None:
    assert list(broken(page)) == []


@pages
def test_programs_that_a_page_runs_are_there(page: Path) -> None:
    for module in re.findall(r"python -m ([\w.]+)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_a_step_pipeline_as_it_is_shown_can_be_served(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "engines.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = tmp_path / "shown.yaml"
    config.write_text(shown)
    check_stages(read_config(config))


def test_the_options_of_talk_are_those_that_are_explained() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    talk.add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    explained = re.findall(r"^\| `(--[a-z-]+)", (ROOT / "docs" / "talk.md").read_text(), re.M)
    assert sorted(explained) == sorted(options)


def test_the_options_of_eval_robots_are_those_that_are_explained() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    eval_command.add_robots_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    page = (ROOT / "docs" / "evaluating-robots.md").read_text()
    table = re.findall(r"^\| (`--.*?) \|", page[page.index("## Options") :], re.MULTILINE)
    explained = re.findall(r"`(--[a-z-]+)", " ".join(table))
    assert sorted(explained) == sorted(options)


def test_the_environment_of_the_commands_is_explained() -> None:
    explained = set(re.findall(r"ANTIPHON_[A-Z_]+", (ROOT / "docs" / "operations.md").read_text()))
    assert set(re.findall(r"ANTIPHON_[A-Z_]+", EPILOG)) == explained
