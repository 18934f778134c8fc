"""Every fault is found within a stated number of probes, and clean deployments are left alone."""

from __future__ import annotations

import pytest

from lockstep.verify.drift.baseline import Baseline, BaselineError, take_baseline
from lockstep.verify.drift.measure import ORDER, TOOLS
from lockstep.verify.drift.monitor import Monitor, State, Status
from lockstep.verify.drift.probes import default_probes
from lockstep.verify.drift.watch import ask_round, rounds
from tests.verify.proxy import (
    BrokenToolJSON,
    DroppedTop,
    Fault,
    FaultProxy,
    PerturbedLogits,
    SwappedTemplate,
    TruncatedContext,
    Unreadable,
    before,
)
from tests.verify.toy import Toy

PROBES = default_probes()
THREE = {"a": 0.5, "b": 0.492, "c": 0.008}
_baselines: dict[float, Baseline] = {}


async def baseline_of(toy: Toy) -> Baseline:
    if toy.noise not in _baselines:
        async with before(toy.vendor()).endpoint() as endpoint:
            source = rounds(endpoint, PROBES)
            _baselines[toy.noise] = await take_baseline(source, PROBES, 64, "toy", "today")
    return _baselines[toy.noise]


async def until(proxy: FaultProxy, monitor: Monitor, most: int, timeout: float = 60.0) -> Status:
    """Watch until the state is not ok, at most so many rounds."""
    async with proxy.endpoint(timeout=timeout) as endpoint:
        for number in range(most):
            status = monitor.observe(await ask_round(endpoint, PROBES, number))
            if status.state is not State.OK:
                break
    return status


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("fault", "streams", "most"),
    [
        (PerturbedLogits(scale=0.3), None, 180),
        (PerturbedLogits(scale=0.3, share=0.16), None, 300),
        (DroppedTop(steps=0.01), {ORDER}, 400),
        (SwappedTemplate(), None, 180),
        (BrokenToolJSON(), {TOOLS}, 210),
        (TruncatedContext(words=5), None, 180),
    ],
    ids=["perturbed", "perturbed-16%", "dropped-top-1%", "template", "tool-json", "truncated"],
)
async def test_j02_a_fault_is_found_within_so_many_probes(
    fault: Fault, streams: set[str] | None, most: int, noise: float
) -> None:
    toy = Toy(noise=noise)
    monitor = Monitor(PROBES, await baseline_of(toy))
    status = await until(before(toy.vendor(), fault), monitor, most // len(PROBES) + 2)
    assert status.state is State.CHANGED
    assert status.changed[0].probes <= most
    if streams is not None:
        assert streams <= {alarm.stream for alarm in status.changed}


async def test_j02_a_replica_with_a_small_share_of_the_traffic_is_named() -> None:
    """0.8% of the traffic: 1,500 probes hold 12 of its answers."""
    toy = Toy(noise=0.05)
    fault = PerturbedLogits(scale=0.5, replica="c")
    monitor = Monitor(PROBES, await baseline_of(toy))
    status = await until(before(toy.vendor(), fault, replicas=THREE), monitor, 50)
    assert status.state is State.CHANGED
    assert status.replicas == ("c",)
    assert status.probes <= 1500
    share, low, _ = monitor.shares()["c"]
    assert share > 0.5  # some probes show nothing of what is perturbed
    assert low > monitor.shares()["a"][2]


@pytest.mark.parametrize(("share", "most"), [(0.16, 60), (0.01, 600), (0.001, 6000)])
async def test_exact_finds_the_first_answer_that_differs(share: float, most: int) -> None:
    """On a deterministic server one difference is proof: ln(20) / share probes in 19 of 20 cases,
    plus those that the fault cannot touch."""
    toy = Toy()
    monitor = Monitor(PROBES, await baseline_of(toy), exact=True)
    fault = PerturbedLogits(share=share)
    status = await until(before(toy.vendor(), fault), monitor, most // len(PROBES))
    assert status.state is State.CHANGED
    assert all(alarm.stream.startswith(("exact/", "replica/")) for alarm in status.changed)
    assert status.replicas == ("a",)


async def test_exact_is_refused_where_answers_differ_already() -> None:
    baseline = await baseline_of(Toy(noise=0.05))
    with pytest.raises(BaselineError, match="equal answers"):
        Monitor(PROBES, baseline, exact=True)


@pytest.mark.parametrize("noise", [0.0, 0.05])
async def test_a_clean_server_stays_ok(noise: float) -> None:
    toy = Toy(noise=noise)
    monitor = Monitor(PROBES, await baseline_of(toy), exact=noise == 0.0)
    status = await until(before(toy.vendor()), monitor, 20)
    assert status.state is State.OK
    assert status.round == 20
    assert not status.suspicious


@pytest.mark.parametrize(
    ("how", "share", "most"),
    [("html", 1.0, 1), ("status", 0.6, 3), ("cut", 0.2, 6), ("hang", 1.0, 1)],
)
async def test_unreadable_is_a_state_of_its_own(how: str, share: float, most: int) -> None:
    toy = Toy()
    monitor = Monitor(PROBES, await baseline_of(toy))
    proxy = before(toy.vendor(), Unreadable(how=how, share=share))
    status = await until(proxy, monitor, most, timeout=0.1 if how == "hang" else 60.0)
    assert status.state is State.UNREADABLE
    assert status.unread > 0
    assert not status.changed
    assert not status.suspicious
    async with before(toy.vendor()).endpoint() as endpoint:
        healed = monitor.observe(await ask_round(endpoint, PROBES, 99))
    assert healed.state is State.OK


async def test_j02_sticky_routing_is_visible() -> None:
    found = {}
    for sticky in (False, True):
        proxy = before(Toy().vendor(), replicas={"a": 0.5, "b": 0.5}, sticky=sticky)
        monitor = Monitor(PROBES, await baseline_of(Toy()))
        await until(proxy, monitor, 8)
        found[sticky] = monitor.routing.stickiness
        assert set(monitor.routing.seen) == {"a", "b"}
        assert dict(monitor.routing.seen) == proxy.said
    assert found[True] == 1.0
    assert found[False] is not None
    assert abs(found[False]) < 0.4


async def test_one_faulty_replica_of_two_and_an_honest_fault_free_one() -> None:
    toy = Toy(noise=0.05)
    fault = PerturbedLogits(scale=0.5, replica="b", share=0.5)
    replicas = {"a": 0.5, "b": 0.5}
    monitor = Monitor(PROBES, await baseline_of(toy))
    status = await until(before(toy.vendor(), fault, replicas=replicas), monitor, 12)
    for number in range(12, 20):  # until it is named, if the alarm came without a name
        if status.replicas:
            break
        async with before(toy.vendor(), fault, replicas=replicas, seed=number).endpoint() as one:
            status = monitor.observe(await ask_round(one, PROBES, number))
    assert status.replicas == ("b",)
