"""`/v1/files` and `/v1/batches`: many requests in one file, answered in the background.

A file of requests is uploaded, a batch is made of it, its lines are sent one by one through
the server's own routes at low priority, and the answers become another file. All of it lives
in one directory and survives the death of the engine's process and of the server's.

Where things go:
- `objects.py`: the wire objects, ids, and what the index holds.
- `store.py`: the directory: files, journals, an index in SQLite, the lock.
- `upload.py`: multipart bodies, straight to disk.
- `lines.py`: an input file's lines, read and checked; result rows.
- `journal.py`: the append-only results of a batch under way.
- `checking.py`, `answering.py`, `results.py`: the three passes over a file.
- `inprocess.py`: a request to the application without a socket, and the engine at low priority.
- `attempts.py`: one line answered, with patience while the engine is away.
- `job.py`: the life of one batch. `runner.py`: all of them.
- `threads.py`: blocking work off the loop.
- `routes.py`: HTTP.
"""

from __future__ import annotations
