"""Evidence about deployments: of Lockstep, and of any server that speaks OpenAI's HTTP.

Where things are: `endpoint` asks one deployment one question and never raises for what came
back; `rule` is what a comparison was fixed to beforehand, `compare` runs it; `noise` measures how
far one deployment differs from itself; `selftest` holds a model on this machine against the
determinism contract; `ledger` keeps what was found, failed runs too; `report` shows it;
`statistics` has the intervals that all of them state. Nothing here imports torch: local models
come in through `lockstep.LLM`.
"""
