from __future__ import annotations

from typing import Any

from workers.engines.ar.generation import Generation
from workers.engines.ar.stopping import ReplyCutter


def chunk(text: str, *tokens: tuple[int, bytes], finish: str | None = None) -> dict[str, Any]:
    """A chunk as llama.cpp streams it, with the tokens that it lists."""
    content = [{"id": id_, "bytes": list(data)} for id_, data in tokens]
    return {
        "choices": [
            {
                "text": text,
                "logprobs": {"content": content} if content else None,
                "finish_reason": finish,
            }
        ],
        "timings": {"prompt_n": 3, "cache_n": 7, "predicted_n": 2},
    }


def start(**rules: Any) -> tuple[Generation, list[str]]:
    said: list[str] = []
    return Generation(ReplyCutter(**rules), said.append), said


def test_tokens_are_remembered_until_one_was_withheld() -> None:
    generation, said = start()
    assert not generation.on_chunk(chunk(" A", (1, b" A")))
    # The character came from two tokens, of which only the second is listed.
    assert not generation.on_chunk(chunk("é", (3, b"\xa9")))
    assert not generation.on_chunk(chunk(" B", (4, b" B")))
    generation.finish()
    assert "".join(said) == "Aé B"
    assert [token.id for token in generation.tokens] == [1]
    assert (generation.prefill_tokens, generation.cached_tokens) == (3, 7)


def test_a_rule_stops_the_generation_at_once() -> None:
    generation, said = start(line_break_ends=True)
    assert not generation.on_chunk(chunk(" Yes.", (1, b" Yes.")))
    assert generation.on_chunk(chunk("\n", (2, b"\n")))
    generation.finish()
    assert said == ["Yes."]


def test_after_cancel_nothing_more_is_passed_on() -> None:
    generation, said = start()
    generation.on_chunk(chunk(" One", (1, b" One")))
    generation.cancel()
    assert generation.on_chunk(chunk(" two", (2, b" two")))
    generation.finish()
    assert said == ["One"]


def test_errors_of_the_library_and_nonsense_both_end_the_generation() -> None:
    answers: list[dict[str, Any]] = [
        {"error": {"message": "no such slot"}},
        {"choices": []},
        {"choices": [{}]},
    ]
    for wrong in answers:
        generation, said = start()
        assert generation.on_chunk(wrong)
        assert generation.error is not None
        assert said == []


def test_the_limit_is_reported() -> None:
    generation, _ = start()
    generation.on_chunk(chunk(" A", (1, b" A"), finish="length"))
    assert generation.finish_reason == "length"
