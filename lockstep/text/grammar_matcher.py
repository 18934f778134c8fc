"""Grammars at work: a mask over the vocabulary before each token of a sequence.

llguidance (Rust) does the parsing. This module decides with which limits, on which thread,
and what its answers mean for a sequence. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.text.grammar import OPTIONS, json_rule, to_lark
from lockstep.text.grammar_schema import children
from lockstep.text.tokenizer import Tokenizer
from lockstep.types import Grammar, LockstepError, RequestError

if TYPE_CHECKING:  # loaded with the first grammar: most processes never see one
    from llguidance import LLMatcher, TokenizerWrapper

COMPILE_SECONDS = 10.0
MASK_SECONDS = 10.0
_CACHED = 64  # compiled grammars, and complaints about others
_STACK_BYTES = 256 * 1024 * 1024  # address space; only what recursion touches becomes memory
_MAX_STUCK = 2  # threads left to themselves at most


class _Tokens:
    """A tokenizer in the form that llguidance asks for.

    Args:
        size: rows of the model's head; ids without a token get no bytes and are never allowed.
    """

    is_tokenizer_wrapper = True  # all that the library looks at

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)


class _Workers:
    """Threads with a deep stack that run jobs in order of arrival.

    The library lets go of the interpreter while it works, so jobs run beside a forward
    pass. A thread that a job does not give back is left to itself and replaced.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self.abandoned = 0
        self._start()

    def _start(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        before = threading.stack_size(_STACK_BYTES)
        try:
            for index in range(self._count):
                threading.Thread(
                    target=_work, args=(self._jobs,), name=f"{self._name}-{index}", daemon=True
                ).start()
        finally:
            threading.stack_size(before)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def replace(self) -> None:
        """Start anew after a job that does not end; those behind it move over."""
        self.abandoned += 1
        jobs = self._jobs
        self._start()
        while not jobs.empty():
            job = jobs.get()
            if job is not None:
                self._jobs.put(job)
        for _ in range(self._count):
            jobs.put(None)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


class CompiledGrammar:
    """A grammar ready for sequences to start in; never advanced itself.

    Every sequence gets a copy of it in the same state, so that what a sequence may draw is a
    function of its own tokens, limits of the library included.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._matcher = matcher
        self.vocabulary = vocabulary

    def start(self, stop_ids: Sequence[int]) -> GrammarState:
        """A sequence's place at the grammar's beginning.

        Args:
            stop_ids: of the request. Those that are control tokens may be drawn where the
                grammar may end; ordinary ones are text to the grammar like any other.
        """
        ends = [token for token in stop_ids if token in self.vocabulary.controls]
        return GrammarState(self._matcher.deep_copy(), self.vocabulary, ends)


class PendingMask:
    """The ids that a grammar allows next, under computation by a worker."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._ready = threading.Event()
        self._words: NDArray[np.int32] | None = None
        self._error = ""

    def run(self) -> None:
        """The worker's part."""
        try:
            self._words = self._state.compute()
        except Exception as error:  # whatever it was, the engine must not wait for ever
            self._error = f"{type(error).__name__}: {error}"
        self._ready.set()

    def words(self) -> NDArray[np.int32]:
        """Bit t % 32 of word t // 32 is set if id t may come next. Waits for the worker.

        All zero where nothing may: the state then says why.
        """
        if not self._ready.wait(MASK_SECONDS):
            self._state.abandon()
            self._error = f"the grammar's next tokens took more than {MASK_SECONDS:g} s to find"
        if self._error:
            self._state.fail(self._error)
        if self._words is None or self._error:
            return np.zeros(self._state.vocabulary.words, np.int32)
        return self._words


class GrammarState:
    """Where one sequence stands in its grammar: a function of its output tokens alone.

    Kept while the sequence is preempted, since it needs nothing of the device. `pending`
    and `advance` alternate; one thread calls them.

    Attributes:
        may_end: whether the text so far is complete, as of the last mask.
        done: whether nothing can follow the text so far, which is complete.
        error: why the sequence cannot go on, "" while it can.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: GrammarVocabulary, ends: Sequence[int]
    ) -> None:
        self.vocabulary = vocabulary
        self.may_end = False
        self.done = False
        self.error = ""
        self._matcher = matcher
        self._ends = ends

    def pending(self) -> PendingMask:
        """Start computing what may come next."""
        mask = PendingMask(self)
        self.vocabulary.masks.submit(mask.run)
        return mask

    def compute(self) -> NDArray[np.int32]:
        """The mask of this moment, on the calling thread; see `PendingMask.words`."""
        vocabulary = self.vocabulary
        words = np.zeros(vocabulary.words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            self.fail(_EMPTY if reason.startswith("NoExtension") else reason)
            return np.zeros_like(words)
        self.may_end = has(words, vocabulary.end)
        for token in vocabulary.ends:
            words[token >> 5] &= ~_bit(token)
        if self.may_end:
            for token in self._ends:
                words[token >> 5] |= _bit(token)
        return words

    def advance(self, token: int) -> None:
        """Take a token that the last mask allowed and that does not end the sequence."""
        if self.error:
            return
        if not self._matcher.consume_token(token):
            self.fail(_first_line(self._matcher.get_error()))
        elif self._matcher.is_stopped():
            self.done = self._matcher.is_accepting()
            if not self.done:
                self.fail(f"the grammar stopped ({self._matcher.stop_reason()})")

    def fail(self, reason: str) -> None:
        """Note why the sequence cannot go on; the first reason stays."""
        self.error = self.error or f"grammar: {reason}"

    def abandon(self) -> None:
        """Leave the worker that does not come back, and the matcher that it holds."""
        self.vocabulary.masks.replace()


class GrammarVocabulary:
    """What the matchers of one model share: the library's trie of tokens, limits, and threads.

    Attributes:
        words: 32-bit words of a mask: a bit for each row of the model's head.
        controls: control tokens. ends: ids at which the model ends a text; end: one of them.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self.words = -(-size // 32)
        self.controls = tokenizer.special_ids | set(tokenizer.eos_ids)
        self.ends = tokenizer.eos_ids
        self.end = tokenizer.eos_ids[0]
        self.trie = LLTokenizer(
            cast("TokenizerWrapper", _Tokens(tokenizer, size)),
            n_vocab=size,
            eos_token=list(tokenizer.eos_ids),
        )
        self.limits = LLParserLimits(
            max_items_in_row=2_000,  # its time grows with the square
            initial_lexer_fuel=400_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        self.masks = _Workers(1, "masks")


class GrammarCompiler:
    """Compiles grammars for one model, on a thread of its own, and keeps the last ones.

    Args:
        tokenizer: called once, on that thread, when the first grammar comes.
        size: rows of the model's head.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], size: int) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._vocabulary: GrammarVocabulary | None = None
        self._workers: _Workers | None = None
        self._kept: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()

    def prepare(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The compiled grammar, or the `RequestError` that it meets, once there is either."""
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.source}".encode()).digest()
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = Future()
            self._submit(grammar, found)
            if len(self._kept) > _CACHED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """As `prepare`, but waits.

        Raises:
            RequestError: the grammar is malformed, too large, or takes too long.
        """
        future = self.prepare(grammar)
        try:
            return future.result(COMPILE_SECONDS)
        except TimeoutError:
            self.give_up(future)
            return future.result(0)

    def give_up(self, future: Future[CompiledGrammar]) -> None:
        """Fail a compilation that has taken more than `COMPILE_SECONDS`, and leave its thread;
        does nothing to one that has ended."""
        if future.done() or self._workers is None:
            return
        future.set_exception(
            RequestError(
                f"grammar: it takes more than {COMPILE_SECONDS:g} s to compile",
                field="grammar",
                code="grammar_too_complex",
            )
        )
        if self._workers.abandoned < _MAX_STUCK:
            self._workers.replace()

    def _submit(self, grammar: Grammar, future: Future[CompiledGrammar]) -> None:
        if self._workers is None:
            self._workers = _Workers(1, "grammars")

        def job() -> None:
            try:
                result = self._compile(grammar)
            except LockstepError as error:
                outcome: LockstepError | CompiledGrammar = error
            except Exception as error:
                outcome = RequestError(f"grammar: {type(error).__name__}: {error}", field="grammar")
            else:
                outcome = result
            if future.done():  # given up
                return
            if isinstance(outcome, CompiledGrammar):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

        self._workers.submit(job)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher

        lark = to_lark(grammar)
        if self._vocabulary is None:
            tokenizer = self._tokenizer()
            if not tokenizer.eos_ids:
                raise RequestError(
                    "grammar: this model's tokenizer names no end of sequence", field="grammar"
                )
            self._vocabulary = GrammarVocabulary(tokenizer, self._size)
        vocabulary = self._vocabulary
        matcher = LLMatcher(
            vocabulary.trie,
            LLMatcher.grammar_from_lark(lark),
            log_level=0,
            limits=vocabulary.limits,
        )
        if matcher.is_error():
            where = _place(grammar, vocabulary) if grammar.kind == "json_schema" else ""
            told = _told(grammar, matcher.get_error())
            raise RequestError(f"grammar: {where}{told}", field="grammar")
        compiled = CompiledGrammar(matcher, vocabulary)
        first = compiled.start(())
        if not first.compute().any() and not first.may_end:
            raise RequestError(first.error or f"grammar: {_EMPTY}", field="grammar")
        return compiled


def has(words: NDArray[np.int32], token: int) -> bool:
    """Whether a mask allows a token."""
    return bool((int(words[token >> 5]) >> (token & 31)) & 1)


def _bit(token: int) -> np.int32:
    return np.int32(((1 << (token & 31)) ^ 0x80000000) - 0x80000000)  # as a signed word


_MAX_TRIES = 100  # schemas compiled to find the one at fault
_EMPTY = "it allows no text at all"
_OWN_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


def _told(grammar: Grammar, message: str) -> str:
    """The library's complaint without the lines that `to_lark` has added."""
    if grammar.kind == "ebnf":
        lines = [line for line in message.splitlines() if OPTIONS not in line]
        return "\n".join(lines).strip()[:1000]
    message = message.partition("\n   1 | ")[0].replace(" (in regex)", "")
    message = _OWN_PLACE.sub("", message)
    if message.startswith("oneOf "):  # its advice is an option that clients do not have
        return "the branches of oneOf cannot be told apart; anyOf is enforced whatever they are"
    return message.strip()[:1000]


def _place(grammar: Grammar, vocabulary: GrammarVocabulary) -> str:
    """The innermost node of a schema that meets the complaint that the whole of it meets."""
    from llguidance import LLMatcher

    root = json.loads(grammar.source)
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    left = _MAX_TRIES

    def complaint(schema: Any) -> str:
        nonlocal left
        left -= 1
        if not isinstance(schema, dict) or left < 0:
            return ""
        lark = f"start: {json_rule({**shared, **schema})}\n{OPTIONS}\n"
        return _told(grammar, LLMatcher.validate_grammar(lark, limits=vocabulary.limits))

    path, schema, told = "", root, complaint(root)
    while told:
        for child, where in children(schema, path):
            if complaint(child) == told:
                path, schema = where, child
                break
        else:
            break
    return f"JSON schema, at {path}: " if path else ""


def _first_line(message: str) -> str:
    return message.partition("\n")[0].strip()[:300]
