"""Model: layers and one file a family. A model knows rows and pages, never requests.

Where does my class go?
- `config.py`: checked reads of a Hugging Face configuration; `rope.py`: rotation tables.
- `loading.py`: checkpoint tensors to packed weights, by name, with every shape checked.
- `layers.py`: the modules that families share; `base.py`: what a family must offer.
- `llama.py`, `qwen3.py`, `gemma3.py`, ...: one family a file; `registry.py` names them all.

`docs/add-a-model.md` says how a family is added and which command proves it.
"""

from __future__ import annotations

from lockstep.model.base import DecoderModel, ForwardStep, Onward
from lockstep.model.registry import FAMILIES, load_model

__all__ = ["FAMILIES", "DecoderModel", "ForwardStep", "Onward", "load_model"]
