"""Evidence about deployments: of Lockstep, and of any server that speaks OpenAI's HTTP.

Where does my class go?
- `probe.py`: what is asked and what it gave, as plain records. `endpoint.py`: asks a server, or a
  model in this process, and never raises for what came back; `reply.py` reads what did.
- `rule.py`: what a comparison was fixed to beforehand; `difference.py` and `scoring.py`: what
  counts; `compare.py` runs it, `verdict.py` judges.
- `noise.py`: how far one deployment differs from itself. `selftest.py`: the determinism contract
  on this machine, over the engines of `schedules.py`.
- `drift/`: has a deployment changed since a good day. `provider/`: is it the model of that name.
  `quality/`: is a changed model as good.
- `ledger.py`: the record of all runs; `canonical.py`: one text for one value, to hash;
  `environment.py`: what ran a check. `report.py`, `markdown.py`, `*_report.py`: for people.
- `statistics.py`: the intervals and tests that counts are stated with.

Importing any of it imports no torch; a local model comes in through `lockstep.LLM` or an engine.
"""
