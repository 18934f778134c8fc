"""One run of training: adapters and head on fixed activations, AdamW, one order of everything.

The same seed, rows and recipe give the same bits, whatever the number of threads: a batch is cut
into parts of fixed size, each part is one thread's from its forward to its gradients, with torch
held to one thread, and gradients are added in the parts' order. Between kinds of processors or
versions of torch bits may differ, so both are in the training record.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.branch import MAX_RANK, TARGETS, Adapt, BranchError, HeadKind
from lockstep.branches.activations import Activations, Tokens
from lockstep.branches.data import Example
from lockstep.branches.layers import Batch, Layers

Progress = Callable[[int, int, str], None]

PART = 8  # examples a part
_KEYS_BATCH = 8  # contexts whose keys and values are computed together: their rows stay in cache
_WARM_UP = 0.06  # share of the steps over which the learning rate rises


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to train and how; everything but the data that its result depends on.

    Attributes:
        fork, exit, adapt, targets, rank, scale, head, options: see `Branch`. A scale that is a
            power of two is exact when it is served.
        epochs: times that every row is seen. batch: rows a step.
        learning_rate: highest of the adapters; it rises, then falls as a cosine to a tenth.
        head_rate: the same of the norm and the head. decay: of adapters and head (AdamW,
            Loshchilov & Hutter 2019).
        clip: largest length of a step's gradient.
        seed: of the first adapters and of the rows' order.
    """

    fork: int
    exit: int
    head: HeadKind
    options: tuple[str, ...]
    adapt: Adapt = "suffix"
    targets: tuple[str, ...] = TARGETS
    rank: int = 16
    scale: float = 2.0
    epochs: int = 4
    batch: int = 32
    learning_rate: float = 1e-3
    head_rate: float = 2e-3
    decay: float = 0.01
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch", 1), ("rank", 1)):
            if getattr(self, name) < low:
                raise BranchError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.rank > MAX_RANK:
            raise BranchError(f"rank must be at most {MAX_RANK}, got {self.rank}")
        for name in ("learning_rate", "head_rate", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise BranchError(f"{name} must be finite and above 0, got {value}")
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise BranchError(
                f"targets must be some of {', '.join(TARGETS)}, got {list(self.targets)}"
            )


@dataclass(frozen=True, slots=True)
class Trained:
    """The result: tensors by their names in the branch's file, and the loss of every epoch."""

    parameters: dict[str, Tensor]
    losses: tuple[float, ...]


@dataclass(slots=True)
class Prepared:
    """Examples ready to be trained on, in the trunk's own dtype.

    Attributes:
        rows, starts: hidden rows at the fork, of all examples; see `Activations`.
        keys_values: [context tokens, layers, 2, Hk, E], None where adapters act on the context.
        contexts: where each example's context begins in it.
    """

    examples: Sequence[Example]
    tokens: Sequence[Tokens]
    activations: Activations
    keys_values: Tensor | None
    contexts: tuple[int, ...]
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def length(self, index: int) -> int:
        """Positions of an example; parts are made of examples of like length."""
        return len(self.tokens[index].ids)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows that are trained through, padded; their contexts' keys and values."""
        chosen = [self.tokens[i] for i in indices]
        if self.keys_values is None:
            hidden = [self.activations.of(i).float() for i in indices]
            before = torch.zeros(len(indices), dtype=torch.int64)
            return Batch(_padded(hidden), before, torch.tensor([len(row) for row in hidden]))
        hidden = [
            self.activations.of(i)[len(tokens.context) :].float()
            for i, tokens in zip(indices, chosen, strict=True)
        ]
        before = torch.tensor([len(tokens.context) for tokens in chosen])
        stored = [
            self.keys_values[self.contexts[i] : self.contexts[i + 1]].float() for i in indices
        ]
        joined = _padded(stored).permute(2, 3, 0, 4, 1, 5)  # [layers, 2, B, Hk, T, E]
        past = tuple((layer[0], layer[1]) for layer in joined)
        return Batch(_padded(hidden), before, torch.tensor([len(row) for row in hidden]), past)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


@contextmanager
def workers(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads run torch on themselves alone; so does the caller meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(
            max(1, threads), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def prepare(
    layers: Layers,
    examples: Sequence[Example],
    tokens: Sequence[Tokens],
    activations: Activations,
    adapt: Adapt,
    pool: ThreadPoolExecutor,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Keys and values of contexts, which no adapter of a suffix branch touches, computed once.

    They are kept as the cache would keep them, in the model's dtype, on disk: rows of a few
    thousand contexts take a gigabyte.
    """
    contexts = [0]
    for one in tokens:
        contexts.append(contexts[-1] + len(one.context))
    if adapt == "context":
        return Prepared(examples, tokens, activations, None, tuple(contexts))
    folder = tempfile.TemporaryDirectory(prefix="lockstep-keys-")
    shape = layers.layers[0].shape
    sizes = (contexts[-1], len(layers.layers), 2, shape.kv_heads, shape.head_dim)
    stored = torch.from_file(
        str(Path(folder.name) / "keys.bin"),
        shared=True,
        size=math.prod(sizes),
        dtype=activations.rows.dtype,
    ).view(sizes)
    order = sorted(range(len(tokens)), key=lambda i: (len(tokens[i].context), i))

    def fill(indices: Sequence[int]) -> None:
        lengths = [len(tokens[i].context) for i in indices]
        parts = zip(indices, lengths, strict=True)
        hidden = _padded([activations.of(i)[:length].float() for i, length in parts])
        with torch.no_grad():
            found = layers.keys_values(hidden)
        for place, (keys, values) in enumerate(found):
            both = torch.stack([keys, values], dim=1).permute(0, 3, 1, 2, 4)  # [B, T, 2, Hk, E]
            for row, (i, length) in enumerate(zip(indices, lengths, strict=True)):
                stored[contexts[i] : contexts[i + 1], place].copy_(both[row, :length])

    chunks = _chunks(order, _KEYS_BATCH)
    for done, _ in enumerate(pool.map(fill, chunks), start=1):
        if progress is not None:
            progress(done, len(chunks))
    return Prepared(examples, tokens, activations, stored, tuple(contexts), folder)


def fit(
    layers: Layers,
    data: Prepared,
    chosen: Sequence[int],
    recipe: Recipe,
    pool: ThreadPoolExecutor,
    *,
    first: dict[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train on the examples `chosen`.

    Args:
        first: tensors to start from in place of drawn ones.

    Raises:
        BranchError: the loss is not a finite number: the learning rate is too high.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    parameters = initial(layers, recipe, generator)
    parameters.update(first or {})
    names = list(parameters)
    for tensor in parameters.values():
        tensor.requires_grad_(True)
    optimizer = _optimizer(parameters, recipe)
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = recipe.epochs * -(-len(chosen) // recipe.batch)
    step, losses = 0, []
    for _epoch in range(recipe.epochs):
        order = [chosen[i] for i in torch.randperm(len(chosen), generator=generator).tolist()]
        total = 0.0
        for indices in _chunks(order, recipe.batch):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * _schedule(step, steps)
            parts = _chunks(sorted(indices, key=data.length), PART)
            work = [
                pool.submit(_gradients, layers, data, part, parameters, recipe) for part in parts
            ]
            loss = _collect(parameters, [job.result() for job in work], len(indices))
            if not math.isfinite(loss):
                raise BranchError(
                    f"the loss is {loss} at step {step}: lower learning_rate, it is "
                    f"{recipe.learning_rate:g}"
                )
            torch.nn.utils.clip_grad_norm_(
                [parameters[name] for name in names], recipe.clip, foreach=False
            )
            optimizer.step()
            total += loss * len(indices)
            step += 1
            if progress is not None:
                progress(step, steps, f"epoch {_epoch + 1} of {recipe.epochs}, loss {loss:.3f}")
        losses.append(total / len(chosen))
    return Trained({name: tensor.detach() for name, tensor in parameters.items()}, tuple(losses))


def outputs(
    layers: Layers,
    data: Prepared,
    chosen: Sequence[int],
    parameters: dict[str, Tensor],
    scale: float,
    pool: ThreadPoolExecutor,
) -> Tensor:
    """The head's outputs [len(chosen), outputs] of examples, in the order of `chosen`."""
    places = sorted(range(len(chosen)), key=lambda place: (data.length(chosen[place]), place))

    def run(part: Sequence[int]) -> Tensor:
        with torch.no_grad():
            batch = data.batch([chosen[place] for place in part])
            return layers.outputs(batch, parameters, scale)

    found = torch.cat(list(pool.map(run, _chunks(places, PART))))
    result = torch.empty_like(found)
    result[torch.tensor(places)] = found
    return result


def initial(layers: Layers, recipe: Recipe, generator: torch.Generator) -> dict[str, Tensor]:
    """Adapters that change nothing yet (B is zero) and a small random head."""
    parameters: dict[str, Tensor] = {}
    for index in range(layers.fork, layers.exit):
        for target in recipe.targets:
            rows, columns = layers.shape_of(target)
            bound = columns**-0.5
            down = torch.empty(recipe.rank, columns).uniform_(-bound, bound, generator=generator)
            parameters[f"layers.{index}.{target}.lora_A"] = down
            parameters[f"layers.{index}.{target}.lora_B"] = torch.zeros(rows, recipe.rank)
    count, size = len(recipe.options), layers.hidden_size
    parameters["norm.weight"] = torch.ones(size)
    parameters["head.weight"] = torch.empty(count, size).normal_(
        std=0.1 * size**-0.5, generator=generator
    )
    parameters["head.bias"] = torch.zeros(count)
    return parameters


def _optimizer(parameters: dict[str, Tensor], recipe: Recipe) -> torch.optim.AdamW:
    """Adapters, head, and what decays to nothing sensible (a norm's factors, biases) apart."""
    adapters = [tensor for name, tensor in parameters.items() if ".lora_" in name]
    plain = [parameters[name] for name in ("norm.weight", "head.bias")]
    groups = [
        {"params": adapters, "lr": recipe.learning_rate, "weight_decay": recipe.decay},
        {
            "params": [parameters["head.weight"]],
            "lr": recipe.head_rate,
            "weight_decay": recipe.decay,
        },
        {"params": plain, "lr": recipe.head_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), foreach=False)


def _schedule(step: int, steps: int) -> float:
    """Share of the highest learning rate: a short rise, then a cosine down to a tenth."""
    rise = max(1, round(_WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _gradients(
    layers: Layers,
    data: Prepared,
    part: Sequence[int],
    parameters: dict[str, Tensor],
    recipe: Recipe,
) -> tuple[float, tuple[Tensor, ...]]:
    """The summed loss of a part and its gradients, in the parameters' order."""
    found = layers.outputs(data.batch(part), parameters, recipe.scale)
    loss = loss_of(found, [data.examples[i] for i in part], recipe.head)
    return float(loss.detach()), torch.autograd.grad(loss, list(parameters.values()))


def loss_of(found: Tensor, examples: Sequence[Example], head: HeadKind) -> Tensor:
    """Summed over examples: cross-entropy among the outputs that a row allows, or squares."""
    if head == "value":
        wanted = torch.tensor([float(example.target) for example in examples])
        return (found[:, 0] - wanted).square().sum()
    targets = torch.tensor([int(example.target) for example in examples])
    return functional.cross_entropy(allowed(found, examples), targets, reduction="sum")


def allowed(found: Tensor, examples: Sequence[Example]) -> Tensor:
    """Outputs with -inf in place of those that an example's question does not allow."""
    if not any(example.outputs for example in examples):
        return found
    shut = torch.ones(found.shape, dtype=torch.bool)
    for row, example in enumerate(examples):
        shut[row, list(example.outputs or range(found.shape[1]))] = False
    return found.masked_fill(shut, -math.inf)


def _collect(
    parameters: dict[str, Tensor],
    parts: Sequence[tuple[float, tuple[Tensor, ...]]],
    examples: int,
) -> float:
    """Put the mean gradient of a batch where the optimiser looks; returns the mean loss."""
    for place, tensor in enumerate(parameters.values()):
        total = parts[0][1][place].clone()
        for _loss, gradients in parts[1:]:
            total += gradients[place]
        tensor.grad = total / examples
    return sum(loss for loss, _ in parts) / examples


def _chunks(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
