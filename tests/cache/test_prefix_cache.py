"""PrefixCache: what counts as the same prefix, and how much of a prompt may come from the cache."""

from __future__ import annotations

import pytest

from coterie.cache.block_pool import BlockKey, BlockPool
from coterie.cache.prefix_cache import PrefixCache


def store(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Put the full pages of `tokens` into the cache, without owner; returns their blocks."""
    keys: list[BlockKey] = []
    cache.extend_keys(keys, tokens, len(tokens) // cache.page_size)
    blocks = cache.pool.allocate(len(keys)) or []
    cache.insert(keys, blocks)
    cache.pool.free(blocks)
    return blocks


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(BlockPool(16), page_size=4)


def test_only_full_pages_and_never_the_whole_prompt(cache: PrefixCache) -> None:
    tokens = list(range(12))
    blocks = store(cache, tokens)
    assert cache.match(tokens) == blocks[:2], "one token at least is computed"
    assert cache.match([*tokens, 99]) == blocks
    assert cache.match(tokens[:9]) == blocks[:2]
    assert cache.match(tokens[:8]) == blocks[:1]
    assert cache.match(tokens[:4]) == []
    assert cache.match(tokens[:1]) == [] and cache.match([]) == []


def test_a_page_is_found_only_behind_its_own_prefix(cache: PrefixCache) -> None:
    store(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match([5, 6, 7, 8, 0]) == []
    assert cache.match([9, 2, 3, 4, 5, 6, 7, 8, 0]) == []
    assert len(cache.match([1, 2, 3, 4, 5, 6, 7, 9, 0])) == 1


def test_a_gap_ends_the_match(cache: PrefixCache) -> None:
    tokens = list(range(13))
    blocks = store(cache, tokens)
    cache.pool.forget(blocks[1])
    assert cache.match(tokens) == blocks[:1]


def test_keys_separate_kind_boundary_and_root(cache: PrefixCache) -> None:
    other = PrefixCache(BlockPool(4), page_size=4, root=b"other weights")
    keys = {
        cache.page_key(None, [1, 2, 3, 4]),
        cache.page_key(None, [1, 2, 3, 4], kind=1),
        cache.page_key(None, [1, 2, 3, 5]),
        cache.page_key(None, [1, 2, 3 + (4 << 32), 0]),
        cache.page_key(cache.page_key(None, [1, 2, 3, 4]), [1, 2, 3, 4]),
        other.page_key(None, [1, 2, 3, 4]),
    }
    assert len(keys) == 6


def test_keys_are_extended_only_as_far_as_needed(cache: PrefixCache) -> None:
    store(cache, list(range(4)))
    keys: list[BlockKey] = []
    assert len(cache.match(list(range(40)), keys)) == 1
    assert len(keys) == 2
    before = list(keys)
    cache.extend_keys(keys, list(range(40)), 10)
    assert keys[:2] == before and len(keys) == 10


def test_inserting_the_same_pages_twice_keeps_the_first(cache: PrefixCache) -> None:
    tokens = list(range(9))
    first = store(cache, tokens)
    second = store(cache, tokens)
    assert not set(first) & set(second)
    assert cache.match(tokens) == first
    assert cache.pool.num_cached == 2
    cache.pool.check_integrity([])
