"""What a request changes in its logits before the draw, as flat index arrays over a chunk.

Everything here is assembled on the host for all rows of a chunk, so that the device
sees a handful of gathers and scatters whatever the number of rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.runner.bans import forbidden, without
from lockstep.runner.plan import SampleSpec
from lockstep.types import SamplingParams

_MASKED_ROWS = 32  # rows whose masks are spread out at a time
_MAX_COUNTS = 1024  # sequences whose counts are kept; a dropped one is counted again


class TokenCounts:
    """Distinct ids of one sequence and how often each was generated, kept as it grows.

    Args:
        history: the sequence's ids, the one list that grows; its identity tells this
            sequence from another one of the same number under another engine.
        with_prompt: also list the prompt's ids (with count 0), for repetition penalties.
    """

    def __init__(self, history: Sequence[int], with_prompt: bool) -> None:
        self.history = history
        self._with_prompt = with_prompt
        self._slots: dict[int, int] = {}
        self._ids: NDArray[np.int64] = np.empty(64, np.int64)
        self._counts: NDArray[np.float32] = np.empty(64, np.float32)
        self._seen = 0  # ids of the history that were counted

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._slots)]

    def update(self, prompt_len: int) -> None:
        """Count what the history gained since the last call."""
        history = self.history
        if self._seen == 0:
            self._seen = prompt_len
            if self._with_prompt:
                for token in dict.fromkeys(history[:prompt_len]):
                    self._add(token, 0)
        for index in range(self._seen, len(history)):
            self._add(history[index], 1)
        self._seen = len(history)

    def _add(self, token: int, count: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._slots[token] = slot
            self._ids[slot], self._counts[slot] = token, 0
        self._counts[slot] += count


def is_plain(spec: SampleSpec) -> bool:
    """Whether the row's logits go to the draw as they are."""
    params = spec.params
    return (
        params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
        and not params.logit_bias
        and not spec.bad_ids
        and (spec.position >= params.min_tokens or not spec.stop_ids)
        and spec.allowed is None
    )


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


class LogitAdjuster:
    """Applies penalties, biases and bans; remembers token counts between steps.

    Ids outside the vocabulary are the engine's to refuse; here they would name another
    row's logits, so they are left out.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: OrderedDict[int, TokenCounts] = OrderedDict()

    def apply(
        self, logits: Tensor, specs: Sequence[SampleSpec], sequences: Sequence[int]
    ) -> set[int]:
        """Change logits float32 [R, V] in place; row i belongs to `sequences[i]`.

        Returns:
            Rows whose grammar and bans leave no id; their logits are of no use.
        """
        flat = logits.view(-1)
        self._penalise(flat, specs, sequences)
        bias_at, bias = [], []
        banned: list[int] = []
        masks: dict[int, NDArray[np.int32]] = {}
        stuck = set()
        for row, spec in enumerate(specs):
            base = row * self._vocab_size
            for token, value in spec.params.logit_bias.items():
                if token < self._vocab_size:
                    bias_at.append(base + token)
                    bias.append(value)
            bans = [token for token in forbidden(spec) if token < self._vocab_size]
            if spec.allowed is None:
                banned += [base + token for token in bans]
                continue
            words = without(spec.allowed.words(), bans)
            if words.any():
                masks[row] = words
            else:
                stuck.add(row)
        if bias_at:
            at = torch.tensor(bias_at, device=flat.device)
            flat[at] = flat[at] + torch.tensor(bias, dtype=torch.float32, device=flat.device)
        if banned:
            flat.index_fill_(0, torch.tensor(banned, device=flat.device), float("-inf"))
        if masks:
            self._mask(logits, masks)
        return stuck

    def _mask(self, logits: Tensor, masks: dict[int, NDArray[np.int32]]) -> None:
        """Ids whose bit is not set become -inf; one copy to the device for all rows."""
        words = torch.from_numpy(np.stack(list(masks.values())))
        rows = torch.tensor(list(masks))
        if logits.device.type == "cuda":
            # From pageable memory the copy would wait for everything launched before it.
            words = words.pin_memory().to(logits.device, non_blocking=True)
            rows = rows.pin_memory().to(logits.device, non_blocking=True)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        for begin in range(0, len(masks), _MASKED_ROWS):
            at, part = rows[begin : begin + _MASKED_ROWS], words[begin : begin + _MASKED_ROWS]
            allowed = (part[:, :, None] >> bits).bitwise_and_(1).view(len(part), -1)
            kept = logits.index_select(0, at)
            kept.masked_fill_(allowed[:, : self._vocab_size] == 0, float("-inf"))
            logits.index_copy_(0, at, kept)

    def _penalise(
        self, flat: Tensor, specs: Sequence[SampleSpec], sequences: Sequence[int]
    ) -> None:
        where, factors, subtract = [], [], []
        for row, (spec, sequence) in enumerate(zip(specs, sequences, strict=True)):
            params = spec.params
            if not _penalised(params):
                continue
            counts = self._counts_of(spec, sequence)
            ids, times = counts.ids, counts.counts
            where.append(ids + row * self._vocab_size)
            factors.append(np.full(len(ids), params.repetition_penalty, np.float32))
            frequency = np.float32(params.frequency_penalty) * times
            presence = np.where(times > 0, np.float32(params.presence_penalty), np.float32(0))
            subtract.append(np.stack([frequency, presence]))
        if not where or not sum(map(len, where)):
            return
        at = torch.from_numpy(np.concatenate(where)).to(flat.device)
        factor = torch.from_numpy(np.concatenate(factors)).to(flat.device)
        less = torch.from_numpy(np.concatenate(subtract, axis=1)).to(flat.device)
        values = flat[at]
        values = torch.where(values > 0, values / factor, values * factor)
        flat[at] = values - less[0] - less[1]

    def _counts_of(self, spec: SampleSpec, sequence: int) -> TokenCounts:
        counts = self._counts.get(sequence)
        if counts is None or counts.history is not spec.history:
            counts = TokenCounts(spec.history, spec.params.repetition_penalty != 1.0)
            self._counts[sequence] = counts
            if len(self._counts) > _MAX_COUNTS:
                self._counts.popitem(last=False)
        self._counts.move_to_end(sequence)
        counts.update(spec.prompt_len)
        return counts
