"""The prefix tree finds the longest common prefix, and only true ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.cache.tree import Identity, PrefixTree
from lockstep.prefixes import common_prefix

HERE = Identity("model")
texts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def insert(tree: PrefixTree, identity: Identity, tokens: list[int]) -> None:
    node = tree.root(identity)
    for begin in range(0, len(tokens), tree.page_tokens):
        node = tree.child(node, tuple(tokens[begin : begin + tree.page_tokens]))
        node.components[(0, "")] = 0


@given(st.lists(texts, max_size=12), texts, st.integers(1, 5))
def test_longest_prefix_equals_brute_force(
    known: list[list[int]], query: list[int], page_tokens: int
) -> None:
    tree = PrefixTree(page_tokens)
    for tokens in known:
        insert(tree, HERE, tokens)
    nodes, length = tree.walk(HERE, query, len(query))
    assert length == max((common_prefix(tokens, query) for tokens in known), default=0)
    path = [token for node in nodes for token in node.tokens]
    assert path[:length] == query[:length]


@given(st.lists(texts, min_size=1, max_size=12), st.integers(1, 5), st.randoms())
def test_pruning_leaves_nothing(known: list[list[int]], page_tokens: int, chance: object) -> None:
    tree = PrefixTree(page_tokens)
    for tokens in known:
        insert(tree, HERE, tokens)
    nodes = tree.nodes()
    chance.shuffle(nodes)  # type: ignore[attr-defined]
    for node in nodes:
        node.components.clear()
        tree.prune(node)
    assert not tree.roots
    assert tree.num_nodes == 0


def test_identities_do_not_meet() -> None:
    tree = PrefixTree(4)
    insert(tree, Identity("m", salt="a"), [1, 2, 3, 4])
    for stranger in (Identity("m", salt="b"), Identity("n", salt="a"), Identity("m", "a", "lora")):
        assert tree.walk(stranger, [1, 2, 3, 4], 4) == ([], 0)
    assert tree.walk(Identity("m", salt="a"), [1, 2, 3, 4], 4)[1] == 4


def test_equal_hashes_are_not_equal_tokens() -> None:
    # hash(-1) == hash(-2) in CPython: a tree that compared hashes would take one for the other.
    assert hash((-1, -1)) == hash((-2, -2))
    tree = PrefixTree(2)
    insert(tree, HERE, [-1, -1])
    assert tree.walk(HERE, [-2, -2], 2)[1] == 0
