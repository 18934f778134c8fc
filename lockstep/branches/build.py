"""From a file of rows to a branch's folder: trunk rows, training, calibration, packaging."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.branch import Branch, BranchError, HeadKind
from lockstep.branches import calibrate
from lockstep.branches.activations import Activations, Tokens, activations
from lockstep.branches.calibrate import Floats, Ints
from lockstep.branches.data import Dataset, Example, split
from lockstep.branches.layers import Layers
from lockstep.branches.package import check_folder, training_record
from lockstep.branches.train import (
    Prepared,
    Recipe,
    Trained,
    allowed,
    fit,
    outputs,
    prepare,
    workers,
)
from lockstep.config import EngineConfig
from lockstep.decisions.render import branch_suffix_ids, context_ids
from lockstep.requests import RequestBuilder
from lockstep.runner import load_runner
from lockstep.text import Tokenizer
from lockstep.types import RequestError
from lockstep.weights import open_checkpoint
from lockstep.weights.branch import write_package

Progress = Callable[[str, float], None]
"""What is being done, and the share of it that is, in [0, 1]."""

_BAD_SHOWN = 10


def _silent(stage: str, done: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Aim:
    """What thresholds are chosen for; of both none: the most probable option wins.

    Attributes:
        precision: texts such as "answer=0.95". costs: such as "search:answer=5".
    """

    precision: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.precision and self.costs:
            raise BranchError("thresholds are for a target precision or for costs, not for both")

    def thresholds(
        self, probabilities: Floats, targets: Ints, options: Sequence[str]
    ) -> dict[str, float]:
        """Thresholds by option."""
        if self.precision:
            wanted = calibrate.parse_precision(self.precision, options)
            loss = calibrate.precision_loss(targets, wanted)
        elif self.costs:
            loss = calibrate.cost_loss(targets, calibrate.parse_costs(self.costs, options))
        else:
            return {}
        found = calibrate.find_thresholds(probabilities, loss)
        pairs = zip(options, found, strict=True)
        return {name: value for name, value in pairs if value is not None}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to build.

    Attributes:
        suffix: text behind the context; "" takes `default_suffix`.
        instructions: what is decided, for people and for the suffix's default.
        share: of the rows that are kept apart to calibrate on, where no file is.
        threads: of training; no bit depends on them. 0 takes all cores.
    """

    recipe: Recipe
    suffix: str = ""
    instructions: str = ""
    aim: Aim = field(default_factory=Aim)
    share: float = 0.15
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Built:
    """A trained branch and what was measured on the way.

    Attributes:
        calibration: the rows on which temperature and thresholds were chosen.
        outputs: the head's on these, as training computes them: [rows, outputs].
    """

    branch: Branch
    tensors: Mapping[str, Tensor]
    calibration: tuple[Example, ...]
    outputs: Floats


class Trunk:
    """A loaded model on whose rows branches are trained.

    Raises:
        ModelError, ConfigError: as loading an engine does.
    """

    def __init__(self, config: EngineConfig, progress: Progress = _silent) -> None:
        self.config = config
        self.runner = load_runner(config, progress)
        self.tokenizer: Tokenizer = open_checkpoint(config.model.name).tokenizer()
        self.builder = RequestBuilder(self.tokenizer, self.runner.info())
        scheduler = config.scheduler.resolved(self.runner.backend.kind)
        self._step_tokens = scheduler.max_step_tokens

    def tokens(self, data: Dataset, branch: Branch) -> list[Tokens]:
        """Every example as the branch will read it.

        Raises:
            BranchError: rows that the model cannot read, named by line.
        """
        found: list[Tokens] = []
        bad: list[str] = []
        limit = self.builder.info.max_context
        for example in data.examples:
            try:
                context = tuple(context_ids(self.builder, example.given))
            except RequestError as error:
                bad.append(f"{data.path}:{example.line}: {error}")
                continue
            suffix = tuple(branch_suffix_ids(self.tokenizer, branch, example.text))
            found.append(Tokens(context, suffix))
            length = len(found[-1].ids)
            if length > limit:
                bad.append(f"{data.path}:{example.line}: {length} tokens, the model holds {limit}")
        if bad:
            more = f"\nand {len(bad) - _BAD_SHOWN} more" if len(bad) > _BAD_SHOWN else ""
            raise BranchError("\n".join(bad[:_BAD_SHOWN]) + more)
        return found

    def rows(
        self, tokens: Sequence[Tokens], forks: Sequence[int], progress: Progress = _silent
    ) -> dict[int, Activations]:
        """The trunk's rows of examples at each fork; see `activations.activations`."""
        return activations(
            self.runner,
            tokens,
            forks,
            step_tokens=self._step_tokens,
            progress=lambda done, total: progress(f"trunk: {done} of {total} tokens", done / total),
        )

    def first_head(self, head: HeadKind, options: Sequence[str]) -> dict[str, Tensor]:
        """Where a head over codes starts: the trunk's own norm and the rows of its own head."""
        if head != "codes":
            return {}
        model = self.runner.model
        ids = [self.tokenizer.encode_inside(option)[0] for option in options]
        wanted = torch.tensor(ids, dtype=torch.int32, device=model.backend.device)
        rows = model.backend.embedding(wanted, model.lm_head).float().cpu()
        # A branch's norm multiplies by its weight, Gemma's by 1 + weight.
        weight = model.norm.weight.float().cpu() + (1.0 if model.unit_offset else 0.0)
        return {"norm.weight": weight, "head.weight": rows}

    def check(self, recipe: Recipe) -> None:
        """Refuse layers that the model does not have.

        Raises:
            BranchError: naming both numbers.
        """
        layers = self.runner.num_layers
        if not 0 <= recipe.fork < recipe.exit <= layers:
            raise BranchError(
                f"fork {recipe.fork} and exit {recipe.exit} must be 0 <= fork < exit <= {layers}, "
                "the model's layers"
            )


def describe(trunk: Trunk, plan: Plan) -> Branch:
    """The branch that a plan asks for, before it is trained."""
    recipe, info = plan.recipe, trunk.runner.info()
    return Branch(
        base=info.weights_hash,
        base_name=info.model,
        fork=recipe.fork,
        exit=recipe.exit,
        adapt=recipe.adapt,
        rank=recipe.rank,
        scale=recipe.scale,
        targets=recipe.targets,
        head=recipe.head,
        options=recipe.options,
        suffix=plan.suffix or default_suffix(trunk.tokenizer, plan),
        instructions=plan.instructions,
    )


def default_suffix(tokenizer: Tokenizer, plan: Plan) -> str:
    """A message of the user that asks, and the opening of the assistant's turn, as the model's
    template writes them behind a conversation.

    Raises:
        BranchError: the template cannot write one more message there.
    """
    recipe = plan.recipe
    question = "{question}"
    if recipe.head == "options":
        names = ", ".join(recipe.options[:-1]) + f" or {recipe.options[-1]}"
        question = f"{plan.instructions or 'Which of these fits'}: {names}?"
    elif recipe.head == "value":
        question = plan.instructions or "Which value fits?"
    if tokenizer.chat_template is None:
        return f"\n\n{question}\nAnswer:"
    before = [{"role": "user", "content": "?"}]
    try:
        context = tokenizer.render_chat(before, add_generation_prompt=False)
        asked = [*before, {"role": "user", "content": question}]
        whole = tokenizer.render_chat(asked, enable_thinking=False)
    except RequestError:
        whole = context = ""
    if not context or not whole.startswith(context):
        raise BranchError(
            "the model's chat template cannot put a question behind a conversation: give the text "
            "that stands there with --suffix"
        )
    return whole[len(context) :]


def build(
    trunk: Trunk,
    data: Dataset,
    plan: Plan,
    folder: Path,
    *,
    calibration: Dataset | None = None,
    progress: Progress = _silent,
) -> Built:
    """Train a branch, calibrate it and write its folder.

    Args:
        calibration: rows to choose temperature and thresholds on; else a share of `data` that
            is then not trained on.

    Raises:
        BranchError: rows, layers, thresholds or a folder that cannot be used.
    """
    check_folder(folder)
    trunk.check(plan.recipe)
    _check_aim(plan)
    branch = describe(trunk, plan)
    parts = part(trunk, branch, plan, data, calibration)
    rows = trunk.rows(parts.tokens, [branch.fork], progress)[branch.fork]
    layers = Layers(trunk.runner.model, branch.fork, branch.exit)
    trained, found = train_once(trunk, layers, parts, rows, plan, progress)
    held_rows = tuple(parts.examples[i] for i in parts.held)
    learnt = [parts.examples[i] for i in parts.chosen]
    counts = _counts(learnt, branch)
    info = trunk.runner.info()
    record = training_record(plan.recipe, trained, data, len(learnt), counts, info, layers.dtype)
    branch = replace(calibrated(branch, found, held_rows, plan.aim), training=record)
    branch = write_package(branch, trained.parameters, folder)
    return Built(branch, trained.parameters, held_rows, found)


@dataclass(frozen=True, slots=True)
class Parts:
    """Examples and their ids; indices of those to train on and of those held back."""

    examples: tuple[Example, ...]
    tokens: tuple[Tokens, ...]
    chosen: tuple[int, ...]
    held: tuple[int, ...]


def part(
    trunk: Trunk, branch: Branch, plan: Plan, data: Dataset, calibration: Dataset | None
) -> Parts:
    """All rows of `data` to train on and those of `calibration` held back, or a split of `data`.

    Raises:
        BranchError: rows that the model cannot read, or too few to split.
    """
    tokens = trunk.tokens(data, branch)
    if calibration is None:
        chosen, held = split(data.examples, plan.share, plan.recipe.seed)
        return Parts(data.examples, tuple(tokens), tuple(chosen), tuple(held))
    tokens += trunk.tokens(calibration, branch)
    rows = range(len(tokens))
    border = len(data.examples)
    examples = (*data.examples, *calibration.examples)
    return Parts(examples, tuple(tokens), tuple(rows[:border]), tuple(rows[border:]))


def train_once(
    trunk: Trunk,
    layers: Layers,
    parts: Parts,
    rows: Activations,
    plan: Plan,
    progress: Progress = _silent,
) -> tuple[Trained, Floats]:
    """Train; the tensors, and the head's outputs on the rows that are held back."""
    recipe = plan.recipe
    with workers(plan.threads or len(os.sched_getaffinity(0))) as pool:
        data: Prepared = prepare(
            layers,
            parts.examples,
            parts.tokens,
            rows,
            recipe.adapt,
            pool,
            lambda done, total: progress("keys and values of contexts", done / total),
        )
        trained = fit(
            layers,
            data,
            parts.chosen,
            recipe,
            pool,
            first=trunk.first_head(recipe.head, recipe.options),
            progress=lambda done, total, text: progress(f"training: {text}", done / total),
        )
        found = outputs(layers, data, parts.held, trained.parameters, recipe.scale, pool)
    if recipe.head != "value":
        found = allowed(found, [parts.examples[i] for i in parts.held])
    result: Floats = found.double().numpy()
    return trained, result


def calibrated(branch: Branch, found: Floats, held: Sequence[Example], aim: Aim) -> Branch:
    """The branch with temperature, thresholds and the figures that they have on `held`."""
    if branch.head == "value":
        wanted = np.array([float(example.target) for example in held])
        return replace(branch, calibration=calibrate.value_figures(found[:, 0], wanted))
    targets = np.array([int(example.target) for example in held], dtype=np.int64)
    temperature = calibrate.fit_temperature(found, targets)
    probabilities = calibrate.softmax(found, temperature)
    thresholds: dict[str, float] = {}
    if branch.head == "options":
        thresholds = aim.thresholds(probabilities, targets, branch.options)
    wins = [thresholds.get(name) for name in branch.options]
    chosen = calibrate.choose(probabilities, wins)
    report: dict[str, Any] = calibrate.figures(probabilities, targets, chosen, branch.options)
    if aim.precision or aim.costs:
        report["aim"] = {"precision": list(aim.precision), "costs": list(aim.costs)}
    return replace(branch, temperature=temperature, thresholds=thresholds, calibration=report)


def _check_aim(plan: Plan) -> None:
    """Complain about thresholds before a training run and not after it."""
    aim, recipe = plan.aim, plan.recipe
    if (aim.precision or aim.costs) and recipe.head != "options":
        raise BranchError(f"thresholds are for an options head, not for {recipe.head}")
    calibrate.parse_precision(aim.precision, recipe.options)
    calibrate.parse_costs(aim.costs, recipe.options)


def _counts(examples: Sequence[Example], branch: Branch) -> dict[str, int]:
    """How often each output was right, of those that ever were; of values none."""
    if branch.head == "value":
        return {}
    counts = Counter(branch.options[int(example.target)] for example in examples)
    return {name: counts[name] for name in branch.options if counts[name]}
