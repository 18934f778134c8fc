"""The branches that a runner has loaded: their adapters, their heads, and where they act."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.branch import Branch, BranchError, read_branch
from lockstep.kernels.contract import LoraSet, LoraWeight
from lockstep.model import DecoderModel
from lockstep.model.adapters import BranchHead, pack_adapters, tensor_shapes
from lockstep.model.layers import Adapters, LinearName
from lockstep.runner.groups import tails_of
from lockstep.runner.lanes import BranchPlace
from lockstep.types import LayerGroup
from lockstep.weights.branch import read_tensors

_LINEARS: tuple[LinearName, ...] = ("qkv", "o", "gate_up", "down")


@dataclass(slots=True)
class _Loaded:
    """A branch on the device; `uses` is how often it was loaded."""

    weights: dict[tuple[int, LinearName], LoraWeight]
    head: BranchHead
    uses: int = 1

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        pairs = [pair for weight in self.weights.values() for pair in weight.pairs]
        own = [tensor for pair in pairs for tensor in (pair.a, pair.b)]
        return sum(tensor.nbytes for tensor in (*own, *self.head.tensors))


class BranchTable:
    """Loads and unloads branches of one model.

    Every branch has a slot, which is its place in the adapters of all linears; a slot is
    given again once its branch has gone.

    Attributes:
        places: where each branch acts, by its key; read by `BatchBuilder`.

    Args:
        groups: as `Executor.groups`.
    """

    def __init__(self, model: DecoderModel, groups: tuple[LayerGroup, ...]) -> None:
        self.places: dict[str, BranchPlace] = {}
        self._model = model
        self._groups = groups
        self._loaded: dict[str, _Loaded] = {}
        self._slots: list[str | None] = []
        self._sets: dict[tuple[int, LinearName], LoraSet] = {}

    def load(self, folder: str | Path, base: str) -> Branch:
        """See `plan.BranchHost.load_branch`; `base` is the hash of the model's weights."""
        branch = read_branch(folder)
        self._check(branch, folder, base)
        shapes = tensor_shapes(self._model, branch)
        tensors = read_tensors(folder, branch, shapes)
        if branch.key in self._loaded:
            self._loaded[branch.key].uses += 1
        else:
            try:
                self._take(branch, tensors)
            except torch.OutOfMemoryError as error:
                raise BranchError(f"{folder}: no room for it on the device: {error}") from None
        return replace(branch, weight_bytes=self._loaded[branch.key].nbytes)

    def _take(self, branch: Branch, tensors: dict[str, Tensor]) -> None:
        """Put a branch on the device; if that fails, all is as it was."""
        loaded = _Loaded(
            pack_adapters(self._model, branch, tensors), BranchHead(self._model, tensors)
        )
        slots = self._slots if None in self._slots else [*self._slots, None]
        slot = slots.index(None)
        slots = [*slots[:slot], branch.key, *slots[slot + 1 :]]
        self._sets = self._sets_with(
            slots, {**self._loaded, branch.key: loaded}, branch.fork, branch.exit
        )
        self._slots = slots
        self._loaded[branch.key] = loaded
        tail = (branch.fork, branch.exit) if branch.adapt == "context" else None
        self.places[branch.key] = BranchPlace(branch.fork, branch.exit, slot, tail)

    def unload(self, key: str) -> None:
        """See `plan.BranchHost.unload_branch`."""
        loaded = self._loaded[key]
        loaded.uses -= 1
        if loaded.uses:
            return
        place = self.places.pop(key)
        del self._loaded[key]
        self._slots[place.slot] = None
        self._sets = self._sets_with(self._slots, self._loaded, place.fork, place.exit)

    def _check(self, branch: Branch, folder: str | Path, base: str) -> None:
        if branch.base != base:
            raise BranchError(
                f"{folder}: trained on {branch.base_name or 'a model'} with weights "
                f"{branch.base or 'unknown'}; this model's are {base or 'unknown'}"
            )
        if branch.exit > self._model.num_layers:
            raise BranchError(
                f"{folder}: exit is {branch.exit}, the model has {self._model.num_layers} layers"
            )
        if branch.adapt == "context" and not tails_of(self._groups, branch.fork, branch.exit):
            raise BranchError(
                f"{folder}: adapt is context, which needs a tail of layers [{branch.fork}, "
                f"{branch.exit}) in the cache; tails are laid out at start: name this branch, or "
                "another context branch of these layers, with --branch when the server starts"
            )

    def _sets_with(
        self, slots: list[str | None], loaded: dict[str, _Loaded], begin: int, end: int
    ) -> dict[tuple[int, LinearName], LoraSet]:
        """The sets, those of layers [begin, end) made anew for these slots."""
        sets = dict(self._sets)
        for layer in range(begin, end):
            for linear in _LINEARS:
                weights = [
                    None if key is None else loaded[key].weights.get((layer, linear))
                    for key in slots
                ]
                if any(weight is not None for weight in weights):
                    sets[layer, linear] = self._model.backend.lora_set(weights)
                else:
                    sets.pop((layer, linear), None)
        return sets

    def adapters(self, index: Tensor) -> Adapters:
        """The adapters of rows whose slots are int32 [R]."""
        return Adapters(index, self._sets)

    def scores(self, key: str, hidden: Tensor) -> Tensor:
        """A branch's head over rows [R, D] that left at its exit: float32 [R, outputs]."""
        scores: Tensor = self._loaded[key].head(hidden)
        return scores

    def __len__(self) -> int:
        return len(self._loaded)
