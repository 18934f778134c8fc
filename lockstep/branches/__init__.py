"""Branches: train them, calibrate them, measure them, and write their folders.

Where things go:
- `data.py`: rows of a JSON Lines file as examples; a bad row is named by its line.
- `activations.py`: the trunk's rows at the fork, from the engine's own runner, kept on disk.
- `layers.py`: trunk layers [fork, exit) in plain float32 torch, with adapters and a head.
- `train.py`: one run of training; the same seed gives the same bits.
- `calibrate.py`: temperature, thresholds for a stated aim, ECE, Brier, reliability.
- `package.py`: the folder that is served.
- `evaluate.py`: a served branch against held-out rows, a majority and the trunk's own head.
- `sweep.py`: quality against the layer at which the branch ends. `plots.py`: pictures.

Training needs no part of the engine but its runner; what is served is checked through the doors.
"""
