"""Decide, then write, over a file: any number of rows, one model, one prefill a row.

Where things go:
- `rows.py`: an input line to a row, or to what is wrong with it.
- `results.py`: the row that answers it, the append-only file of them, what they add up to.
- `run.py`: many rows at once, in the input's order, from where the last call stopped; who
  decides is a function. `model.py`: a loaded model as that function.
"""

from __future__ import annotations

from lockstep.decide_rows.results import Totals
from lockstep.decide_rows.rows import Row, Rows
from lockstep.decide_rows.run import Decided, Run, Summary, check_output, decide_file

__all__ = ["Decided", "Row", "Rows", "Run", "Summary", "Totals", "check_output", "decide_file"]
