"""Logits to tokens and logprobs. Every step of it is a function of one row alone.

Order of operations on a row of float32 logits:

1. Raw logprobs, where asked for, are taken here: logit - log-sum-exp.
2. repetition_penalty over distinct ids of prompt and output: a positive logit is
   divided by it, any other multiplied.
3. frequency_penalty times the id's count in the output is subtracted; then
   presence_penalty, if the id is in the output.
4. logit_bias is added.
5. Forbidden ids become -inf: the last id of a bad word whose other ids end the
   history (prompt included), stop ids while fewer than min_tokens are out, and all that a
   grammar does not allow here. A row that keeps no id draws nothing: it is stuck.
6. temperature, top_k, top_p, min_p and the draw, as `Backend.sample` states them.
   Temperature 0 takes the largest logit, the lowest id among equals.
7. Processed logprobs, where asked for, describe the distribution that 6 draws from
   (at temperature 0: the one after 5). The drawn id always counts as kept.

Steps 2 to 5 are single correctly rounded operations on single elements, so they
cannot see which rows share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.contract import Backend, SampleBatch
from lockstep.runner.penalties import LogitAdjuster, is_plain
from lockstep.runner.plan import SampleSpec
from lockstep.types import SamplingParams, TokenLogprob

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Draw:
    """What was drawn for one row, with its logprobs when its request asked for them.

    `token` is None where no id was left to draw.
    """

    token: int | None
    logprob: TokenLogprob | None


class Sampler:
    """Draws tokens and reports logprobs for rows of logits.

    Holds token counts of sequences with penalties between steps; forgetting them
    costs time, never bits.
    """

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._adjuster = LogitAdjuster(vocab_size)

    def draw(
        self, logits: Tensor, specs: Sequence[SampleSpec], sequences: Sequence[int]
    ) -> list[Draw]:
        """One token a row of float32 logits [R, V], which it may overwrite.

        Args:
            specs: how to draw for each row. sequences: the sequence of each row.
        """
        reporting = [row for row, spec in enumerate(specs) if wants_logprob(spec.params)]
        raw_rows = [r for r in reporting if specs[r].params.logprobs_mode == "raw"]
        adjust = not all(map(is_plain, specs))
        raw = _select(logits, raw_rows, copy=adjust) if raw_rows else None
        stuck = self._adjuster.apply(logits, specs, sequences) if adjust else set()
        tokens = self._tokens(logits, specs)
        found: dict[int, TokenLogprob] = {}
        if raw is not None:
            wants = [specs[row].params for row in raw_rows]
            scores = self.score(raw, [tokens[row] for row in raw_rows], wants)
            found.update(zip(raw_rows, scores, strict=True))
        processed = [r for r in reporting if specs[r].params.logprobs_mode == "processed"]
        if processed:
            wants = [specs[row].params for row in processed]
            drawn = [tokens[row] for row in processed]
            scores = self.score_processed(_select(logits, processed, copy=True), drawn, wants)
            found.update(zip(processed, scores, strict=True))
        return [
            Draw(None, None) if row in stuck else Draw(token, found.get(row))
            for row, token in enumerate(tokens)
        ]

    def draw_ids(self, logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        """Ids int64 [R] on the device for plain rows without logprobs."""
        if all(spec.params.temperature == 0.0 for spec in specs):
            drawn = self._backend.argmax(logits)
        else:
            drawn = self._backend.sample(logits, sample_batch(specs, logits.device))
        # Logits that are not numbers may name no id; the runner reports such rows.
        return drawn.clamp(0, self._vocab_size - 1)

    def _tokens(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        ids: list[int] = self.draw_ids(logits, specs).tolist()
        return ids

    def score(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        wants: Sequence[SamplingParams | None],
        *,
        prompt: bool = False,
    ) -> list[TokenLogprob]:
        """Logprobs under the softmax of each row of logits [R, V].

        Args:
            tokens: the id that stands (or was drawn) at each row.
            wants: alternatives and given ids to report; None reports the id alone.
            prompt: take `prompt_logprobs` for the number of alternatives.
        """
        normaliser = self._backend.log_sum_exp(logits)
        at = torch.tensor(tokens, device=logits.device)[:, None]
        own = logits.gather(1, at)[:, 0]
        logprobs = (own - normaliser).tolist()
        tops = self._tops(logits, normaliser, [_alternatives(params, prompt) for params in wants])
        given = self._given(logits, normaliser, wants)
        ranks = self._ranks(logits, own, tokens, tops)
        return list(map(TokenLogprob, tokens, logprobs, ranks, tops, given))

    @staticmethod
    def _ranks(
        logits: Tensor,
        own: Tensor,
        tokens: Sequence[int],
        tops: Sequence[tuple[tuple[int, float], ...]],
    ) -> list[int]:
        """Each id's rank; counted over the vocabulary only where `tops` does not show it."""
        ranks = [
            next((place for place, (i, _) in enumerate(top, 1) if i == token), 0)
            for token, top in zip(tokens, tops, strict=True)
        ]
        unseen = [row for row, rank in enumerate(ranks) if rank == 0]
        if unseen:
            rows = _select(logits, unseen, copy=False)
            value = own[unseen][:, None]
            above, equal = (rows > value).sum(1).tolist(), (rows == value).sum(1).tolist()
            for place, row in enumerate(unseen):
                ranks[row] = above[place] + 1
                if equal[place] > 1:
                    ranks[row] += int((rows[place, : tokens[row]] == value[place]).sum())
        return ranks

    def score_processed(
        self,
        logits: Tensor,
        tokens: Sequence[int],
        wants: Sequence[SamplingParams],
        *,
        prompt: bool = False,
    ) -> list[TokenLogprob]:
        """As `score`, under the distribution that the draw was made from.

        Overwrites logits, which have penalties, biases and bans applied already.
        """
        for row, (token, params) in enumerate(zip(tokens, wants, strict=True)):
            if params.temperature > 0.0:
                truncate(logits[row], params, token)
        return self.score(logits, tokens, wants, prompt=prompt)

    def _tops(
        self, logits: Tensor, normaliser: Tensor, counts: Sequence[int]
    ) -> list[tuple[tuple[int, float], ...]]:
        """Most probable ids of each row, descending, equal ones by id."""
        most = min(max(counts, default=0), self._vocab_size)
        if most == 0:
            return [()] * len(counts)
        # One more than asked for shows whether ids tie across the cut.
        size = min(most + 1, self._vocab_size)
        values, ids = logits.topk(size, dim=1)
        shifted = (values - normaliser[:, None]).tolist()
        value_rows, id_rows = values.tolist(), ids.tolist()
        result: list[tuple[tuple[int, float], ...]] = []
        for row, count in enumerate(counts):
            count = min(count, most)
            if count == 0:
                result.append(())
                continue
            found = sorted(zip(value_rows[row], id_rows[row], shifted[row], strict=True), key=_rank)
            if count < size and found[count - 1][0] == found[count][0]:
                found = self._tied(logits[row], normaliser[row], found[count - 1][0])
            result.append(tuple((i, lp) for v, i, lp in found[:count] if v != -_INFINITY))
        return result

    @staticmethod
    def _tied(
        logits: Tensor, normaliser: Tensor, threshold: float
    ) -> list[tuple[float, int, float]]:
        """All ids whose logit is at least the threshold, in order of rank."""
        ids = (logits >= threshold).nonzero()[:, 0]
        values = logits[ids]
        shifted = (values - normaliser).tolist()
        return sorted(zip(values.tolist(), ids.tolist(), shifted, strict=True), key=_rank)

    def _given(
        self, logits: Tensor, normaliser: Tensor, wants: Sequence[SamplingParams | None]
    ) -> list[tuple[float, ...]]:
        """Exact logprobs of each request's own list of ids; -inf beyond the vocabulary."""
        result: list[tuple[float, ...]] = []
        for row, params in enumerate(wants):
            ids = () if params is None else params.logprob_token_ids
            if not ids:
                result.append(())
                continue
            inside = [i if i < self._vocab_size else 0 for i in ids]
            values = logits[row, torch.tensor(inside, device=logits.device)] - normaliser[row]
            pairs = zip(ids, values.tolist(), strict=True)
            result.append(tuple(v if i < self._vocab_size else -_INFINITY for i, v in pairs))
        return result


def _rank(entry: tuple[float, int, float]) -> tuple[float, int]:
    return -entry[0], entry[1]


def wants_logprob(params: SamplingParams) -> bool:
    """Whether generated positions carry logprobs."""
    return params.logprobs is not None or bool(params.logprob_token_ids)


def _alternatives(params: SamplingParams | None, prompt: bool) -> int:
    if params is None:
        return 0
    return (params.prompt_logprobs if prompt else params.logprobs) or 0


def _select(logits: Tensor, rows: Sequence[int], *, copy: bool) -> Tensor:
    """Those rows; the tensor itself when they are all of them and no copy is needed."""
    if not copy and len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def sample_batch(specs: Sequence[SampleSpec], device: torch.device) -> SampleBatch:
    """Sampling parameters of the rows, sent to the device in one copy."""
    rows = len(specs)
    host = np.zeros((8, rows), np.int32)
    seeds, floats = host.reshape(-1)[: 2 * rows].view(np.int64), host[2:5].view(np.float32)
    for row, spec in enumerate(specs):
        params = spec.params
        seeds[row] = spec.seed
        floats[0, row] = params.temperature
        floats[1, row] = params.top_p
        floats[2, row] = params.min_p
        host[5, row] = max(params.top_k, 0)
        host[6, row] = spec.choice
        host[7, row] = spec.position
    sent = torch.from_numpy(host)
    if device.type == "cuda":
        # From pageable memory the copy would wait for everything launched before it.
        sent = sent.pin_memory().to(device, non_blocking=True)
    return SampleBatch(
        temperature=sent[2].view(torch.float32),
        top_k=sent[5],
        top_p=sent[3].view(torch.float32),
        min_p=sent[4].view(torch.float32),
        seed=sent[:2].reshape(-1).view(torch.int64),
        choice=sent[6],
        position=sent[7],
        cuts_by_count=any(spec.params.top_k > 0 for spec in specs),
        cuts_by_mass=any(spec.params.top_p < 1.0 for spec in specs),
    )


def truncate(row: Tensor, params: SamplingParams, token: int) -> None:
    """Turn one row of logits [V] into those of the truncated distribution, in place.

    Mirrors `Backend.sample`: divide by the temperature, keep the top_k largest, of these
    the shortest prefix that reaches top_p, of these those with at least min_p times the
    largest probability; all else becomes -inf. `token`, which was drawn, is kept even
    where rounding puts it on the border.
    """
    values = row.cpu().numpy().astype(np.float64)
    scaled = (values - values.max()) / params.temperature
    ids = np.arange(len(scaled))
    if 0 < params.top_k < len(scaled):
        cut = len(scaled) - params.top_k
        ids = np.flatnonzero(scaled >= np.partition(scaled, cut)[cut])
        ids = ids[np.argsort(-scaled[ids], kind="stable")][: params.top_k]
    weights = np.exp(scaled[ids])
    probabilities = weights / weights.sum()
    if params.top_p < 1.0:
        # Ids below this probability weigh less than 1 - top_p together: none is needed.
        likely = np.flatnonzero(probabilities >= (1.0 - params.top_p) / len(ids))
        likely = likely[np.argsort(-probabilities[likely], kind="stable")]
        reached = np.searchsorted(np.cumsum(probabilities[likely]), params.top_p)
        likely = likely[: int(reached) + 1]
        ids, probabilities = ids[likely], probabilities[likely]
    ids = ids[probabilities >= params.min_p * probabilities.max(initial=0.0)]
    kept = np.full(len(values), -np.inf, np.float32)
    ids = np.append(ids, token)
    kept[ids] = scaled[ids]
    row.copy_(torch.from_numpy(kept))
