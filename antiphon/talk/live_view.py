"""The call as it happens, drawn on a terminal's standard error."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from antiphon.talk.call import Call
from antiphon.talk.measures import measure
from antiphon.talk.speech import level_dbfs

METER_CELLS = 30
METER_FLOOR_DBFS = -60.0


class LiveView:
    """Shows a call while it runs, and nothing when standard error is no terminal."""

    def __init__(self) -> None:
        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
        self._shown = self._live.console.is_terminal

    def __enter__(self) -> LiveView:
        if self._shown:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._live.stop()

    def show(self, call: Call) -> None:
        """Draw the call as it stands."""
        if self._shown:
            self._live.update(draw(call), refresh=True)


def draw(call: Call) -> Table:
    """One picture of a call: state, level, transcript of both sides, figures so far."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("state", _state(call))
    grid.add_row("sending", _meter(level_dbfs(call.input_level)))
    for turn in call.dialogue.turns[-3:]:
        grid.add_row("you", Text(turn.transcript or "…", style="cyan"))
    for each in call.dialogue.replies[-3:]:
        grid.add_row("answer", Text(each.transcript or "…", style="green"))
    if (reply := call.answer) is not None:
        figures = measure(reply, call.track)
        shown = [
            f"{name} {value:.0f} ms"
            for name, value in (("TTFT", figures.ttft_ms), ("TTFP", figures.ttfp_ms))
            if value is not None
        ]
        shown.append(f"{reply.player.received / 24_000:.1f} s of audio")
        grid.add_row("figures", ", ".join(shown))
    return grid


def _state(call: Call) -> str:
    dialogue = call.dialogue
    if call.phase != "in conversation":
        return call.phase
    if dialogue.speaking:
        return "you are speaking"
    if dialogue.replies and dialogue.replies[-1].done_at is None:
        return "the answer is coming"
    return "waiting for the answer" if not dialogue.idle else "listening"


def _meter(level: float) -> Text:
    share = min(1.0, max(0.0, 1.0 - level / METER_FLOOR_DBFS))
    filled = round(share * METER_CELLS)
    meter = Text("█" * filled, style="yellow" if level > -6.0 else "blue")
    return meter.append("·" * (METER_CELLS - filled), style="dim")
