"""Runner: a `Plan` in, a `StepResult` out. It computes; it never decides.

Where does my class go?
- `plan.py`: the two records that cross between scheduler and device (no torch here).
- `batch.py`: a plan turned into tensors. `runner.py`: the forward pass over them.
- `sampler.py`: logits to tokens and logprobs. `memory.py`: how large the pool may be.
"""
