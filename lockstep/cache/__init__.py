"""The paged cache: who holds which page, and which prefixes can be reused.

Where does my code go?

- `pool.py`: slabs, pages and reference counts. Knows nothing of tokens.
- `tree.py`: the prefix tree over token ids. Knows nothing of pages.
- `groups/`: one file a kind of component (full attention, sliding window, branches' own, ...):
  where it can be reused, which pages a run writes, which it no longer reads.
- `cache.py`: `PrefixCache` joins the three: match, open, grow, publish, trim, close and
  eviction. The scheduler talks to this file only.
- `layout.py`: which groups hold which layers, and what is needed to go through these.
- `lookup.py`: how much of a prefix serves a sequence's need; reads only.
- `lease.py`: the records that pass between the two: `Need`, `Match`, `Lease`, `StepJournal`.
- `integrity.py`: the proof that every reference has exactly one known holder.

A new kind of layer is one class in `groups/` and one line in its table.
"""

from lockstep.cache.cache import CacheStats, PrefixCache
from lockstep.cache.lease import Lease, Match, Need, StepJournal, Want
from lockstep.cache.tree import Identity

__all__ = ["CacheStats", "Identity", "Lease", "Match", "Need", "PrefixCache", "StepJournal", "Want"]
