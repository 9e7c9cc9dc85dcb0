"""PrefixCache: find cached pages that hold the beginning of a prompt. Names only; blocks are BlockPool's.

The key of page i is a hash of (key of page i - 1, kind, its tokens), so equal keys mean equal whole prefixes. Only full
pages have keys. `kind` is one byte for how the page was computed; pages of different kinds are never mixed.
256 bits: a collision cannot be looked for, let alone happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from coterie.cache.block_pool import BlockKey, BlockPool

ABSORBED = 0
_KEY_BYTES = 32


class PrefixCache:
    """Prefixes of one BlockPool. `root` separates caches whose content differs (another model, other weights)."""

    def __init__(self, pool: BlockPool, page_size: int, root: bytes = b"") -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.pool, self.page_size = pool, page_size
        self._root = BlockKey(blake2b(root + page_size.to_bytes(4, "little"), digest_size=_KEY_BYTES).digest())

    def page_key(self, parent: BlockKey | None, tokens: Sequence[int], kind: int = ABSORBED) -> BlockKey:
        """Key of the full page `tokens` that follows the page `parent` (None: the first page)."""
        digest = blake2b(self._root if parent is None else parent, digest_size=_KEY_BYTES)
        digest.update(kind.to_bytes(1, "little"))
        digest.update(np.asarray(tokens, np.int64).tobytes())
        return BlockKey(digest.digest())

    def extend_keys(self, keys: list[BlockKey], token_ids: Sequence[int], num_pages: int) -> None:
        """Append the keys that `keys` lacks until it covers the first `num_pages` pages of `token_ids`."""
        size = self.page_size
        while len(keys) < num_pages:
            start = len(keys) * size
            keys.append(self.page_key(keys[-1] if keys else None, token_ids[start : start + size]))

    def max_reusable_pages(self, num_tokens: int) -> int:
        """Pages of `num_tokens` tokens that may come from the cache: full ones, leaving one token to compute."""
        return max(num_tokens - 1, 0) // self.page_size

    def match(self, token_ids: Sequence[int], keys: list[BlockKey] | None = None) -> list[int]:
        """Blocks that hold the longest cached beginning of `token_ids`, never all of it. Owners are not added.

        `keys` is the sequence's list of page keys, extended as far as they were needed.
        """
        keys = [] if keys is None else keys
        blocks: list[int] = []
        for page in range(self.max_reusable_pages(len(token_ids))):
            self.extend_keys(keys, token_ids, page + 1)
            block = self.pool.lookup(keys[page])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> int:
        """Register computed pages under their keys; returns how many were new."""
        return sum(self.pool.register(block, key) for block, key in zip(block_ids, keys, strict=True))
