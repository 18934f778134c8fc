"""The prefix tree: which runs of tokens have been computed, one node a page of tokens.

A node covers up to `page_tokens` tokens and holds whatever components its groups
left there. Only a leaf may cover fewer tokens than a page. Children are found by
their token ids themselves (a dict compares them), so a hit is never false.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.prefixes import common_prefix

Tokens = tuple[int, ...]
Key = tuple[int, str]
"""Of a component in a node: (group index, the group's own identity; "" for the trunk)."""

LEFT_AT = "exit:"
"""Begins the own identity of rows that left the trunk before its end, followed by the layer at
which they did. Whoever asks for such a component takes the trunk's own as well."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal, beside the tokens, for the trunk's groups to share.

    A group with an identity of its own (a branch tail) adds it to its component's key.

    Attributes:
        model: version of the weights and of the tree; any change makes old pages invisible.
        salt: tenant; set by the server. adapter: LoRA name, "" for none.
        scope: "" shares with everybody of the same identity; a request's id confines
            sharing to the choices of that request (prefix caching off).
    """

    model: str
    salt: str = ""
    adapter: str = ""
    scope: str = ""


class Node:
    """A run of at most one page of tokens below its parent.

    Attributes:
        tokens: the run; empty for a root.
        components: key -> page id. The tree owns one reference to each.
        children: by their tokens; `order`: the same keys, sorted.
        pins: live leases that stand here; a pinned node stays although it holds nothing.
    """

    __slots__ = ("children", "components", "identity", "order", "parent", "pins", "tokens")

    def __init__(self, tokens: Tokens, parent: Node | None, identity: Identity) -> None:
        self.tokens = tokens
        self.parent = parent
        self.identity = identity
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] = []
        self.components: dict[Key, int] = {}
        self.pins = 0

    def page(self, key: Key) -> int | None:
        """The page that serves who asks for `key`, if there is one."""
        found = self.components.get(key)
        if found is None and key[1].startswith(LEFT_AT):
            return self.components.get((key[0], ""))
        return found


class PrefixTree:
    """Nodes by identity and tokens. Mutated by `root`, `child` and `prune` only."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.roots: dict[Identity, Node] = {}
        self.num_nodes = 0  # roots not counted

    def root(self, identity: Identity) -> Node:
        """The root of an identity, made when absent."""
        node = self.roots.get(identity)
        if node is None:
            node = self.roots[identity] = Node((), None, identity)
        return node

    def walk(self, identity: Identity, tokens: Sequence[int], limit: int) -> tuple[list[Node], int]:
        """Follow `tokens[:limit]` down the tree, whatever the nodes hold.

        Returns (nodes, length): nodes[i] covers page i and all are matched whole but
        perhaps the last, of which only the first length - i * page_tokens tokens are
        meant. The last node is the one with the longest common prefix.
        """
        node = self.roots.get(identity)
        path: list[Node] = []
        if node is None:
            return path, 0
        size = self.page_tokens
        position = 0
        while position + size <= limit:
            found = node.children.get(tuple(tokens[position : position + size]))
            if found is None:
                break
            node = found
            path.append(node)
            position += size
        rest = tuple(tokens[position : min(position + size, limit)])
        if rest and node.order:
            best, count = self.nearest(node, rest)
            if count:
                path.append(best)
                position += count
        return path, position

    def nearest(self, node: Node, rest: Tokens) -> tuple[Node, int]:
        """The child that shares the longest prefix with `rest`, and its length.

        In a sorted list the longest common prefix is at one of the two neighbours of
        the place where `rest` would stand.
        """
        place = bisect_left(node.order, rest)
        best, count = node.order[max(place - 1, 0)], -1
        for key in node.order[max(place - 1, 0) : place + 1]:
            shared = common_prefix(key, rest)
            if shared > count:
                best, count = key, shared
        return node.children[best], count

    def beginning_with(self, node: Node, begun: Tokens) -> Iterator[Node]:
        """Children of `node` whose tokens begin with `begun`, in order of their tokens."""
        for place in range(bisect_left(node.order, begun), len(node.order)):
            key = node.order[place]
            if key[: len(begun)] != begun:
                return
            yield node.children[key]

    def child(self, node: Node, tokens: Tokens) -> Node:
        """The child of `node` with exactly these tokens, made when absent."""
        found = node.children.get(tokens)
        if found is None:
            found = node.children[tokens] = Node(tokens, node, node.identity)
            insort(node.order, tokens)
            self.num_nodes += 1
        return found

    def prune(self, node: Node) -> None:
        """Remove the node if nothing keeps it, then its ancestors likewise."""
        while not (node.components or node.children or node.pins):
            parent = node.parent
            if parent is None:
                self.roots.pop(node.identity, None)
                return
            # Pruned before, by way of another component of the same node.
            if parent.children.get(node.tokens) is not node:
                return
            del parent.children[node.tokens]
            del parent.order[bisect_left(parent.order, node.tokens)]
            self.num_nodes -= 1
            node = parent

    def nodes(self) -> list[Node]:
        """Every node, roots included, parents first."""
        found = list(self.roots.values())
        for node in found:
            found.extend(node.children.values())
        return found
