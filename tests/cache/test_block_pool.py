"""BlockPool: states of a block, order of eviction, and conservation under random use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.cache.block_pool import BlockKey, BlockPool


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little"))


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first is not None and len(set(first)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.usage == 0.75
    pool.free(first)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_an_unnamed_block_is_free_and_a_named_one_cached() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2) or []
    assert pool.register(blocks[0], key(1))
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert pool.lookup(key(1)) == blocks[0]
    pool.share([blocks[0]])
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check_integrity([[blocks[0]]])


def test_eviction_takes_the_least_recently_used_and_its_name() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3) or []
    for number, block in enumerate((a, b, c)):
        pool.register(block, key(number))
    pool.free([b])
    pool.free([a])
    pool.free([c])
    pool.share([b])  # used again: now the most recent
    pool.free([b])
    assert pool.allocate(2) == [a, c]
    assert pool.lookup(key(0)) is None and pool.lookup(key(2)) is None
    assert pool.lookup(key(1)) == b


def test_the_tail_of_a_freed_sequence_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for number, block in enumerate(blocks):
        pool.register(block, key(number))
    pool.free(blocks)
    assert pool.allocate(1) == [blocks[2]]
    assert pool.allocate(1) == [blocks[1]]


def test_a_second_block_with_the_same_content_stays_unnamed() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    assert pool.register(first, key(1))
    assert pool.register(first, key(1)), "naming again changes nothing"
    assert not pool.register(second, key(1))
    pool.free([second])
    assert pool.num_cached == 0
    pool.free([first])
    assert pool.num_cached == 1
    pool.check_integrity([])


def test_forgetting_hides_a_block_from_everyone() -> None:
    pool = BlockPool(2)
    cached, owned = pool.allocate(2) or []
    pool.register(cached, key(1))
    pool.register(owned, key(2))
    pool.free([cached])
    pool.forget(cached)
    pool.forget(owned)
    assert pool.lookup(key(1)) is None and pool.lookup(key(2)) is None
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.check_integrity([[owned]])


def test_our_mistakes_are_caught() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([block])
    with pytest.raises(AssertionError, match="no owner"):
        pool.register(block, key(1))
    (block,) = pool.allocate(1) or []
    with pytest.raises(AssertionError, match="do not match"):
        pool.check_integrity([])
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12))
def test_random_use_conserves_blocks(seed: int, num_blocks: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(num_blocks)
    owners: list[list[int]] = []
    content: dict[int, BlockKey] = {}
    for _ in range(150):
        action = chance.randrange(5)
        if action == 0:
            count = chance.randrange(4)
            free = pool.num_free
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > free)
            if blocks:
                assert not {b for owner in owners for b in owner} & set(blocks), "a block was given out twice"
                for block in blocks:
                    content.pop(block, None)
                owners.append(blocks)
        elif action == 1 and owners:
            pool.free(owners.pop(chance.randrange(len(owners))))
        elif action == 2 and owners:
            block = chance.choice(chance.choice(owners))
            name = key(chance.randrange(8))
            if pool.register(block, name):
                content[block] = name
        elif action == 3:
            name = key(chance.randrange(8))
            found = pool.lookup(name)
            if found is not None:
                assert content[found] == name, "a key leads to content that has been overwritten"
                pool.share([found])
                owners.append([found])
        elif action == 4 and content:
            block = chance.choice(list(content))
            pool.forget(block)
            del content[block]
        pool.check_integrity(owners)
    for blocks in owners:
        pool.free(blocks)
    assert pool.num_free == num_blocks
    pool.check_integrity([])
