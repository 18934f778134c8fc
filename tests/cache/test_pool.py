"""The page pool: slabs change hands whole, nothing is handed out twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cache.pool import PagePool, PoolError


def test_pages_of_a_slab_belong_to_one_group() -> None:
    pool = PagePool(2, (2, 3))
    first = pool.allocate(0)
    other = pool.allocate(1)
    assert first // 2 != other // 3
    assert not pool.can_allocate((2, 0))
    assert pool.can_allocate((1, 2))
    pool.allocate(0)
    with pytest.raises(PoolError, match="no free page for group 0"):
        pool.allocate(0)


def test_an_empty_slab_can_go_to_another_group() -> None:
    pool = PagePool(1, (2, 4))
    pages = [pool.allocate(0), pool.allocate(0)]
    assert not pool.can_allocate((0, 1))
    for page in pages:
        pool.release(0, page)
    assert pool.can_allocate((0, 4))
    assert sorted(pool.allocate(1) for _ in range(4)) == [0, 1, 2, 3]


def test_double_release_and_retain_of_a_free_page_are_refused() -> None:
    pool = PagePool(1, (2,))
    page = pool.allocate(0)
    assert pool.retain(0, page) == 2
    assert pool.release(0, page) == 1
    assert pool.release(0, page) == 0
    with pytest.raises(PoolError, match="released twice"):
        pool.release(0, page)
    with pytest.raises(PoolError, match="cannot be retained"):
        pool.retain(0, page)


def test_the_check_sees_a_page_that_was_lost() -> None:
    pool = PagePool(2, (2,))
    page = pool.allocate(0)
    pool.check_integrity()
    pool.refs[0][page] = 0
    with pytest.raises(PoolError):
        pool.check_integrity()


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_conservation(num_slabs: int, pages_per_slab: list[int], seed: int) -> None:
    chance = random.Random(seed)
    pool = PagePool(num_slabs, pages_per_slab)
    held: list[tuple[int, int]] = []
    for _ in range(60):
        group = chance.randrange(len(pages_per_slab))
        needs = [int(g == group) for g in range(len(pages_per_slab))]
        if held and chance.random() < 0.45:
            place = chance.randrange(len(held))
            pool.release(*held.pop(place))
        elif pool.can_allocate(needs):
            page = (group, pool.allocate(group))
            assert page not in held
            held.append(page)
        else:
            with pytest.raises(PoolError):
                pool.allocate(group)
        pool.check_integrity()
    for page in held:
        pool.release(*page)
    assert pool.free_slabs == num_slabs


@given(st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_promised_pages_can_all_be_had(needs: list[int]) -> None:
    pool = PagePool(3, (2, 3))
    pool.allocate(0)
    promised = pool.can_allocate(needs)
    try:
        for group, need in enumerate(needs):
            for _ in range(need):
                pool.allocate(group)
        assert promised
    except PoolError:
        assert not promised
