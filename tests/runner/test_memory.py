"""The pool's layout: pages of any group lie inside their slab, and small pools shorten contexts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import CacheConfig, ConfigError
from lockstep.kernels import tree
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.groups import activations_of, cuts, executor_groups, own_groups, tails_of
from lockstep.runner.memory import page_elements, plan_pool
from lockstep.runner.plan import PageCopy, Plan
from lockstep.runner.runner import Runner, check_page
from lockstep.types import LayerGroup
from tests.model.branches import describe
from tests.model.tiny import build_oracle, probe_of, save

FULL = LayerGroup("full", "full", (0, 5), 2, 16)
SLIDING = LayerGroup("sliding", "sliding", (1, 2, 3, 4), 2, 16, window=32)

GROUPS = st.lists(
    st.builds(
        lambda layers, heads, size: LayerGroup("g", "full", tuple(range(layers)), heads, size * 16),
        st.integers(1, 60),
        st.integers(1, 16),
        st.integers(1, 16),
    ),
    min_size=1,
    max_size=4,
)


@given(GROUPS, st.sampled_from([1, 8, 16, 32]), st.integers(0, 10**6))
def test_pages_fill_their_slab_and_no_other(
    groups: list[LayerGroup], page_tokens: int, spare: int
) -> None:
    least = plan_pool(groups, page_tokens, 2**60).slab * len(groups)
    pool = plan_pool(groups, page_tokens, least + spare)
    assert pool.elements <= least + spare
    for group, stride, count in zip(groups, pool.strides, pool.pages_per_slab, strict=True):
        assert page_elements(group, page_tokens) <= stride
        assert stride * count == pool.slab
        assert stride % 64 == 0
        assert stride % group.head_dim == 0  # kernels on CUDA count in heads
    if len(groups) == 1:
        assert pool.slab <= page_elements(groups[0], page_tokens) + 64 * groups[0].head_dim


EXTRA = st.lists(
    st.one_of(
        st.builds(
            lambda layers, heads, size: LayerGroup(
                "tail:0-1", "branch", tuple(range(layers)), heads, size * 16
            ),
            st.integers(1, 60),
            st.integers(1, 16),
            st.integers(1, 16),
        ),
        st.builds(
            lambda size: LayerGroup("fork:1", "activations", (1,), 1, size * 8),
            st.integers(1, 600),
        ),
    ),
    max_size=3,
)


@given(GROUPS, EXTRA, st.sampled_from([1, 16, 32]), st.integers(0, 10**6))
def test_groups_of_branches_cost_the_model_nothing(
    groups: list[LayerGroup], extra: list[LayerGroup], page_tokens: int, spare: int
) -> None:
    """The model's pages lie as they lie without them, and as many, but for one slab's rest
    where an extra page is larger than the model's slab."""
    largest = max(page_elements(group, page_tokens) for group in [*groups, *extra])
    elements = 100 * largest * (len(groups) + len(extra)) + spare
    plain = plan_pool(groups, page_tokens, elements)
    pool = plan_pool([*groups, *extra], page_tokens, elements)
    own = len(groups)
    assert pool.strides[:own] == plain.strides
    wider = pool.slab // plain.slab
    assert pool.slab == wider * plain.slab
    assert pool.num_slabs == plain.num_slabs // wider
    assert wider == -(-largest // plain.slab)
    assert pool.tokens() <= plain.tokens()
    if wider == 1:
        assert pool.tokens() == plain.tokens()
        assert pool.longest_sequence(groups, 10**5, 16) == plain.longest_sequence(groups, 10**5, 16)
    for group, stride, count in zip(
        extra, pool.strides[own:], pool.pages_per_slab[own:], strict=True
    ):
        assert page_elements(group, page_tokens) <= stride
        assert stride * count == pool.slab
        assert stride % 64 == 0


SMALL = LayerGroup("full", "full", tuple(range(30)), 3, 64)
LARGE = LayerGroup("full", "full", tuple(range(36)), 8, 128)


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[list[LayerGroup], list[LayerGroup], int]:
    """A model's groups, the same cut at one or two stops, and tokens a page."""
    whole, page_tokens, hidden = draw(st.sampled_from([(SMALL, 16, 576), (LARGE, 64, 4096)]))
    layers = len(whole.layers)
    own = [whole]
    if draw(st.booleans()):  # every sixth is full, as in Gemma
        sliding = tuple(layer for layer in whole.layers if (layer + 1) % 6)
        own = [
            replace(whole, layers=whole.layers[5::6]),
            replace(whole, name="sliding", kind="sliding", layers=sliding, window=512),
        ]
    stops = draw(st.sets(st.integers(1, layers - 1), min_size=1, max_size=2))
    branches = [describe(fork=0, exit=stop) for stop in stops]
    return own, list(executor_groups(own, branches, hidden)), page_tokens


@given(cut_models(), st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_cuts_cost_the_pool_next_to_nothing(
    shape: tuple[list[LayerGroup], list[LayerGroup], int], times: int
) -> None:
    """At most half a percent of pools that hold 10,000 pages of the whole trunk, what stands
    empty in slabs and at the pool's end together; and slabs stay small beside it."""
    own, groups, page_tokens = shape
    elements = times * 5000 * sum(page_elements(group, page_tokens) for group in own)
    plain, pool = (plan_pool(some, page_tokens, elements) for some in (own, groups))
    assert pool.tokens() >= 0.995 * plain.tokens()
    assert plain.tokens() >= 0.97 * times * 5000 * page_tokens
    for group, stride in zip(own_groups(groups), pool.strides, strict=False):
        assert stride <= page_elements(group, page_tokens) / 0.99
        assert stride % group.head_dim == 0
    assert pool.num_slabs >= 150


@pytest.mark.parametrize("stop", range(2, 36, 2))
def test_a_small_pool_loses_little_by_an_even_stop(stop: int) -> None:
    elements = 1000 * page_elements(LARGE, 64)
    groups = executor_groups([LARGE], [describe(fork=0, exit=stop)], 4096)
    pool = plan_pool(groups, 64, elements)
    assert pool.tokens() >= 0.995 * plan_pool([LARGE], 64, elements).tokens()
    assert pool.num_slabs > 100


def test_tails_and_activations_of_real_shapes_fit_their_slabs() -> None:
    """SmolLM2, and Qwen3 8B with the forks that are measured: what a page wastes."""
    for own, hidden, page_tokens, fork, exit_ in (
        (SMALL, 576, 16, 26, 30),
        (LARGE, 4096, 64, 32, 36),
        (LARGE, 4096, 64, 20, 24),
    ):
        branch = describe(adapt="context", fork=fork, exit=exit_)
        groups = executor_groups([own], [branch], hidden)
        layers = len(own.layers)
        assert [group.name for group in groups] == [
            f"full:0-{fork}", f"full:{fork}-{layers}", f"tail:{fork}-{exit_}", f"rows:{fork}"
        ]  # fmt: skip
        elements = 10**10
        pool = plan_pool(groups, page_tokens, elements)
        assert pool.tokens() >= 0.999 * plan_pool([own], page_tokens, elements).tokens()
        for group, stride in zip(groups, pool.strides, strict=True):
            assert stride <= 1.25 * page_elements(group, page_tokens)


def test_a_tail_has_a_group_for_each_kind_of_attention() -> None:
    branches = [
        describe(adapt="context", fork=1, exit=4),
        describe(adapt="context", fork=1, exit=4, rank=8),
        describe(adapt="context", fork=0, exit=2),
        describe(adapt="suffix", fork=2, exit=5),
    ]
    groups = executor_groups([FULL, SLIDING], branches, 96)
    assert [(g.name, g.kind, g.layers, g.window) for g in groups] == [
        ("full:0-1", "full", (0,), None),
        ("sliding", "sliding", (1, 2, 3, 4), 32),
        ("full:5-6", "full", (5,), None),
        ("tail:0-2", "branch", (0,), None),
        ("tail:0-2:sliding", "branch", (1,), 32),
        ("tail:1-4:sliding", "branch", (1, 2, 3), 32),
        ("rows:1", "activations", (1,), None),
        ("rows:5", "activations", (5,), None),
    ]
    assert own_groups(groups) == groups[:3]
    assert tails_of(groups, 0, 2) == (3, 4)
    assert tails_of(groups, 1, 4) == (5,)
    assert tails_of(groups, 2, 5) == ()
    assert activations_of(groups, 1) == 6
    assert activations_of(groups, 0) is None
    assert executor_groups([FULL, SLIDING], reversed(branches), 96) == groups
    assert cuts([FULL, SLIDING], groups) == ((0, 1, {0: 0}), (1, 5, {1: 1}), (5, 6, {0: 2}))


def test_without_a_stop_a_models_groups_stay_as_they_are() -> None:
    ends = [describe(fork=2, exit=6), describe(adapt="context", fork=0, exit=2)]
    for branches in ([], ends):
        groups = executor_groups([FULL, SLIDING], branches, 96)
        assert own_groups(groups) == (FULL, SLIDING)
        assert cuts([FULL, SLIDING], groups) == ((0, 6, {0: 0, 1: 1}),)


def test_a_pool_that_holds_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        plan_pool([FULL, SLIDING], 16, 1000)


def test_one_sequence_fits_where_it_is_said_to() -> None:
    pool = plan_pool([FULL, SLIDING], 16, 120_000)
    longest = pool.longest_sequence([FULL, SLIDING], 10**6, 16)
    assert 16 < longest < 10**4
    assert pool.slabs_needed([FULL, SLIDING], longest, 16) <= pool.num_slabs
    assert pool.slabs_needed([FULL, SLIDING], longest + 1, 16) > pool.num_slabs


def test_a_small_pool_shortens_the_context(tmp_path: Path) -> None:
    checkpoint = save(build_oracle("llama"), tmp_path)
    small = probe_of(checkpoint, memory_bytes=200_000).runner
    assert 16 <= small.max_context < 512
    assert probe_of(checkpoint).runner.max_context == 512
    assert probe_of(checkpoint, max_context=100).runner.max_context == 100
    with pytest.raises(ConfigError, match="cache_bytes"):
        probe_of(checkpoint, memory_bytes=1000)


def test_a_copied_page_serves_as_its_source(tmp_path: Path) -> None:
    probe = probe_of(save(build_oracle("gemma3"), tmp_path))
    tokens = [(9 * i + 4) % 131 for i in range(40)]
    alone = probe.score(tokens)
    pages = probe.pages(len(tokens))
    probe.score(tokens[:35], pages=pages)
    copied = tuple(list(table) for table in pages)
    copies = []
    for group, fresh in enumerate(probe.pages(16)):
        copies.append(PageCopy(group, pages[group][2], fresh[0]))
        copied[group][2] = fresh[0]
    probe.runner.execute(Plan(1, (), tuple(copies)))
    probe.score([5] * 35, pages=pages)  # the source is overwritten, its copy is not
    probe.score(tokens[:32], pages=pages)
    found = [probe.step(probe.run(tokens[35:], 35, table))[0] for table in (copied, pages)]
    assert torch.equal(found[0], alone[35:])
    assert not torch.equal(found[1], alone[35:])


def test_info_says_what_was_built_and_the_fingerprint_what_moves_bits(tmp_path: Path) -> None:
    checkpoint = save(build_oracle("qwen3"), tmp_path)
    single = probe_of(checkpoint).runner.info()
    assert single.architecture == "Qwen3ForCausalLM"
    assert (single.dtype, single.device, single.backend) == ("float32", "cpu", "native")
    assert single.pool_tokens > single.max_context == 512
    assert single.weight_bytes >= 4 * (131 * 96 + 3 * 96 * 160 * 3)
    backend = make_backend("native", 2)
    again = Runner(load_model(checkpoint, backend, torch.float32), backend, memory_bytes=10**6)
    assert again.info().fingerprint == single.fingerprint
    assert probe_of(checkpoint, torch.bfloat16).runner.info().fingerprint != single.fingerprint


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_default_page_fits_every_head_size(kind: str) -> None:
    page_tokens = CacheConfig().resolved(kind).page_tokens
    for size in tree.BLOCK[kind]:
        check_page(page_tokens, [LayerGroup("g", "full", (0,), 1, size)], kind)
    wide = [LayerGroup("g", "full", (0,), 1, 256)]
    for kind_, bad in (("cpu", 64), ("cpu", 24), ("cuda", 48)):
        with pytest.raises(ConfigError, match=f"page_tokens .{bad}"):
            check_page(bad, wide, kind_)
