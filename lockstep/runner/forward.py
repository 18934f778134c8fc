"""The forward pass of one step: rows through the lanes of every segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.kernels.contract import KVLayer
from lockstep.model import DecoderModel, ForwardStep
from lockstep.runner.batch import Lane, Segment, StepBatch, Stored
from lockstep.runner.branches import BranchTable
from lockstep.runner.groups import own_groups, tails
from lockstep.runner.lanes import Tail
from lockstep.runner.memory import PoolGeometry
from lockstep.types import LayerGroup


class ForwardPass:
    """One model over one pool.

    Args:
        groups: as `Executor.groups`. pool: flat, in the model's dtype; geometry: its layout.
    """

    def __init__(
        self,
        model: DecoderModel,
        groups: Sequence[LayerGroup],
        pool: Tensor,
        geometry: PoolGeometry,
        branches: BranchTable,
    ) -> None:
        self._model = model
        self._branches = branches
        self._page_tokens = geometry.page_tokens
        self._stored: dict[int, Tensor] = {}
        self._kv: dict[Tail | None, tuple[KVLayer, ...]] = {}
        views: dict[int, dict[int, KVLayer]] = {}
        for index, (group, stride) in enumerate(zip(groups, geometry.strides, strict=True)):
            if group.kind == "activations":
                size = (pool.numel() // stride, geometry.page_tokens, model.hidden_size)
                self._stored[index] = pool.as_strided(size, (stride, model.hidden_size, 1))
            else:
                views[index] = self._layer_views(group, stride, pool)
        trunk: dict[int, KVLayer] = {}
        for index in range(len(own_groups(groups))):
            trunk.update(views[index])
        for tail, members in ({None: ()} | tails(groups)).items():
            own = dict(trunk)
            for index in members:
                own.update(views[index])
            self._kv[tail] = tuple(own[layer] for layer in range(model.num_layers))

    def _layer_views(self, group: LayerGroup, stride: int, pool: Tensor) -> dict[int, KVLayer]:
        """Keys and values of each of an attention group's layers."""
        size = 2 * group.kv_heads * group.head_dim * self._page_tokens
        return {
            layer: self._model.backend.kv_layer(
                pool,
                page_stride=stride,
                offset=index * size,
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
                page_tokens=self._page_tokens,
            )
            for index, layer in enumerate(group.layers)
        }

    @property
    def kv(self) -> tuple[KVLayer, ...]:
        """Keys and values of the trunk, by layer."""
        return self._kv[None]

    def run(self, batch: StepBatch) -> Tensor | None:
        """Hidden rows [X, D] that need logits, as they leave their last layer, in the order
        in which they exit; None where no row does."""
        flow = [] if batch.ids is None else [self._model.embed(batch.ids)]
        exits = []
        for segment in batch.segments:
            flow = self._enter(segment, flow)
            for index, lane in enumerate(segment.lanes):
                flow[index] = left = self._through(segment, lane, flow[index])
                if lane.num_exits:
                    exits.append(left if lane.exits is None else left.index_select(0, lane.exits))
            if segment.keeps is not None:  # before any lane's layers may write to them
                self._write(segment.keeps, _joined(flow))
        if not exits:
            return None
        return exits[0] if len(exits) == 1 else torch.cat(exits)

    def _enter(self, segment: Segment, flow: list[Tensor]) -> list[Tensor]:
        """The rows of every lane, from the lanes of the segment before.

        What enters a fork is copied here for the branch's lane, before any lane's layers may
        write to it.
        """
        if segment.kept is not None:  # rows of this very step may be among them
            flow = [*flow, self._read(segment.kept)]
        gathers = any(lane.gather is not None for lane in segment.lanes)
        joined = _joined(flow) if gathers else None
        entered = []
        for lane in segment.lanes:
            if lane.whole is not None:
                entered.append(flow[lane.whole])
            else:
                assert joined is not None
                assert lane.gather is not None
                entered.append(joined.index_select(0, lane.gather))
        return entered

    def _through(self, segment: Segment, lane: Lane, hidden: Tensor) -> Tensor:
        """A lane's rows through the segment's layers; those that leave."""
        adapters = None if lane.adapters is None else self._branches.adapters(lane.adapters)
        step = ForwardStep(lane.positions, lane.attention, self._kv[lane.tail], None, adapters)
        whole = segment.end if lane.onward is None else segment.end - 1
        hidden = self._model.run_layers(hidden, segment.begin, whole, step)
        if lane.onward is not None:
            step = replace(step, onward=lane.onward)
            hidden = self._model.run_layers(hidden, whole, segment.end, step)
        return hidden

    def _read(self, stored: Stored) -> Tensor:
        page, token = stored.slots.long()
        return self._stored[stored.group][page, token]

    def _write(self, stored: Stored, hidden: Tensor) -> None:
        assert stored.rows is not None
        page, token = stored.slots.long()
        self._stored[stored.group][page, token] = hidden.index_select(0, stored.rows)


def _joined(flow: Sequence[Tensor]) -> Tensor:
    return flow[0] if len(flow) == 1 else torch.cat(list(flow))
