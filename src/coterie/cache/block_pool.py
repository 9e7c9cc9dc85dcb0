"""BlockPool: which page of the cache belongs to whom. Ids and counts only; the bytes are `cache.streams`.

A block is in exactly one of three states:
  free       no owner, no content worth keeping
  cached     no owner, but its content is known by a key; taken back (least recently used first) when free ones run out
  referenced owned by `ref_count` sequences; may carry a key, so that others can share it
A key names at most one block: a second block with the same content stays without key and is simply freed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

BlockKey = NewType("BlockKey", bytes)


class BlockPool:
    """All blocks of one cache. Not thread-safe: the engine's loop owns it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_of_key: dict[BlockKey, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now: free ones and cached ones without owner."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without owner whose content is kept for reuse."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences own, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None (and take nothing) if there are not so many."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self.forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block; all must be cached or referenced."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                if block not in self._cached:
                    raise AssertionError(f"block {block} is free and cannot be shared")
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one owner from each block, the last first, so that the tail of a prefix is evicted before its head."""
        for block in reversed(block_ids):
            count = self._ref_counts[block]
            if count < 1:
                raise AssertionError(f"block {block} is freed twice")
            self._ref_counts[block] = count - 1
            if count > 1:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def lookup(self, key: BlockKey) -> int | None:
        """The block whose content `key` names, if there is one."""
        return self._block_of_key.get(key)

    def register(self, block_id: int, key: BlockKey) -> bool:
        """Name the content of an owned block; False if another block has that content already."""
        if self._ref_counts[block_id] < 1:
            raise AssertionError(f"block {block_id} has no owner and cannot be registered")
        if self._keys[block_id] == key:
            return True
        if key in self._block_of_key:
            return False
        self.forget(block_id)
        self._keys[block_id] = key
        self._block_of_key[key] = block_id
        return True

    def forget(self, block_id: int) -> None:
        """Drop the block's key: its content will not be found again. Its owners keep it."""
        key = self._keys[block_id]
        if key is None:
            return
        self._keys[block_id] = None
        del self._block_of_key[key]
        if block_id in self._cached:
            del self._cached[block_id]
            self._free.append(block_id)

    def check_integrity(self, owners: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError unless every block is in one state; with `owners`, also that the counts are theirs."""
        owned = {block for block, count in enumerate(self._ref_counts) if count}
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        sizes = (len(free), len(cached), len(owned))
        if sum(sizes) != self.num_blocks or len(free | cached | owned) != self.num_blocks:
            raise AssertionError(f"free, cached and owned blocks {sizes} do not add up to {self.num_blocks}")
        named = {block: key for block, key in enumerate(self._keys) if key is not None}
        if {key: block for block, key in named.items()} != self._block_of_key or len(named) != len(self._block_of_key):
            raise AssertionError("keys and blocks disagree")
        if not cached <= named.keys() or free & named.keys():
            raise AssertionError("a cached block has no key, or a free one has")
        if owners is not None:
            counts = Counter(block for blocks in owners for block in blocks)
            wrong = [block for block, count in enumerate(self._ref_counts) if counts[block] != count]
            if wrong:
                raise AssertionError(f"blocks {wrong[:8]} have owners that do not match their counts")
