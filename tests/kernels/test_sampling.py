"""Log-sum-exp, argmax and draws: exact against the spelled-out trees, fair in distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kernels import exact, reference
from lockstep.kernels.contract import SampleBatch
from lockstep.kernels.cpu.library import load_library
from tests.kernels.support import FORMS, backend, randn, same_bits

# Random123, examples/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def rows_of(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> SampleBatch:
    """The same parameters for every row, with its own seed, choice and position."""
    index = torch.arange(rows)
    return SampleBatch(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=index * 7_919_123_456_789 - 5 + seed,
        choice=(index % 3).int(),
        position=(index % 11).int(),
    )


def pick(batch: SampleBatch, rows: list[int] | torch.Tensor) -> SampleBatch:
    """Some rows of a batch."""
    fields = {name: getattr(batch, name) for name in SampleBatch.__slots__}
    return SampleBatch(
        **{name: f[rows] if isinstance(f, torch.Tensor) else f for name, f in fields.items()}
    )


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    as_tensors = [torch.tensor(value, dtype=torch.int64) for value in (*counter, *key)]
    spelled = exact.philox(tuple(as_tensors[:4]), tuple(as_tensors[4:]))
    assert tuple(spelled.tolist()) == words
    library, _ = load_library()
    counters, out = np.array(counter, dtype=np.uint32), np.zeros(4, dtype=np.uint32)
    library.lk_philox(counters.ctypes.data, 1, *key, out.ctypes.data)
    assert tuple(out.tolist()) == words


@given(data=st.data())
@settings(max_examples=60)
@pytest.mark.parametrize("name", FORMS)
def test_draws_equal_the_spelled_out_order(name: str, data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 2, 15, 16, 17, 100, 1500]))
    logits = randn(4, vocab, seed=data.draw(st.integers(0, 1000))) * data.draw(
        st.sampled_from([0.0, 0.5, 3.0, 30.0])
    )
    if data.draw(st.booleans()):  # many ties
        logits = logits.round()
    if data.draw(st.booleans()):
        logits[:, :: data.draw(st.sampled_from([2, 3, 7]))] = -torch.inf
    batch = rows_of(
        4,
        data.draw(st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.0, 1e6])),
        data.draw(st.sampled_from([0, 1, 2, 10, 10_000])),
        data.draw(st.sampled_from([0.0, 1e-6, 0.3, 0.9, 0.999999, 1.0])),
        data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        data.draw(st.integers(0, 2**62)),
    )
    madd = exact.fused if name == "native" else exact.separate
    expected = [
        exact.sample_row(
            logits[i],
            float(batch.temperature[i]),
            int(batch.top_k[i]),
            float(batch.top_p[i]),
            float(batch.min_p[i]),
            lambda ids, i=i: exact.gumbel(
                batch.seed[i], batch.choice[i].long(), batch.position[i].long(), ids, madd
            ),
            madd,
        )
        for i in range(4)
    ]
    drawn = backend(name).sample(logits, batch)
    assert drawn.tolist() == expected
    order = data.draw(st.permutations(range(4)))
    assert backend(name).sample(logits[order].contiguous(), pick(batch, order)).tolist() == [
        expected[i] for i in order
    ]


def test_native_draws_do_not_depend_on_threads_or_company() -> None:
    logits = randn(64, 49_152, seed=3) * 2.5
    parameters = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 99, 0.9, 0.02)]
    for values in parameters:
        batch = rows_of(64, *values)
        drawn = [backend("native", threads).sample(logits, batch) for threads in (1, 2, 3)]
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(drawn[0], drawn[2])
        one = backend("native").sample(logits[17:18], pick(batch, [17]))
        assert int(one) == int(drawn[0][17])
        row = 5
        assert int(drawn[0][row]) == reference.sample(
            logits[row],
            *values,
            int(batch.seed[row]),
            int(batch.choice[row]),
            int(batch.position[row]),
        )


@pytest.mark.parametrize("varying", ["seed", "choice", "position"])
@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_distribution_is_that_of_the_softmax(name: str, varying: str) -> None:
    # Chi-square with 7 degrees of freedom: 24.3 is exceeded once in a thousand.
    rows = 3000 if name != "torch" else 600
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.1, 1.5])
    batch = rows_of(rows)
    index = torch.arange(rows)
    columns = {"seed": torch.full((rows,), 7), "choice": index * 0, "position": index * 0}
    columns[varying] = index
    batch = SampleBatch(
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        min_p=batch.min_p,
        seed=columns["seed"],
        choice=columns["choice"].int(),
        position=columns["position"].int(),
    )
    drawn = backend(name).sample(logits.repeat(rows, 1), batch)
    counts = torch.bincount(drawn, minlength=8).double()
    expected = torch.softmax(logits.double(), 0) * rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3


@pytest.mark.parametrize("name", [*FORMS, "plain"])
def test_edge_values_of_the_parameters(name: str) -> None:
    ops = backend(name)
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0, -torch.inf]]).repeat(200, 1)
    top = {1, 2}
    assert set(ops.sample(logits, rows_of(200, temperature=0.0)).tolist()) == {1}
    assert set(ops.sample(logits, rows_of(200, temperature=1e-4)).tolist()) == top
    assert set(ops.sample(logits, rows_of(200, top_k=1)).tolist()) == {1}
    assert set(ops.sample(logits, rows_of(200, top_k=2)).tolist()) == top
    assert set(ops.sample(logits, rows_of(200, top_p=0.0)).tolist()) == {1}
    assert set(ops.sample(logits, rows_of(200, min_p=1.0)).tolist()) == top
    hot = ops.sample(logits, rows_of(200, temperature=1e6))
    assert set(hot.tolist()) == {0, 1, 2, 3}  # never the forbidden id


@pytest.mark.parametrize("name", FORMS)
def test_rows_without_a_distribution_give_some_valid_id(name: str) -> None:
    ops = backend(name)
    rows = torch.full((5, 50), torch.nan)
    rows[1] = -torch.inf
    rows[2, 7] = torch.inf
    rows[3, 9] = 1.0
    rows[4] = torch.inf
    for batch in (rows_of(5), rows_of(5, top_k=3, top_p=0.5), rows_of(5, temperature=0.0)):
        drawn = ops.sample(rows, batch)
        assert drawn.tolist()[2:4] == [7, 9]
        assert ((drawn >= 0) & (drawn < 50)).all()


@given(
    rows=st.integers(1, 9), vocab=st.integers(1, 3000), seed=st.integers(0, 99), ties=st.booleans()
)
@settings(max_examples=40)
@pytest.mark.parametrize("name", FORMS)
def test_argmax_and_log_sum_exp(name: str, rows: int, vocab: int, seed: int, ties: bool) -> None:
    ops = backend(name)
    logits = randn(rows, vocab, seed=seed) * 6
    logits = logits.round() if ties else logits
    lowest = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert ops.argmax(logits).tolist() == lowest
    value = ops.log_sum_exp(logits)
    torch.testing.assert_close(value.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=2e-6)
    alone = torch.cat([ops.log_sum_exp(row[None].contiguous()) for row in logits])
    assert same_bits(value, alone)
    if name == "native":
        assert same_bits(value, reference.log_sum_exp(logits))
        assert same_bits(value, backend("native", 3).log_sum_exp(logits))


@pytest.mark.parametrize("name", FORMS)
def test_log_sum_exp_at_the_edges(name: str) -> None:
    rows = torch.full((3, 40), -torch.inf)
    rows[1, 3] = 2.5
    rows[2, 0] = torch.inf
    assert backend(name).log_sum_exp(rows).tolist() == [-math.inf, 2.5, math.inf]
