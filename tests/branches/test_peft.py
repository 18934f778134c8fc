"""The shipped branch in Lockstep beside the same branch in transformers and PEFT."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.branch import Branch, read_branch
from lockstep.branches.activations import Tokens
from lockstep.branches.build import Trunk
from lockstep.config import ModelOptions
from lockstep.decisions.render import branch_suffix_ids, context_ids
from lockstep.kernels import make_backend
from lockstep.model import load_model
from lockstep.model.adapters import tensor_shapes
from lockstep.requests import RequestBuilder
from lockstep.runner.check import transformers_model
from lockstep.runner.probe import Probe
from lockstep.runner.runner import Identity, Runner
from lockstep.weights import open_checkpoint
from lockstep.weights.branch import read_tensors
from tests.branches.support import JUDGE, groundedness
from tests.runner.branching import Decision, scores_of

ROWS = 24
# Largest difference of an output. float32: sums in another order through all layers, on outputs
# of up to about 10. bfloat16: weights, activations and adapters are rounded to 8 bits.
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.6}
# Decisions for another option; of bfloat16 only where two options are nearly as probable.
FLIPPED = {"float32": 0, "bfloat16": 2}


@pytest.fixture(scope="module")
def conversations() -> list[Any]:
    generator = groundedness()
    rng = random.Random(99)
    names, surnames = generator.invented(rng, 40), generator.invented(rng, 20)
    writer = generator.Writer(rng, True, names, surnames)
    cases = list(generator.SHARES)
    return [writer.row(cases[i % len(cases)])["messages"] for i in range(ROWS)]


def float32_runner() -> Runner:
    checkpoint = open_checkpoint("smollm2")
    backend = make_backend(ModelOptions(threads=1))
    model = load_model(checkpoint, backend, torch.float32, max_context=512)
    identity = Identity("smollm2", checkpoint.weights_hash())
    return Runner(model, backend, memory_bytes=32 << 20, identity=identity)


def peft_scores(branch: Branch, tensors: dict[str, Tensor], asked: list[Tokens]) -> Tensor:
    """The head's outputs [rows, outputs] by PEFT's adapters on transformers' model, float32.

    The context is read without adapters; the suffix reads its keys and values, with them.
    """
    from peft import LoraConfig, get_peft_model

    oracle = transformers_model(open_checkpoint("smollm2"))
    config = LoraConfig(
        r=branch.rank,
        lora_alpha=branch.rank * branch.scale,
        target_modules=list(branch.targets),
        layers_to_transform=list(range(branch.fork, branch.exit)),
        layers_pattern="layers",
        lora_dropout=0.0,
    )
    adapted: Any = get_peft_model(oracle, config)
    layers = oracle.model.layers
    with torch.no_grad():
        for name, tensor in tensors.items():
            if "lora" not in name:
                continue
            _, index, target, matrix = name.split(".")
            part = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            linear = getattr(getattr(layers[int(index)], part), target)
            getattr(linear, matrix)["default"].weight.copy_(tensor)
    seen: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, out: Any) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    layers[branch.exit - 1].register_forward_hook(keep)
    rows = []
    with torch.no_grad():
        for one in asked:
            with adapted.disable_adapter():
                read = adapted(torch.tensor([one.context]), use_cache=True, logits_to_keep=1)
            seen.clear()
            past = read.past_key_values
            adapted(torch.tensor([one.suffix]), past_key_values=past, logits_to_keep=1)
            rows.append(seen[0].reshape(-1, seen[0].shape[-1])[-1])
    hidden = torch.stack(rows)
    scaled = hidden * torch.rsqrt(
        hidden.square().mean(-1, keepdim=True) + oracle.config.rms_norm_eps
    )
    normed = scaled * tensors["norm.weight"]
    outputs: Tensor = normed @ tensors["head.weight"].T + tensors["head.bias"]
    return outputs


def test_the_shipped_branch_decides_as_peft_does(conversations: list[Any], trunk: Trunk) -> None:
    branch = read_branch(JUDGE)
    expected: Tensor | None = None
    for runner in (float32_runner(), trunk.runner):
        name = runner.info().dtype
        tokenizer = open_checkpoint("smollm2").tokenizer()
        builder = RequestBuilder(tokenizer, runner.info())
        suffix = tuple(branch_suffix_ids(tokenizer, branch))
        asked = [Tokens(tuple(context_ids(builder, given)), suffix) for given in conversations]
        if expected is None:
            tensors = read_tensors(JUDGE, branch, tensor_shapes(runner.model, branch))
            expected = peft_scores(branch, tensors, asked)
        runner.load_branch(str(JUDGE))
        found = []
        for one in asked:
            probe = Probe(runner)
            decision = Decision(probe, branch, list(one.context), list(one.suffix))
            found.append(scores_of(probe, decision).scores)
        runner.unload_branch(branch.key)
        outputs = torch.tensor(found)
        gap = float((outputs - expected).abs().max())
        flipped = int((outputs.argmax(1) != expected.argmax(1)).sum())
        print(f"{name}: largest difference {gap:.1e}, {flipped} of {ROWS} flipped")
        assert gap <= TOLERANCE[name]
        assert flipped <= FLIPPED[name]
    assert expected is not None
    assert len(set(expected.argmax(1).tolist())) == 3, "every option is chosen somewhere"
