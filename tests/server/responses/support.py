"""A model that says what it is told to: the text behind the last ">>>" of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from lockstep.async_llm import AsyncLLM
from lockstep.config import EngineConfig
from lockstep.engine.client import EngineClient
from lockstep.engine.loop import Engine
from lockstep.settings import engine_config
from tests.fakes import FakeExecutor
from tests.server.support import smollm2_tokenizer

MARK, END = ">>>", "<|im_end|>"


@lru_cache(maxsize=64)
def reply_to(prompt: tuple[int, ...]) -> list[int]:
    tokenizer = smollm2_tokenizer()
    text = tokenizer.decode(prompt, skip_special_tokens=False).rpartition(MARK)[2]
    return tokenizer.encode(text.partition(END)[0], add_special_tokens=False)


def obedient(history: Sequence[int], prompt_len: int, position: int) -> int:
    reply = reply_to(tuple(history[:prompt_len]))
    return reply[position] if position < len(reply) else smollm2_tokenizer().eos_ids[0]


def make_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> Engine:
    executor = FakeExecutor(vocab_size=49152, max_context=4096, num_slabs=1024, script=obedient)
    executor.keep_plans = False
    return Engine(executor, config.scheduler, config.cache)


def obedient_llm() -> AsyncLLM:
    client = EngineClient(
        engine_config("obedient"),
        factory="tests.server.responses.support:make_engine",
        heartbeat_seconds=0.1,
    )
    return AsyncLLM.from_client(client, smollm2_tokenizer())
