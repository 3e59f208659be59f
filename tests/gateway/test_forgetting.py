"""What ended sessions have left with workers is cleaned up, and counted until it is."""

from __future__ import annotations

from typing import Any

from gateway import forgetting
from gateway.forgetting import Forgetting
from gateway.lingering import Lingering
from gateway.placement import Placement, Replica
from protocol.errors import EngineLost
from protocol.messages import Answer, Close, Fence


class Link:
    """A link that is there or is not."""

    def __init__(self, ready: bool = True) -> None:
        self.ready = ready
        self.endpoint = "ipc:///tmp/worker"
        self.worker: str | None = "worker"
        self.crowded = False
        self.unacknowledged = 0
        self.sent: list[Any] = []

    def start_afresh(self) -> None:
        self.ready = False

    def send(self, command: Any) -> None:
        if not self.ready:
            raise EngineLost("the link is lost")
        self.sent.append(command)


def replica(placement: Placement, name: str, *, ready: bool) -> tuple[Replica, Link]:
    link = Link(ready)
    it = Replica(name, "world", link)
    placement.add(it)
    return it, link


def close(session: str) -> Close:
    return Close(Fence(session, 1, "gateway"), f"close-{session}", "lost", 3)


def test_what_nobody_could_be_told_is_told_to_the_next_worker() -> None:
    placement = Placement()
    it = Forgetting(placement)
    _, link = replica(placement, "world-0", ready=False)
    it.forget("world", close("a"), 0.0)
    it.forget("world", close("b"), 0.0)
    it.forget("other", close("a"), 0.0)
    assert link.sent == []
    link.ready = True
    it.ready("world", 1.0)
    assert link.sent == [close("a"), close("b")]
    it.ready("world", 2.0)
    assert len(link.sent) == 2
    for name in "ab":
        it.answered("world", Answer(name, f"close-{name}"))
    assert len(it) == 1


def test_what_a_worker_did_not_answer_is_told_to_another() -> None:
    placement = Placement()
    it = Forgetting(placement)
    first, link = replica(placement, "world-0", ready=True)
    it.forget("world", close("a"), 0.0)
    it.answered("world", Answer("a", "another command"))
    assert (link.sent, len(it)) == ([close("a")], 1)
    link.ready = False
    _, other = replica(placement, "world-1", ready=True)
    it.lost(first, 1.0)
    assert other.sent == [close("a")]
    it.answered("world", Answer("a", "close-a"))
    assert len(it) == 0


def test_of_too_many_the_oldest_are_left_to_their_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(forgetting, "REMEMBERED", 2)
    placement = Placement()
    it = Forgetting(placement)
    _, link = replica(placement, "world-0", ready=False)
    for name in "abc":
        it.forget("world", close(name), 0.0)
    assert len(it) == 2
    link.ready = True
    it.ready("world", 1.0)
    assert link.sent == [close("b"), close("c")]


def test_a_place_is_given_back_once_every_worker_has_answered_or_is_gone() -> None:
    back: list[str] = []
    it = Lingering()
    placement = Placement()
    first, _ = replica(placement, "world-0", ready=True)
    second, _ = replica(placement, "world-1", ready=True)
    it.release("now", {}, lambda: back.append("one"))
    assert back == ["one"]
    it.release("later", {"c1": first, "c2": second}, lambda: back.append("two"))
    it.answered(Answer("later", "c1"))
    it.answered(Answer("another", "c2"))
    assert (len(it), back) == (1, ["one"])
    it.lost(first)
    assert len(it) == 1
    it.lost(second)
    assert (len(it), back) == (0, ["one", "two"])
