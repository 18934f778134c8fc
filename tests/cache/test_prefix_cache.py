"""What can be reused, by whom, and what is given up first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lockstep.cache import Identity, Lease, Need, PrefixCache, StepJournal, Want
from lockstep.cache.groups import (
    KINDS,
    Activations,
    CacheGroup,
    FullAttention,
    SlidingWindow,
    make_groups,
)
from lockstep.cache.pool import PagePool
from lockstep.config import ConfigError
from lockstep.prefixes import common_prefix
from lockstep.types import LayerGroup
from tests.cache.toys import Recurrent

HERE = Identity("model")
SIZE = 4


def layers(kind: str, layer: int, window: int | None = None) -> LayerGroup:
    return LayerGroup(kind, kind, (layer,), 1, 8, window)  # type: ignore[arg-type]


def full(index: int = 0) -> FullAttention:
    return FullAttention(index, layers("full", index), SIZE)


def sliding(index: int, window: int) -> SlidingWindow:
    return SlidingWindow(index, layers("sliding", index, window), SIZE)


def make(*groups: CacheGroup, slabs: int = 200, keep: bool = True) -> PrefixCache:
    return PrefixCache(PagePool(slabs, (1,) * len(groups)), groups, SIZE, keep=keep)


def every(cache: PrefixCache) -> tuple[Want, ...]:
    return cache.layout.wants((0, len(cache.groups)))


def compute(
    cache: PrefixCache,
    tokens: Sequence[int],
    *,
    identity: Identity = HERE,
    wants: tuple[Want, ...] | None = None,
    chunk: int = 1,
    others: Sequence[Lease] = (),
) -> tuple[Lease, int]:
    """Run a sequence to the end of `tokens`; its lease and how much was a hit."""
    wants = every(cache) if wants is None else wants
    journal = StepJournal()
    match = cache.match(identity, tokens, len(tokens) - 1, Need(wants))
    lease, _ = cache.open(match, journal)
    hit = position = match.length
    while position < len(tokens):
        end = min(position + chunk, len(tokens))
        cache.trim(lease, position)
        assert cache.grow(lease, position, end)
        cache.publish(lease, tokens, end, journal, tail=True)
        if cache.pool.num_slabs < 1000:
            cache.check_integrity([lease, *others], journal)
        cache.commit(journal)
        journal = StepJournal()
        position = end
    return lease, hit


def use(cache: PrefixCache, tokens: Sequence[int], **more: object) -> int:
    """Run a sequence and let it go; how much was a hit."""
    lease, hit = compute(cache, tokens, **more)  # type: ignore[arg-type]
    cache.close(lease, tokens, len(tokens))
    if cache.pool.num_slabs < 1000:
        cache.check_integrity([])
    return hit


@pytest.mark.parametrize("groups", [(full(),), (full(), sliding(1, 6)), (sliding(0, 6),)])
@pytest.mark.parametrize("seed", range(5))
def test_hits_equal_brute_force_while_nothing_is_evicted(
    groups: tuple[CacheGroup, ...], seed: int
) -> None:
    chance = random.Random(seed)
    cache = make(*groups, slabs=5000)
    known: dict[Identity, list[list[int]]] = {HERE: [], Identity("model", "salt"): []}
    for _ in range(120):
        identity = chance.choice(list(known))
        base = chance.choice(known[identity]) if known[identity] and chance.random() < 0.7 else []
        tokens = base[: chance.randint(0, len(base))]
        tokens = tokens + [chance.randrange(3) for _ in range(chance.randint(1, 20))]
        best = max((common_prefix(other, tokens[:-1]) for other in known[identity]), default=0)
        assert use(cache, tokens, identity=identity, chunk=chance.choice((1, 3, 50))) == best
        known[identity].append(tokens)
    assert cache.stats.evictions == 0
    assert cache.stats.walked == cache.stats.matched > 0
    cache.flush()
    cache.check_integrity([])
    assert cache.pool.free_slabs == 5000
    assert not cache.tree.roots


def test_e07_a_window_model_reuses_prefixes_like_any_other() -> None:
    cache = make(full(), sliding(1, 6))
    system = list(range(40))
    assert [use(cache, [*system, 50 + i, 60]) for i in range(3)] == [0, 40, 40]


def test_e08_a_salt_never_meets_another() -> None:
    cache = make(full())
    prompt = list(range(20))
    assert use(cache, prompt, identity=Identity("m", "a")) == 0
    assert use(cache, prompt, identity=Identity("m", "a")) == 19
    assert use(cache, prompt, identity=Identity("m", "b")) == 0


def test_e05_a_state_in_the_unique_part_does_not_hide_the_shared_part() -> None:
    # Full attention with recurrent layers that keep a state every eighth position: prefixes
    # that end between two states are usable up to the state before.
    cache = make(full(), Recurrent(1, layers("recurrent", 1), SIZE))
    for shared, salt in ((19, "x"), (16, "y")):
        identity = Identity("m", salt)
        first = [*range(shared), *range(100, 113)]
        second = [*range(shared), *range(200, 213)]
        assert use(cache, first, identity=identity, chunk=5) == 0
        before = cache.stats.walked - cache.stats.matched
        assert use(cache, second, identity=identity, chunk=5) == 16
        # What the tree knew and a state was missing for is told from what nobody shared.
        assert cache.stats.walked - cache.stats.matched - before == shared - 16


def test_a_recurrent_sequence_holds_two_states_however_long_it_is() -> None:
    cache = make(Recurrent(0, layers("recurrent", 0), SIZE), slabs=2)
    assert cache.fits_alone(1000)
    lease, _ = compute(cache, list(range(200)), chunk=3)
    assert sum(page >= 0 for page in lease.tables[0]) <= 2
    cache.close(lease, list(range(200)), 200)
    cache.check_integrity([])


def test_a_branch_tail_adds_its_own_identity_and_shares_the_trunk() -> None:
    cache = make(full(0), full(1))
    tokens = list(range(18))
    trunk = (Want(0),)
    assert use(cache, tokens, wants=(*trunk, Want(1, "judge"))) == 0
    assert use(cache, tokens, wants=(*trunk, Want(1, "other"))) == 0
    assert use(cache, tokens, wants=(*trunk, Want(1, "judge"))) == 17
    assert use(cache, tokens, wants=trunk) == 17


def test_activations_are_kept_for_those_who_ask() -> None:
    cache = make(full(0), Activations(1, layers("activations", 1), SIZE))
    tokens = list(range(18))
    wants = (*every(cache), Want(1))
    assert every(cache) == (Want(0),)
    assert use(cache, tokens) == 0
    assert use(cache, tokens, wants=wants) == 0
    assert use(cache, tokens, wants=wants) == 17
    assert use(cache, tokens, wants=(Want(0),)) == 17


def test_a_lookup_is_for_a_layer_range() -> None:
    cache = make(full(0), sliding(1, 6))
    assert cache.layout.wants((0, 1)) == (Want(0),)
    assert cache.layout.wants((0, 2)) == (Want(0), Want(1))
    tokens = list(range(30))
    use(cache, tokens, wants=cache.layout.wants((0, 1)))
    assert cache.match(HERE, tokens, 29, Need(cache.layout.wants((0, 1)))).length == 29
    assert cache.match(HERE, tokens, 29, Need(cache.layout.wants((0, 2)))).length == 0


def test_an_inner_node_may_lose_its_window_and_keep_full_attention() -> None:
    cache = make(full(0), sliding(1, 6))
    tokens = list(range(32))
    use(cache, tokens)
    wants = every(cache)
    path = cache.match(HERE, tokens, 31, Need(wants)).nodes
    cache._disown(path[3], (1, ""))
    cache.check_integrity([])
    assert cache.match(HERE, tokens, 31, Need(wants[:1])).length == 31
    assert cache.match(HERE, tokens, 31, Need(wants)).length == 31  # its window lies behind
    # Within reach of the hole (positions 12 to 15) the window is incomplete.
    for limit, usable in ((22, 22), (21, 21), (20, 12), (16, 12), (13, 12), (12, 12)):
        assert cache.match(HERE, tokens, limit, Need(wants)).length == usable


def test_eviction_takes_the_leaf_of_the_oldest_first() -> None:
    cache = make(full(), slabs=10)
    old, new = list(range(16)), list(range(100, 116))
    use(cache, old)
    use(cache, new)
    lease, hit = compute(cache, list(range(200, 212)))  # 3 pages: 2 are free, 1 is taken
    assert hit == 0
    assert cache.stats.evictions == 1
    assert cache.match(HERE, old, 16, Need(every(cache))).length == 12
    assert cache.match(HERE, new, 16, Need(every(cache))).length == 16
    cache.close(lease)
    cache.check_integrity([])


def test_a_hit_makes_a_prefix_recent() -> None:
    cache = make(full(), slabs=10)
    old, new = list(range(16)), list(range(100, 116))
    use(cache, old)
    use(cache, new)
    use(cache, [*old, 1])
    use(cache, list(range(200, 208)))
    assert cache.match(HERE, old, 16, Need(every(cache))).length == 16
    assert cache.match(HERE, new, 16, Need(every(cache))).length < 16


def test_a_page_matched_in_part_is_copied_and_the_source_stays() -> None:
    cache = make(full(), sliding(1, 6))
    use(cache, list(range(10)))
    journal = StepJournal()
    match = cache.match(HERE, [*range(9), 77, 78], 10, Need(every(cache)))
    lease, copies = cache.open(match, journal)
    assert match.length == 9
    assert [copy.group for copy in copies] == [0, 1]
    for copy in copies:
        assert lease.tables[copy.group][2] == copy.target != copy.source
        assert cache.pool.refs[copy.group][copy.source] == 2  # pinned until the step is done
    cache.flush()
    cache.check_integrity([lease], journal)
    cache.commit(journal)
    cache.close(lease, [*range(9), 77, 78], 9)
    cache.check_integrity([])


def test_without_a_page_for_the_copy_the_match_falls_back_to_whole_pages() -> None:
    cache = make(full(), slabs=3)
    use(cache, list(range(10)))
    journal = StepJournal()
    match = cache.match(HERE, [*range(9), 77], 9, Need(every(cache)))
    assert match.length == 9
    lease, copies = cache.open(match, journal)
    assert (match.length, copies, lease.published) == (8, [], 2)
    cache.check_integrity([lease], journal)


def test_a_page_still_being_filled_is_shared_whole_but_not_copied() -> None:
    cache = make(full())
    journal = StepJournal()
    wants = every(cache)
    tokens = list(range(12))
    lease, _ = cache.open(cache.match(HERE, tokens, 11, Need(wants)), journal)
    assert cache.grow(lease, 0, 12)
    cache.publish(lease, tokens, 12, journal)
    match = cache.match(HERE, [*range(10), 77], 10, Need(wants))
    assert (match.length, match.soon) == (8, 10)
    cache.commit(journal)
    match = cache.match(HERE, [*range(10), 77], 10, Need(wants))
    assert (match.length, match.soon) == (10, 10)
    cache.close(lease)


def test_of_equal_prefixes_the_one_that_can_be_copied_now_is_taken() -> None:
    cache = make(full())
    wants = every(cache)
    use(cache, [1, 2, 9, 9])
    journal = StepJournal()
    tokens = [1, 2, 3, 3]
    lease, _ = cache.open(cache.match(HERE, tokens, 0, Need(wants)), journal)
    assert cache.grow(lease, 0, 4)
    cache.publish(lease, tokens, 4, journal)
    assert cache.match(HERE, [1, 2, 3, 0], 2, Need(wants)).length == 2
    cache.rollback(journal)
    cache.close(lease)
    cache.check_integrity([])


def test_a_failed_step_takes_back_what_it_registered() -> None:
    cache = make(full(), sliding(1, 6))
    use(cache, list(range(8)))
    journal = StepJournal()
    tokens = list(range(20))
    lease, _ = cache.open(cache.match(HERE, tokens, 19, Need(every(cache))), journal)
    assert cache.grow(lease, 8, 20)
    cache.publish(lease, tokens, 20, journal)
    cache.rollback(journal)
    cache.close(lease)
    cache.check_integrity([])
    assert cache.match(HERE, tokens, 20, Need(every(cache))).length == 8
    assert cache.pages_used == 0


def test_two_that_computed_the_same_page_end_with_one() -> None:
    cache = make(full())
    tokens = list(range(8))
    journal = StepJournal()
    pair = []
    for _ in range(2):
        lease, _ = cache.open(cache.match(HERE, tokens, 0, Need(every(cache))), journal)
        assert cache.grow(lease, 0, 8)
        cache.publish(lease, tokens, 8, journal)
        pair.append(lease)
    assert pair[0].tables != pair[1].tables
    cache.check_integrity(pair, journal)
    cache.commit(journal)
    assert pair[0].tables == pair[1].tables
    assert cache.pages_used == 2
    cache.check_integrity(pair)


def test_without_keeping_nothing_outlives_its_last_user() -> None:
    cache = make(full(), keep=False)
    tokens = list(range(12))
    lease, _ = compute(cache, tokens)
    other, hit = compute(cache, tokens, others=[lease])
    assert hit == 11
    cache.close(lease, tokens, 12)
    assert cache.pages_cached == 0
    cache.check_integrity([other])
    cache.close(other, tokens, 12)
    cache.check_integrity([])
    assert not cache.tree.roots


def test_a_pool_that_cannot_hold_it_is_left_as_it_was() -> None:
    cache = make(full(), slabs=4)
    use(cache, list(range(8)))
    lease, _ = cache.open(cache.match(Identity("x"), [1], 0, Need(every(cache))), StepJournal())
    assert not cache.grow(lease, 0, 17)
    assert cache.pages_cached == 2  # nothing was evicted in vain
    assert cache.grow(lease, 0, 16)
    cache.close(lease)


def test_capacity_counts_what_a_window_holds() -> None:
    cache = make(full(0), sliding(1, 6), slabs=10)
    assert cache.capacity(1000) == (10 - 3) * SIZE
    assert make(sliding(0, 6), slabs=3).capacity(1000) == 1000
    assert make(sliding(0, 6), slabs=2).capacity(1000) == 2 * SIZE


def test_an_unknown_kind_is_refused() -> None:
    assert set(KINDS) == {"full", "sliding", "branch", "activations"}
    with pytest.raises(ConfigError, match="no cache for kind 'recurrent'"):
        make_groups((layers("recurrent", 0),), SIZE)
    with pytest.raises(ConfigError, match="window"):
        make_groups((layers("sliding", 0, 0),), SIZE)
