"""Weights: files to tensors, for models named by a path, a package or a hub id.

Where things go:
- `sources.py`: a name to a file or folder on this machine.
- `checkpoint.py`: `Checkpoint`, what every format offers, and `open_checkpoint`.
- `folder.py`: Hugging Face folders (config.json and safetensors).
- `gguf_file.py`: the GGUF container: header, metadata, tensor directory.
- `gguf_config.py`, `gguf_names.py`: an architecture's metadata and tensor names, as
  Hugging Face spells them.
- `gguf_checkpoint.py`: a GGUF file as a `Checkpoint`.
- `dequant.py`: quantised blocks to float32.

Importing this package imports no torch; only `Checkpoint.tensor` does. Nothing here
unpickles anything.
"""

from __future__ import annotations

from lockstep.weights.checkpoint import Checkpoint, open_checkpoint
from lockstep.weights.sources import PACKAGED_MODELS, PackagedModel

__all__ = ["PACKAGED_MODELS", "Checkpoint", "PackagedModel", "open_checkpoint"]
