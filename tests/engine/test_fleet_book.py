"""Who gets the next sequence, and how one goes on after its rank is lost; the sums of all ranks."""

from __future__ import annotations

from mock_engine import make_add

from coterie.engine.fleet_book import AFFINITY, Book
from coterie.engine.fleet_stats import Totals
from coterie.engine.messages import GroupStats, Output, Stats


def stats(running: int, tokens: int, usage: float) -> Stats:
    return Stats(running, 1, usage, 10, 2, 30, 20, 100, tokens, 7, {"experts": 0.5}, 100.0, 0.1)


def test_the_least_loaded_rank_is_next() -> None:
    book = Book(16, 100)
    ranks = [book.choose(book.enter(make_add(f"r{index}", [index])), [0, 1, 3]) for index in range(6)]
    assert ranks == [0, 1, 3, 0, 1, 3]
    book.note(Output("r1", [5], "stop"))
    assert book.choose(book.enter(make_add("next", [9])), [0, 1, 3]) == 1
    long = book.enter(make_add("long", list(range(15)) * 100))
    book.choose(long, [0])
    assert book.choose(book.enter(make_add("after", [1])), [0, 1]) == 1, "a long prompt counts for more"


def test_a_known_first_page_draws_a_few_more() -> None:
    book, page = Book(4, 1000), [1, 2, 3, 4, 5]
    first = book.choose(book.enter(make_add("a", page)), [0, 1])
    book.note(Output("a", [1]))
    for index in range(AFFINITY):
        sequence = book.enter(make_add(f"b{index}", [*page, index]))
        assert book.choose(sequence, [0, 1]) == first
        book.note(Output(f"b{index}", [1]))
    assert book.choose(book.enter(make_add("c", [9, 9, 9, 9, 9])), [0, 1]) == 1 - first
    assert book.choose(book.enter(make_add("lost", page)), [1 - first]) == 1 - first, "its rank may be gone"


def test_a_sequence_goes_on_behind_what_was_said_but_not_for_ever() -> None:
    book = Book(16, 100)
    sequence = book.enter(make_add("a", [1, 2], prompt_logprobs=1))
    book.choose(sequence, [0])
    assert sequence.resumed() == sequence.add
    book.note(Output("a", [7]))
    book.note(Output("a", [8, 9]))
    assert book.lose(1) == ([], [])
    assert book.lose(0) == ([], [sequence]) and book.waiting == [sequence]
    again = sequence.resumed()
    assert again.resumed == [7, 8, 9] and again.params.prompt_logprobs is None and again.prompt_token_ids == [1, 2]
    book.choose(sequence, [1])
    assert book.lose(1) == ([sequence], []) and not book.open
    assert not book.note(Output("a", [1])), "late news of it are nobody's"


def test_sums_of_ranks_never_fall() -> None:
    totals, group = Totals(), GroupStats(generation=1, living=2)
    both = totals.of([stats(1, 10, 0.2), stats(2, 30, 0.4)], group)
    assert (both.num_running, both.generation_tokens, both.steps, both.stage_seconds) == (3, 40, 14, {"experts": 1.0})
    assert abs(both.kv_usage - 0.3) < 1e-9 and both.prefill_rate == 200.0 and both.group == group
    totals.lose(stats(2, 30, 0.4))
    left = totals.of([stats(1, 10, 0.2)], group)
    assert (left.num_running, left.generation_tokens, left.num_free_blocks) == (1, 40, 10)
    totals.lose(None)
    totals.lose(stats(1, 10, 0.2))
    assert totals.of([], group).generation_tokens == 40
