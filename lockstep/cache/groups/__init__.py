"""Kinds of cache component, one file each; `KINDS` maps a layer group's kind to its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.cache.groups.base import CacheGroup
from lockstep.cache.groups.branch import Activations, branch_tail
from lockstep.cache.groups.full import FullAttention
from lockstep.cache.groups.sliding import SlidingWindow
from lockstep.config import ConfigError
from lockstep.types import LayerGroup

KINDS: dict[str, Callable[[int, LayerGroup, int], CacheGroup]] = {
    "full": FullAttention,
    "sliding": SlidingWindow,
    "branch": branch_tail,
    "activations": Activations,
}


def make_groups(layers: Sequence[LayerGroup], page_tokens: int) -> tuple[CacheGroup, ...]:
    """The cache group of every layer group, in the model's order.

    Raises:
        ConfigError: a kind that has no component class.
    """
    groups = []
    for index, group in enumerate(layers):
        if group.kind not in KINDS:
            known = ", ".join(sorted(KINDS))
            raise ConfigError(f"group {group.name!r}: no cache for kind {group.kind!r} ({known})")
        groups.append(KINDS[group.kind](index, group, page_tokens))
    return tuple(groups)


__all__ = ["KINDS", "Activations", "CacheGroup", "FullAttention", "SlidingWindow", "make_groups"]
