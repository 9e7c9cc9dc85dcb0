"""Book: which sequence is open on which rank, who gets the next one, and how a sequence goes on after its rank is lost.

A sequence waits (rank None) while its rank is lost and no other serves yet. It goes on elsewhere behind the tokens that
the front end has, computed anew: the same prompt, seed and token index give the same stream. A sequence that has lost
its rank twice may be what ends ranks, and is given up. No threads, no sockets, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from coterie.engine.messages import Add, Output

MOST_LOSSES = 1
"""Ranks that a sequence may lose and still go on."""
AFFINITY = 2
"""So many more sequences may a rank have that has seen a prompt's first page, and still get the next one like it."""
_REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class OpenSequence:
    """`tokens`: those that were handed to the front end. `heard`: it has had news, so its prompt is computed."""

    add: Add
    rank: int | None = None
    tokens: list[int] = field(default_factory=list)
    heard: bool = False
    losses: int = 0

    def resumed(self) -> Add:
        """The Add with which another rank goes on."""
        params = self.add.params
        if self.heard and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return msgspec.structs.replace(self.add, params=params, resumed=[*self.add.resumed, *self.tokens])


class Book:
    """`page_size` and `token_budget` are the engine's: prompts that share a page, tokens of a step."""

    def __init__(self, page_size: int, token_budget: int) -> None:
        self.open: dict[str, OpenSequence] = {}
        self._page_size, self._token_budget = page_size, token_budget
        self._seen: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def enter(self, add: Add) -> OpenSequence:
        """Note a new sequence; it waits."""
        sequence = self.open[add.request_id] = OpenSequence(add)
        return sequence

    def choose(self, sequence: OpenSequence, ranks: Sequence[int]) -> int:
        """Assign a waiting sequence to the least loaded of some ranks, or to one that knows its prompt."""
        loads = dict.fromkeys(ranks, 0.0)
        for other in self.open.values():
            if other.rank in loads:
                loads[other.rank] += 1.0 + (0 if other.heard else len(other.add.prompt_token_ids) / self._token_budget)
        rank = min(ranks, key=lambda number: (loads[number], number))
        prompt = sequence.add.prompt_token_ids
        if len(prompt) > self._page_size:
            page = tuple(prompt[: self._page_size])
            known = self._seen.get(page)
            if known in loads and loads[known] <= loads[rank] + AFFINITY:
                rank = known
            self._seen[page] = rank
            self._seen.move_to_end(page)
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        sequence.rank = rank
        return rank

    def note(self, output: Output) -> bool:
        """Take news in; False for those of a sequence that is not open."""
        sequence = self.open.get(output.request_id)
        if sequence is None:
            return False
        sequence.heard = True
        sequence.tokens += output.token_ids
        if output.finish_reason is not None:
            del self.open[output.request_id]
        return True

    def lose(self, rank: int) -> tuple[list[OpenSequence], list[OpenSequence]]:
        """A rank is lost. Returns its sequences that are given up, which are not open any more, and those that wait."""
        lost = [each for each in self.open.values() if each.rank == rank]
        for sequence in lost:
            sequence.rank = None
            sequence.losses += 1
            if sequence.losses > MOST_LOSSES:
                del self.open[sequence.add.request_id]
        given_up = [each for each in lost if each.losses > MOST_LOSSES]
        return given_up, [each for each in lost if each.losses <= MOST_LOSSES]

    @property
    def waiting(self) -> list[OpenSequence]:
        """Those without a rank, oldest first."""
        return [sequence for sequence in self.open.values() if sequence.rank is None]
