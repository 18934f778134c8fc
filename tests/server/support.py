"""A real server and a real engine process around an executor that needs no model.

The fake model is a parrot: it writes its prompt's ordinary tokens again, then ends.
Model names choose how it misbehaves, see `make_engine`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from lockstep.async_llm import AsyncLLM
from lockstep.branch import Branch, read_branch
from lockstep.config import EngineConfig, ServerConfig
from lockstep.engine.client import EngineClient
from lockstep.engine.loop import Engine
from lockstep.server.serve import base_url, listen, make_server
from lockstep.settings import engine_config
from lockstep.text import Tokenizer
from lockstep.text.grammar_matcher import GrammarCompiler
from lockstep.types import ModelError
from lockstep.weights import open_checkpoint
from tests.branch_fake import BranchExecutor
from tests.fakes import FakeExecutor

FACTORY = "tests.server.support:make_engine"
MAX_CONTEXT = 512


@cache
def smollm2_tokenizer() -> Tokenizer:
    return open_checkpoint("smollm2").tokenizer()


def parrot(history: Sequence[int], prompt_len: int, position: int) -> int:
    tokenizer = smollm2_tokenizer()
    words = [token for token in history[:prompt_len] if token not in tokenizer.special_ids]
    return words[position] if position < len(words) else tokenizer.eos_ids[0]


def speaker(history: Sequence[int], prompt_len: int, position: int) -> int:
    """Writes what the last message of the user says, special tokens too; without messages as
    the parrot."""
    begin, end = (smollm2_tokenizer().token_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert begin is not None
    assert end is not None
    begins = [index for index, token in enumerate(history[:prompt_len]) if token == begin]
    if len(begins) < 2:
        return parrot(history, prompt_len, position)
    said = history[begins[-2] + 3 : begins[-1]]  # behind the role and its line break
    said = said[: list(said).index(end)]
    return said[position] if position < len(said) else end


BRANCH_BYTES = 3 << 20


class JudgedExecutor(BranchExecutor):
    """Says what its branches hold of its memory."""

    def load_branch(self, folder: str) -> Branch:
        return replace(super().load_branch(folder), weight_bytes=BRANCH_BYTES)


def make_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> Engine:
    """An engine for a model name: its parts after "-" say what goes wrong.

    slow: a step takes 30 ms. tiny: a pool for ten short sequences. fails: a step with
    token id 13 in it raises. kills: a step with token id 14 kills the process. hangs: a
    step with token id 15 never ends. refuses, dies, raises: the start fails. speaks: the
    model writes what the last message of the user says. judged: branches can be loaded.
    """
    name = config.model.name
    progress("loading", 0.5)
    if "refuses" in name:
        raise ModelError(f"{name}: tensor model.norm.weight is missing")
    if "raises" in name:
        raise RuntimeError("no such device")
    if "sleeps" in name:
        time.sleep(20)
    if "fragile" in name and Path(tempfile.gettempdir(), "broken").exists():
        raise RuntimeError("no such device")
    if "dies" in name:
        time.sleep(0.3)  # what was sent before a death is only read if it got away
        os.kill(os.getpid(), signal.SIGKILL)
    layers = [read_branch(folder).layers for _, folder in config.branches.load]
    layers += config.branches.layers
    make = partial(JudgedExecutor, judge=told, layers=layers) if "judged" in name else FakeExecutor
    executor = make(
        vocab_size=49152,
        max_context=MAX_CONTEXT,
        num_slabs=20 if "tiny" in name else 1024,
        script=speaker if "speaks" in name else parrot,
        latency=0.03 if "slow" in name else 0.0,
        fails=lambda plan: any(_bad(name, token) for run in plan.runs for token in run.tokens),
    )
    executor.keep_plans = False
    grammars = GrammarCompiler(smollm2_tokenizer, executor.vocab_size)
    return Engine(
        executor, config.scheduler, config.cache, grammars=grammars, branches=config.branches
    )


def told(tokens: Sequence[int], begins: int, branch: Branch) -> tuple[float, ...]:
    """What a fake branch says: 2 for every time that an option's name stands in what it reads."""
    text = smollm2_tokenizer().decode(list(tokens))
    return tuple(2.0 * text.count(option) for option in branch.options)


def _bad(name: str, token: int) -> bool:
    if token == 14 and "kills" in name:
        os.kill(os.getpid(), signal.SIGKILL)
    if token == 15 and "hangs" in name:
        time.sleep(3600)
    return token == 13 and "fails" in name


def fake_client(
    name: str = "parrot", hang_seconds: float = 600.0, **settings: object
) -> EngineClient:
    return EngineClient(
        engine_config(name, **settings),  # type: ignore[arg-type]
        factory=FACTORY,
        hang_seconds=hang_seconds,
        heartbeat_seconds=0.1,
    )


def fake_llm(name: str = "parrot", hang_seconds: float = 600.0, **settings: object) -> AsyncLLM:
    return AsyncLLM.from_client(fake_client(name, hang_seconds, **settings), smollm2_tokenizer())


class ServerThread:
    """A server on a port of its own, on a loop in a thread."""

    def __init__(self, make_llm: Callable[[], AsyncLLM], **settings: object) -> None:
        self._make_llm = make_llm
        self._config = ServerConfig(port=0, **settings)  # type: ignore[arg-type]
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._failure: BaseException | None = None
        self.llm: AsyncLLM
        self.loop: asyncio.AbstractEventLoop | None = None
        self.url = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        assert self._ready.wait(60)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            self.llm = self._make_llm()
            await self.llm.start()
            self._server = make_server(self.llm, self._config)
            listener = listen(self._config)
            self.url = base_url(listener, self._config)
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            await self.llm.close()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- questions to branches ---------------------------------------------------------------------

ASKED = "I can answer answer this from the documents"


def ask(http: httpx.Client, *questions: Any, model: str = "judge") -> httpx.Response:
    body = {"model": model, "input": ASKED, "questions": list(questions)}
    return http.post("/v1/decisions", json=body)


def choice(*values: Any, **more: Any) -> dict[str, Any]:
    options = [value if isinstance(value, dict) else {"value": value} for value in values]
    return {"type": "choice", "instructions": "?", "choices": options, **more}


def levels(*labels: str) -> dict[str, Any]:
    return {"type": "score", "instructions": "?", "levels": [{"label": one} for one in labels]}
