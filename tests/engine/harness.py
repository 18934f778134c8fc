"""An engine on the exact fake, run to the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lockstep.config import CacheConfig, SchedulerConfig
from lockstep.engine.loop import Engine
from lockstep.types import Request, SamplingParams, SequenceOutput
from tests.fakes import FakeExecutor


def engine(executor: FakeExecutor | None = None, *, keep: bool = True, **settings: int) -> Engine:
    return Engine(
        executor or FakeExecutor(), SchedulerConfig(**settings), CacheConfig(prefix_caching=keep)
    )


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int | None = 4,
    *,
    priority: int = 0,
    salt: str = "",
    stop_ids: tuple[int, ...] = (),
    bad_ids: tuple[tuple[int, ...], ...] = (),
    **params: object,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **{"seed": 0, **params})  # type: ignore[arg-type]
    return Request(name, tuple(prompt), sampling, stop_ids, bad_ids, priority, salt)


def drain(target: Engine) -> dict[tuple[str, int], list[SequenceOutput]]:
    """Step until nothing is left; the outputs of every choice in order."""
    found: dict[tuple[str, int], list[SequenceOutput]] = defaultdict(list)
    while target.has_work():
        for output in target.step():
            found[(output.request, output.choice)].append(output)
        target.check_integrity()
    assert target.stats().pages_used == 0
    return found


def tokens(outputs: Sequence[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]
