"""Stream input is applied once, in the order of its numbers, with every loss by number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.connectors import InlineDescriptor
from protocol.messages import Fence, Update
from protocol.payloads import text_payload
from workers.input_order import InputOrder


def piece(sequence: int, after_controls: int = 0) -> Update:
    payload = InlineDescriptor(text_payload("x" * sequence))
    return Update(Fence("s", 1, "g"), sequence, payload, after_controls)


def taken(order: InputOrder) -> list[int]:
    numbers = []
    while (update := order.take()) is not None:
        numbers.append(update.sequence)
    return numbers


def test_a_gap_holds_what_follows_until_it_is_filled() -> None:
    order = InputOrder()
    assert order.hold(piece(2))
    assert order.hold(piece(3))
    assert taken(order) == []
    assert order.held_bytes == 5
    assert order.hold(piece(1))
    assert taken(order) == [1, 2, 3]
    assert order.held_bytes == 0


def test_what_has_come_before_is_not_taken_again() -> None:
    order = InputOrder()
    assert order.hold(piece(1))
    assert not order.hold(piece(1))
    assert taken(order) == [1]
    assert not order.hold(piece(1))


def test_input_follows_the_commands_that_it_names() -> None:
    order = InputOrder()
    order.hold(piece(1, after_controls=2))
    order.controls = 1
    assert taken(order) == []
    order.controls = 2
    assert taken(order) == [1]


def test_a_gap_is_given_up_by_number() -> None:
    order = InputOrder()
    order.hold(piece(4))
    assert order.give_up(barrier=9) == (1, 3, None)
    assert taken(order) == [4]
    assert order.give_up(barrier=9) == (5, 9, None)


@given(st.lists(st.integers(1, 12), max_size=40))
def test_every_number_is_taken_at_most_once_and_in_order(numbers: list[int]) -> None:
    order = InputOrder()
    seen: list[int] = []
    for number in numbers:
        order.hold(piece(number))
        seen += taken(order)
    assert seen == list(range(1, len(seen) + 1))
    assert order.held_bytes == sum(update.sequence for update in order.clear())
