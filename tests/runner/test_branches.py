"""Decision branches: right against a slow reference, and bits that no company moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.branch import Branch, BranchError
from lockstep.config import BranchOptions, CacheConfig, EngineConfig, ModelOptions
from lockstep.kernels.contract import Backend
from lockstep.kernels.cpu import make_backend
from lockstep.model import load_model
from lockstep.runner.groups import activations_of, tails_of
from lockstep.runner.plan import BranchHost, Plan, RunResult, SampleSpec, TokenRun
from lockstep.runner.probe import Probe
from lockstep.runner.runner import Identity, Runner, load_runner
from lockstep.types import BranchLayers, SamplingParams
from lockstep.weights.branch import write_package
from tests.control import RowSplitBackend
from tests.model.branches import BASE, describe, package, random_tensors, reference_scores
from tests.model.tiny import build_oracle, save
from tests.runner.branching import Decision, join, scores_of

DTYPES = [torch.float32, torch.bfloat16]
CONTEXT = [(11 * i * i + 5 * i + 2) % 131 for i in range(61)]
SUFFIX = [(7 * i + 3) % 131 for i in range(9)]
OTHERS = [[(13 * i + 7 * s) % 131 for i in range(20 + 9 * s)] for s in range(5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
# The families whose layers differ in what a branch touches: plain, biases, normed heads,
# windows in some or all layers, two norms more and offset norms.
FAMILIES = ["llama", "llama-tied-bias", "qwen3", "mistral-window", "gemma3"]


@dataclass(repr=False)
class World:
    """A small model, its branches, and a probe over it."""

    oracle: Any
    probe: Probe
    branches: dict[str, Branch]
    tensors: dict[str, dict[str, torch.Tensor]]


def world(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
    **options: Any,
) -> World:
    """Four branches: of a question and of a context, over layers [1, 3) and [1, 2)."""
    oracle = build_oracle(name)
    backend = backend or make_backend("native", 1)
    model = load_model(save(oracle, folder / "model"), backend, dtype)
    described = {
        "suffix": describe(),
        "context": describe(adapt="context", rank=7, scale=1.3),
        "short": describe(exit=2, rank=16, targets=("q_proj", "v_proj", "up_proj")),
        "short context": describe(
            exit=2, adapt="context", targets=("k_proj", "down_proj"), head="value",
            options=("value",),
        ),
    }  # fmt: skip
    runner = Runner(
        model,
        backend,
        memory_bytes=8 << 20,
        identity=Identity(weights_hash=BASE),
        branches=list(described.values()),
        **options,
    )
    branches, tensors = {}, {}
    for seed, (label, branch) in enumerate(described.items()):
        tensors[label] = random_tensors(model, branch, seed)
        changes = {
            key: getattr(branch, key)
            for key in ("exit", "rank", "scale", "adapt", "targets", "head", "options")
        }
        package(model, folder / label, seed, **changes)
        branches[label] = runner.load_branch(str(folder / label))
    return World(oracle, Probe(runner), branches, tensors)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in ("llama", "qwen3", "gemma3") for dtype in DTYPES],
    ids=lambda value: f"{value[0]}-{value[1]}",
)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    name, dtype = request.param
    return world(name, tmp_path_factory.mktemp(name), dtype)


def decide(place: World, label: str, **how: Any) -> RunResult:
    context, suffix = how.pop("context", CONTEXT), how.pop("suffix", SUFFIX)
    return scores_of(
        place.probe, Decision(place.probe, place.branches[label], context, suffix, **how)
    )


def writer(probe: Probe, tokens: list[int], sequence: int = 9) -> TokenRun:
    """A run of the trunk that draws a token and reports its logprobs."""
    spec = SampleSpec(replace(GREEDY, logprobs=3), 1, 0, 0, tokens, len(tokens))
    run = probe.run(tokens, 0, probe.pages(len(tokens)), logits=1)
    return replace(run, sequence=sequence, sample=spec)


@pytest.mark.parametrize("label", ["suffix", "context", "short", "short context"])
def test_scores_equal_a_slow_reference(family: World, label: str) -> None:
    family.probe.reset()
    expected = reference_scores(
        family.oracle, family.branches[label], family.tensors[label], CONTEXT, SUFFIX
    )
    found = decide(family, label, chunk=25)
    assert found.scores == pytest.approx(expected.tolist(), abs=2e-4)
    # Another adaptation of the same tensors is another answer: the comparison can fail.
    right = family.branches[label]
    other = replace(right, adapt="context" if right.adapt == "suffix" else "suffix")
    wrong = reference_scores(family.oracle, other, family.tensors[label], CONTEXT, SUFFIX)
    assert float((wrong - expected).abs().max()) > 1e-2


def crowd(place: World) -> list[tuple[TokenRun, ...]]:
    """Writers, and decisions of every branch about other texts, one step of each."""
    probe = place.probe
    parts: list[tuple[TokenRun, ...]] = [(writer(probe, tokens),) for tokens in OTHERS[:3]]
    for number, branch in enumerate(place.branches.values()):
        text = OTHERS[number]
        parts += Decision(probe, branch, text[:15], text[15:], together=True).steps
        parts += Decision(probe, branch, [], text[:4]).steps
    return parts


WAYS: list[dict[str, Any]] = [
    {"chunk": 1},
    {"chunk": 17, "suffix_chunk": 4},
    {"together": True},
    {"chunk": 20, "suffix_chunk": 1, "together": True},
]


@pytest.mark.parametrize("label", ["suffix", "context", "short", "short context"])
def test_company_and_chunks_move_no_bit_of_a_decision(small: World, label: str) -> None:
    small.probe.reset()
    alone = decide(small, label)
    assert alone.error == ""
    assert len(alone.scores) == len(small.branches[label].options)
    for way in WAYS:
        small.probe.reset()
        assert decide(small, label, **way) == alone, way
        small.probe.reset()
        decision = Decision(small.probe, small.branches[label], CONTEXT, SUFFIX, **way)
        assert scores_of(small.probe, decision, crowd(small)) == alone, way


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[str, int, int, bool]]]:
    """Trunk runs (length, logits), and decisions (branch, context, suffix, together)."""
    lengths = st.sampled_from([1, 2, 7, 30])
    trunk = draw(st.lists(st.tuples(lengths, st.integers(0, 1)), min_size=1, max_size=4))
    labels = st.sampled_from(["suffix", "context", "short", "short context"])
    one = st.tuples(labels, st.sampled_from([0, 1, 16, 33]), st.sampled_from([1, 5]), st.booleans())
    return trunk, draw(st.lists(one, min_size=1, max_size=4))


@given(mixture=mixtures(), order=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_branches_move_no_bit_of_the_trunk(
    small: World,
    mixture: tuple[list[tuple[int, int]], list[tuple[str, int, int, bool]]],
    order: Any,
) -> None:
    """Results, and keys and values, of trunk rows in a plan with branches and in one without."""
    probe, runner = small.probe, small.probe.runner
    probe.reset()
    trunk = []
    for number, (length, logits) in enumerate(mixture[0]):
        run = writer(probe, OTHERS[number][:length], number)
        trunk.append(run if logits else replace(run, logits=0, sample=None))
    decisions = [
        Decision(probe, small.branches[label], CONTEXT[:context], SUFFIX[:suffix], together=both)
        for label, context, suffix, both in mixture[1]
    ]
    wipe(runner, trunk)
    expected = runner.execute(Plan(0, tuple(trunk))).runs
    written = [[page.clone() for page in pages_of(runner, run)] for run in trunk]
    alone = [scores_of(probe, decision) for decision in decisions]
    for number in range(max(len(decision.steps) for decision in decisions)):
        at = [i for i, decision in enumerate(decisions) if number < len(decision.steps)]
        parts = [(run,) for run in trunk] + [decisions[i].steps[number] for i in at]
        places = list(range(len(parts)))
        order.shuffle(places)
        wipe(runner, trunk)
        found = runner.execute(Plan(0, join(*[parts[i] for i in places]))).runs
        ends = dict(zip(places, ends_of([parts[i] for i in places]), strict=True))
        assert [found[ends[i]] for i in range(len(trunk))] == list(expected)
        for run, before in zip(trunk, written, strict=True):
            for now, then in zip(pages_of(runner, run), before, strict=True):
                assert torch.equal(now, then)
        for place, i in enumerate(at, len(trunk)):
            if number == len(decisions[i].steps) - 1:
                assert found[ends[place]] == alone[i]


def ends_of(parts: list[tuple[TokenRun, ...]]) -> list[int]:
    """Index in the joined plan of each part's last run."""
    found, total = [], 0
    for part in parts:
        total += len(part)
        found.append(total - 1)
    return found


def pages_of(runner: Runner, run: TokenRun) -> list[torch.Tensor]:
    """A run's pages in every group of the model, as they lie in the pool."""
    found = []
    for stride, table in zip(runner._pool_shape.strides, run.pages, strict=True):
        found += [runner._pool[page * stride : (page + 1) * stride] for page in table]
    return found


def wipe(runner: Runner, runs: list[TokenRun]) -> None:
    """Zero the runs' pages, so that nothing old passes for new."""
    for run in runs:
        for page in pages_of(runner, run):
            page.zero_()


@pytest.mark.parametrize("label", ["suffix", "short"])
def test_a_suffix_decision_reads_what_generation_wrote_and_leaves_it(
    small: World, label: str
) -> None:
    """B05: the context's pages serve both ways, in bits: nothing below the suffix is computed
    again, and generation goes on as if nobody had asked."""
    probe = small.probe
    probe.reset()
    context = CONTEXT[:48]
    cold = decide(small, label, context=context)
    trunk = probe.score([*context, *OTHERS[4]])
    shared = probe.pages(len(context))
    probe.score(context, chunk=9, pages=shared)
    decision = Decision(probe, small.branches[label], context, SUFFIX)
    run = decision.steps[-1][0]
    own = (list(table[3:]) for table in run.pages)
    warm = replace(run, pages=tuple(a + b if b else b for a, b in zip(shared, own, strict=True)))
    assert probe.runner.execute(Plan(0, (warm,))).runs[0] == cold
    more = probe.pages(len(OTHERS[4]))
    pages = tuple(a + b for a, b in zip(shared, more, strict=True))
    after = probe.score([*context, *OTHERS[4]], start=48, pages=pages)
    assert torch.equal(after, trunk[48:])


def test_a_context_that_stops_at_the_exit_is_enough_for_a_suffix(small: World) -> None:
    small.probe.reset()
    assert decide(small, "short", depth=2, chunk=30) == decide(small, "short")


@pytest.mark.parametrize("label", ["context", "short context"])
def test_kept_activations_stand_for_the_trunk(small: World, label: str) -> None:
    """What enters the fork, stored by plain trunk runs, is all that the branch's layers need."""
    probe = small.probe
    probe.reset()
    cold = decide(small, label)
    pages = probe.pages(len(CONTEXT))
    store = activations_of(probe.runner.groups, small.branches[label].fork)
    for start, end in ((0, 25), (25, 61)):
        run = probe.run(CONTEXT[start:end], start, pages, logits=0)
        probe.runner.execute(Plan(0, (replace(run, keeps=True),)))
    for chunk in (0, 10):
        assert decide(small, label, kept=pages, chunk=chunk, together=bool(chunk)) == cold
    short = tuple(table[:1] if g == store else table for g, table in enumerate(pages))
    with pytest.raises(ValueError, match="stands on no page"):
        decide(small, label, kept=short)


def test_keeping_and_twins_in_one_step(small: World) -> None:
    small.probe.reset()
    cold = decide(small, "context")
    keeping = Decision(small.probe, small.branches["context"], CONTEXT, SUFFIX, keep=True, chunk=20)
    assert scores_of(small.probe, keeping) == cold
    assert decide(small, "context", kept=keeping.pages) == cold


def test_activations_are_read_in_the_very_step_that_keeps_them(small: World) -> None:
    """Pages that an earlier run of a plan fills are as good as those of a step before."""
    probe = small.probe
    probe.reset()
    cold = decide(small, "context")
    pages = probe.pages(len(CONTEXT))
    fills = replace(probe.run(CONTEXT, 0, pages, logits=0), keeps=True)
    for own in pages_of(probe.runner, fills):
        own.fill_(1)
    reads = Decision(probe, small.branches["context"], CONTEXT, SUFFIX, kept=pages, sequence=1)
    (first, last) = reads.steps
    probe.runner.execute(Plan(0, join((fills,), first)))
    assert probe.runner.execute(Plan(1, last)).runs[-1] == cold


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_follow_the_batch_fail_the_same_test(tmp_path: Path, dtype: torch.dtype) -> None:
    """The control: company changes the split, and so a decision's bits and the trunk's."""
    place = world("llama", tmp_path, dtype, RowSplitBackend())
    for label in ("suffix", "context"):
        place.probe.reset()
        alone = decide(place, label)
        decision = Decision(place.probe, place.branches[label], CONTEXT, SUFFIX)
        assert scores_of(place.probe, decision, crowd(place)) != alone


def test_a_branch_that_idles_changes_nothing(tmp_path: Path) -> None:
    """Rows of a runner with branches loaded, and of one that never heard of any."""
    loaded = world("gemma3", tmp_path, torch.bfloat16).probe
    plain = Probe(Runner(loaded.runner.model, loaded.runner.backend, memory_bytes=8 << 20))
    tokens = OTHERS[4]
    assert torch.equal(loaded.score(tokens, chunk=13), plain.score(tokens, chunk=13))
    assert isinstance(plain.runner, BranchHost)
    assert plain.runner.info().fingerprint != loaded.runner.info().fingerprint  # weights' hash
    assert loaded.runner.info().weights_hash == BASE


def test_branches_come_and_go(tmp_path: Path) -> None:
    """D01, D07: ranks of all sizes side by side, in any slot, and every answer its own."""
    place = world("llama", tmp_path)
    runner = place.probe.runner
    alone = {label: decide(place, label) for label in place.branches}
    assert len({result.scores for result in alone.values()}) == 4
    runner.unload_branch(place.branches["suffix"].key)
    with pytest.raises(ValueError, match="not loaded"):
        decide(place, "suffix")
    for seed, rank in enumerate((1, 8, 64)):
        package(runner.model, tmp_path / f"rank{rank}", seed, rank=rank)
        place.branches[f"rank{rank}"] = runner.load_branch(str(tmp_path / f"rank{rank}"))
        alone[f"rank{rank}"] = decide(place, f"rank{rank}")
    place.branches["suffix"] = runner.load_branch(str(tmp_path / "suffix"))
    again = runner.load_branch(str(tmp_path / "suffix"))
    assert again == place.branches["suffix"]
    runner.unload_branch(again.key)  # loaded twice: the other one stays
    decisions = [
        Decision(place.probe, branch, CONTEXT, SUFFIX, together=True)
        for branch in place.branches.values()
    ]
    plan = join(*[decision.steps[0] for decision in decisions])
    ends = ends_of([decision.steps[0] for decision in decisions])
    found = runner.execute(Plan(0, plan)).runs
    for label, end in zip(place.branches, ends, strict=True):
        assert found[end] == alone[label], label
    for branch in place.branches.values():
        runner.unload_branch(branch.key)
    assert not runner._branches._sets
    with pytest.raises(KeyError):
        runner.unload_branch(again.key)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"base": "other", "base_name": "big"}, "trained on big with weights other; this model's"),
        ({"exit": 4}, "exit is 4, the model has 3 layers"),
        ({"adapt": "context", "fork": 0}, r"tail of layers \[0, 3\).*--branch when the server"),
    ],
)
def test_a_branch_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    place = world("llama", tmp_path)
    runner = place.probe.runner
    branch = describe(**change)
    fits = replace(branch, exit=3)
    write_package(branch, random_tensors(runner.model, fits), tmp_path / "odd")
    with pytest.raises(BranchError, match=complaint) as caught:
        runner.load_branch(str(tmp_path / "odd"))
    assert str(tmp_path / "odd") in str(caught.value)
    with pytest.raises(BranchError, match=r"branch\.json.*No such file"):
        runner.load_branch(str(tmp_path / "nowhere"))
    assert len(runner._branches) == 4
    without = Runner(runner.model, runner.backend, identity=runner.identity, num_slabs=20)
    without.load_branch(str(tmp_path / "suffix"))  # at run time, with nothing laid out
    with pytest.raises(BranchError, match="adapt is context"):
        without.load_branch(str(tmp_path / "context"))


def test_a_load_that_fails_half_way_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = world("llama", tmp_path)
    runner = place.probe.runner
    before = {label: decide(place, label) for label in place.branches}
    package(runner.model, tmp_path / "more", 9, rank=3)
    made = 0
    lora_set = runner.backend.lora_set

    def short_of_memory(weights: Any) -> Any:
        nonlocal made
        made += 1
        if made > 2:
            raise torch.OutOfMemoryError("no memory left")
        return lora_set(weights)

    with monkeypatch.context() as patch:
        patch.setattr(runner.backend, "lora_set", short_of_memory)
        with pytest.raises(BranchError, match="more: no room for it on the device: no memory"):
            runner.load_branch(str(tmp_path / "more"))
    assert {label: decide(place, label) for label in place.branches} == before
    assert len(runner._branches) == 4
    place.branches["more"] = runner.load_branch(str(tmp_path / "more"))
    assert decide(place, "more").scores


@pytest.mark.parametrize("adapt", ["suffix", "context"])
def test_a_fork_at_the_first_layer(tmp_path: Path, adapt: Any) -> None:
    """What enters it are the embedded ids: a context's twin runs from there."""
    place = world("gemma3", tmp_path)
    model = place.probe.runner.model
    branch = package(model, tmp_path / "root", 5, fork=0, exit=2, adapt=adapt)
    runner = Runner(
        model,
        place.probe.runner.backend,
        memory_bytes=8 << 20,
        identity=Identity(weights_hash=BASE),
        branches=[branch],
    )
    assert runner.load_branch(str(tmp_path / "root")) == branch
    stops = [group.name for group in runner.groups if group.kind == "activations"]
    assert stops == ([] if adapt == "context" else ["rows:2"])  # a stop at layer 0 keeps nothing
    tensors = random_tensors(model, branch, 5)
    root = World(place.oracle, Probe(runner), {"root": branch}, {"root": tensors})
    expected = reference_scores(place.oracle, branch, tensors, CONTEXT, SUFFIX)
    alone = decide(root, "root")
    assert alone.scores == pytest.approx(expected.tolist(), abs=2e-4)
    for way in WAYS:
        root.probe.reset()
        decision = Decision(root.probe, branch, CONTEXT, SUFFIX, **way)
        assert scores_of(root.probe, decision, crowd(root)) == alone, way


def test_rows_that_are_not_finite_are_told_apart(small: World) -> None:
    probe = small.probe
    probe.reset()
    good = decide(small, "suffix")
    bad = Decision(probe, small.branches["suffix"], CONTEXT, SUFFIX)
    probe.runner.execute(Plan(0, bad.steps[0]))
    group = probe.runner.model.groups[-1]
    probe.runner._pass.kv[group.layers[0]].v[bad.pages[len(probe.runner.model.groups) - 1][3]] = (
        float("nan")
    )
    fine = Decision(probe, small.branches["suffix"], CONTEXT, SUFFIX)
    probe.runner.execute(Plan(0, fine.steps[0]))
    draw = writer(probe, OTHERS[0])
    alone = probe.runner.execute(Plan(0, (draw,))).runs[0]
    found = probe.runner.execute(Plan(1, join(bad.steps[1], fine.steps[1], (draw,)))).runs
    assert "not finite" in found[0].error
    assert found[0].scores == ()
    assert list(found[1:]) == [good, alone]


def test_rows_leave_their_last_layer_as_they_are(small: World) -> None:
    """`Runner.rows`: what training reads, a branch's rows among them."""
    probe, model = small.probe, small.probe.runner.model
    probe.reset()
    whole = replace(probe.run(CONTEXT, 0, probe.pages(61)), layers=(0, model.num_layers))
    early = replace(probe.run(CONTEXT, 0, probe.pages(61), logits=4), layers=(0, 1))
    rows, first, nothing = probe.runner.rows(
        Plan(0, (whole, early, probe.run([1], 0, probe.pages(1), logits=0)))
    )
    assert rows.shape == (61, model.hidden_size)
    assert rows.dtype == model.dtype
    assert nothing.shape[0] == 0
    assert torch.equal(model.logits(rows), probe.score(CONTEXT))
    assert first.shape[0] == 4
    decision = Decision(probe, small.branches["suffix"], CONTEXT, SUFFIX)
    probe.runner.execute(Plan(0, decision.steps[0]))
    scored = decision.steps[1][0]
    every = replace(scored, scores=False, logits=len(SUFFIX))
    at_exit = probe.runner.rows(Plan(0, (every,)))[0][-1:]
    head = probe.runner._branches.scores(scored.branch, at_exit)[0]
    assert tuple(head.tolist()) == probe.runner.execute(Plan(0, (scored,))).runs[0].scores


def test_plans_of_branches_are_not_captured(tmp_path: Path) -> None:
    """Runs of one token that keep activations, or are a branch's, look like decode steps."""

    def refused(_function: object) -> Any:
        raise AssertionError("captured")

    place = world("llama", tmp_path, capture=refused)
    probe = place.probe
    for label in ("suffix", "context"):
        eager = decide(place, label, chunk=1, suffix_chunk=1)
        probe.reset()
        assert eager == decide(place, label)
    run = writer(probe, [5])
    assert run.sample is not None
    keeping = replace(run, keeps=True, sample=replace(run.sample, params=GREEDY))
    assert probe.runner.launch(Plan(0, (keeping,))).draws
    group = activations_of(probe.runner.groups, 1)
    assert group is not None
    entering = probe.runner.rows(Plan(0, (replace(run, layers=(0, 1), sample=None),)))[0]
    assert torch.equal(probe.runner._pass._stored[group][run.pages[group][0], 0], entering[0])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"branch": "nobody"}, "branch 'nobody' is not loaded"),
        ({"branch": ""}, "branch '' is not loaded"),
        ({"layers": (0, 2)}, "must leave at 3"),
        ({"logits": 2}, "one row of logits"),
        ({"scores": False, "branch": "short"}, "beyond the exit 2"),
        ({"pooling": "last"}, "not drawn from, pooled or kept"),
        ({"keeps": True}, "not drawn from, pooled or kept"),
        ({"kept": True}, "no activations are kept for layer 0"),
        ({"kept": True, "layers": (2, 3)}, "no activations are kept for layer 2"),
        ({"kept": True, "layers": (1, 3)}, "no activations are kept for layer 1"),
    ],
)
def test_a_senseless_run_is_refused(small: World, change: dict[str, Any], complaint: str) -> None:
    probe = small.probe
    probe.reset()
    if change.get("branch") in small.branches:
        change = {**change, "branch": small.branches[change["branch"]].key}
    run = Decision(probe, small.branches["suffix"], CONTEXT, SUFFIX).steps[-1][0]
    with pytest.raises(ValueError, match=complaint):
        probe.runner.execute(Plan(0, (replace(run, **change),)))


def test_a_runner_has_room_for_layers_of_branches_that_are_not_there(tmp_path: Path) -> None:
    save(build_oracle("llama"), tmp_path)
    layers = (BranchLayers(0, 2, "context"), BranchLayers(1, 2, "suffix"))
    config = EngineConfig(
        ModelOptions(str(tmp_path), device="cpu", backend="torch"),
        CacheConfig(memory_bytes=2**20),
        branches=BranchOptions(layers=layers),
    )
    runner = load_runner(config)
    assert tails_of(runner.groups, 0, 2)
    assert activations_of(runner.groups, 2) is not None
