"""Which class serves which architecture, and the one way to load a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from lockstep.kernels.contract import Backend
from lockstep.model.base import DecoderModel
from lockstep.model.gemma3 import Gemma3ForCausalLM
from lockstep.model.llama import LlamaForCausalLM
from lockstep.model.loading import Progress, TensorSource, WeightLoader
from lockstep.model.mistral import MistralForCausalLM
from lockstep.model.qwen2 import Qwen2ForCausalLM
from lockstep.model.qwen3 import Qwen3ForCausalLM
from lockstep.types import ModelError

FAMILIES: dict[str, type[DecoderModel]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}


class ModelSource(TensorSource, Protocol):
    """A checkpoint as `load_model` reads it: tensors and their configuration."""

    @property
    def config(self) -> dict[str, Any]: ...


def architecture_of(config: Mapping[str, Any], name: str) -> str:
    """The supported architecture that a configuration names.

    Raises:
        ModelError: it names none, or one that is not supported.
    """
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(entry, str) for entry in named):
        raise ModelError(
            f"{name}: configuration key architectures must list names, is {named!r:.100}"
        )
    for architecture in named:
        if architecture in FAMILIES:
            return str(architecture)
    found = ", ".join(named) or "none"
    raise ModelError(
        f"{name}: architecture {found} is not supported; supported are {', '.join(FAMILIES)}"
    )


def load_model(
    checkpoint: ModelSource,
    backend: Backend,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    max_context: int = 0,
) -> DecoderModel:
    """Read a checkpoint's weights into the backend's layout and build its model.

    Args:
        dtype: of weights and activations; tensors are rounded to it once.
        progress: called with a stage's name and a fraction in [0, 1].
        max_context: positions that the rotation tables cover; 0 is the model's own limit.

    Raises:
        ModelError: unknown architecture, configuration key or tensor, wrong shape.
    """
    architecture = architecture_of(checkpoint.config, checkpoint.name)
    loader = WeightLoader(checkpoint, backend, dtype, progress)
    with torch.inference_mode():
        return FAMILIES[architecture](
            checkpoint.config,
            loader,
            source=checkpoint.name,
            architecture=architecture,
            max_context=max_context,
        )
