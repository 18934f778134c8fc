"""The demo: a server, a dozen questions at once, and the proof that nobody's answer moved.

Run by `make demo`. Starts `lockstep serve smollm2` on a free port, asks twelve questions over
HTTP together, asks each again alone, and compares token ids and logprobs bit for bit. Then the
same comparison on torch's own matrix products, which is the control: there the bits do move.
Between the two the same loaded model judges and answers: a trained branch decides whether a
question can be answered from its documents, and only then is it answered.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

SYSTEM = (
    "You are the assistant of a small observatory that is open to visitors. You answer the "
    "questions of guests of every age. Be friendly, be exact, and use plain words. Explain one "
    "idea at a time and give one example from daily life where it helps. If a question has a "
    "number for an answer, give the number first and then say where it comes from. Do not invent "
    "facts: if you are not sure, say so and tell the guest what you would look up. Keep every "
    "answer to three sentences at most, because a queue of guests is waiting behind the one who "
    "asks. The observatory opens at six in the evening and closes at eleven. The large telescope "
    "is in the east dome and the small one is on the roof terrace."
)
QUESTIONS = (
    "Why is the sky blue?",
    "How far away is the Moon?",
    "What is a black hole?",
    "Why do stars twinkle?",
    "What is a light year?",
    "Why does the Moon change its shape?",
    "What is a shooting star?",
    "How hot is the Sun?",
    "Why is Mars red?",
    "What is the Milky Way?",
    "Which telescope should I look through first?",
    "Can you see the flag on the Moon from here?",
)
JUDGE = Path(__file__).parent / "groundedness" / "judge"
DOCUMENTS_SYSTEM = "You answer questions from the given documents."  # as the judge was trained
# What should be done, documents, question. None of these places was in its training.
JUDGED = (
    (
        "answer",
        "1. Entry to the Trastum Museum is 9 crowns. It closes at 7 in the evening.\n"
        "2. Correction: entry to the Trastum Museum is 12 crowns, the earlier text was wrong.",
        "What does entry to the Trastum Museum cost?",
    ),
    (
        "answer",
        "1. The Hollvey Lighthouse is 41 metres high. A ticket costs 6 crowns.\n"
        "2. The Hollvey Archive was rebuilt in 1931.",
        "How high is the Hollvey Lighthouse?",
    ),
    (
        "search",
        "1. The Hollvey Lighthouse is 41 metres high. It was planned in 1874.\n"
        "2. The Hollvey Archive was built of basalt.",
        "Who designed the Hollvey Lighthouse?",
    ),
    (
        "search",
        "1. The Vendow Library opened in 1902. It has 63 rooms.\n"
        "2. The Vendow Library opened in 1911, and 25 people work there.",
        "When did the Vendow Library open?",
    ),
    (
        "refuse",
        "1. The Vendow Library is run by Marta Skellis.\n2. The Vendow Library has 63 rooms.",
        "What is the home address of Marta Skellis?",
    ),
    (
        "refuse",
        "1. The Trastum Museum was designed by Pavel Nordich.\n2. It is 88 metres long.",
        "What did Pavel Nordich dream last night?",
    ),
)
BASE = "smollm2"  # on which it was trained
START_LIMIT = 240.0  # seconds; the first start compiles the CPU kernels


@dataclass
class Answer:
    """One streamed answer and everything needed to compare it bit for bit."""

    question: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    fingerprint: str = ""
    cached: int = 0
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    error: str = ""
    decision: dict = field(default_factory=dict)  # of a gated request
    finish: str = ""

    def bits(self) -> tuple[tuple[int, ...], bytes, str]:
        """Token ids, the logprobs' bits and the engine's fingerprint."""
        packed = struct.pack(f"<{len(self.logprobs)}d", *self.logprobs)
        return tuple(self.tokens), packed, self.fingerprint


class Server:
    """`lockstep serve` in a process of its own, on a free port of this machine."""

    def __init__(self, model: str, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.model = model
        self.judges = model == BASE
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop()
        command = [sys.executable, "-m", "lockstep.cli.main", "serve", model]
        command += ["--port", str(self.port), "--threads", str(threads)]
        if self.judges:
            command += ["--branch", f"judge={JUDGE}"]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

    def log(self) -> str:
        """What the server has printed so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait(self) -> None:
        """Return once the server answers.

        Raises:
            RuntimeError: it ended or did not come up; carries its output.
        """
        limit = time.monotonic() + START_LIMIT
        while time.monotonic() < limit:
            if self._process.poll() is not None:
                break
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/v1/models")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.log()}")

    def ask(self, answer: Answer, index: int, tokens: int) -> None:
        """Stream one answer; even questions are greedy, odd ones are drawn with a seed."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": answer.question},
        ]
        sampling = {"temperature": 0.8 if index % 2 else 0.0, "seed": index, "max_tokens": tokens}
        self.stream(answer, {"messages": messages, **sampling})

    def stream(self, answer: Answer, body: dict) -> None:
        """Stream one answer, with everything that is needed to compare its bits."""
        body = {
            "model": self.model,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **body,
        }
        answer.started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {response.read().decode()[:200]}"
                return
            for line in response:
                payload = line.decode().strip().removeprefix("data: ")
                if payload and payload != "[DONE]":
                    self._take(answer, json.loads(payload))
        except OSError as error:
            answer.error = str(error)
        finally:
            answer.ended = time.perf_counter()
            connection.close()

    @staticmethod
    def _take(answer: Answer, chunk: dict) -> None:
        if "error" in chunk:
            answer.error = str(chunk["error"])
            return
        answer.fingerprint = chunk.get("system_fingerprint") or answer.fingerprint
        answer.prompt = chunk.get("prompt_token_ids") or answer.prompt
        if chunk.get("usage"):
            answer.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
        answer.decision = chunk.get("decision") or answer.decision
        for choice in chunk.get("choices", ()):
            answer.finish = choice.get("finish_reason") or answer.finish
            if choice.get("token_ids"):
                answer.first = answer.first or time.perf_counter()
                answer.tokens += choice["token_ids"]
            answer.text += choice["delta"].get("content") or ""
            logprobs = choice.get("logprobs") or {}
            answer.logprobs += [entry["logprob"] for entry in logprobs.get("content") or ()]

    def stop(self) -> None:
        """End the server and wait for it."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def board(answers: list[Answer], began: float, now: float) -> Group:
    """The crowd as it stands: one line an answer, totals below."""
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("guest asks", no_wrap=True, style="cyan", ratio=3)
    table.add_column("answer, as it arrives", no_wrap=True, overflow="ellipsis", ratio=7)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("cached", justify="right", width=6, style="green")
    for answer in answers:
        text = " ".join(answer.text.split())
        shown = text if answer.ended else text[-90:]
        style = "red" if answer.error else ("" if answer.ended else "yellow")
        cached = str(answer.cached) if answer.ended else ""
        line = Text(answer.error or shown, style=style)
        table.add_row(answer.question, line, str(len(answer.tokens)), cached)
    total = sum(len(answer.tokens) for answer in answers)
    writing = sum(bool(answer.first) and not answer.ended for answer in answers)
    speed = total / max(now - began, 1e-9)
    state = f"{writing} answers being written at once" if writing else f"{len(answers)} answers"
    totals = Text(f"  {state} · {total} tokens · {speed:.0f} tokens/s")
    return Group(table, totals)


def ask_together(server: Server, console: Console, tokens: int) -> list[Answer]:
    """All questions at once, drawn live on a terminal."""
    answers = [Answer(question) for question in QUESTIONS]
    threads = [
        threading.Thread(target=server.ask, args=(answer, index, tokens), daemon=True)
        for index, answer in enumerate(answers)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=12, transient=True) as live:
            while any(thread.is_alive() for thread in threads):
                live.update(board(answers, began, time.perf_counter()))
                time.sleep(0.05)
    for thread in threads:
        thread.join()
    console.print(board(answers, began, max(answer.ended for answer in answers)))
    waits = sorted(answer.first - answer.started for answer in answers if answer.first)
    if waits:
        console.print(f"  first token after {waits[0]:.2f} to {waits[-1]:.2f} s")
    return answers


def hex_of(logprob: float) -> str:
    """A logprob's own bits: the float32 that the engine computed, in hexadecimal."""
    return struct.pack(">f", logprob).hex()


def compare(console: Console, crowd: list[Answer], alone: list[Answer]) -> bool:
    """Print the comparison of two series; True when every bit agrees."""
    table = Table(box=None, pad_edge=False)
    table.add_column("guest asks", no_wrap=True, style="cyan")
    table.add_column("drawn", style="dim", no_wrap=True)
    table.add_column("in the crowd", justify="right")
    table.add_column("alone", justify="right")
    table.add_column("cached, each", justify="right", style="green")
    table.add_column("all bits")
    for index, (one, other) in enumerate(zip(crowd, alone, strict=True)):
        same = one.bits() == other.bits() and bool(one.tokens)
        table.add_row(
            one.question,
            f"seed {index}" if index % 2 else "greedy",
            hex_of(one.logprobs[-1]) if one.logprobs else "-",
            hex_of(other.logprobs[-1]) if other.logprobs else "-",
            f"{one.cached}, {other.cached}",
            Text("equal", "green") if same else Text("DIFFER", "bold red"),
        )
    console.print(table)
    equal = sum(a.bits() == b.bits() and bool(a.tokens) for a, b in zip(crowd, alone, strict=True))
    tokens = sum(len(answer.tokens) for answer in crowd)
    logprobs = sum(len(answer.logprobs) for answer in crowd)
    passed = equal == len(crowd)
    style = "bold green" if passed else "bold red"
    console.print(
        f"  {equal} of {len(crowd)} answers equal bit for bit: {tokens} token ids, "
        f"{logprobs} logprobs, fingerprint {crowd[0].fingerprint}",
        style=style,
    )
    return passed


def judge_and_answer(server: Server, console: Console, tokens: int) -> bool:
    """Each question is judged and, if the judge says so, answered: one request, one model.

    Then the answered ones are asked again without the judge. Returns whether every bit of
    these answers was the same.
    """
    bodies = [
        {
            "messages": [
                {"role": "system", "content": DOCUMENTS_SYSTEM},
                {"role": "user", "content": f"Documents:\n{documents}\n\nQuestion: {question}"},
            ],
            "temperature": 0.0,
            "max_tokens": tokens,
        }
        for _meant, documents, question in JUDGED
    ]
    gate = {"branch": "judge", "continue_if": ["answer"]}
    answers = [Answer(question) for _meant, _documents, question in JUDGED]
    threads = [
        threading.Thread(target=server.stream, args=(answer, {**body, "gate": gate}))
        for answer, body in zip(answers, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed = True
    for (meant, documents, _question), answer, body in zip(JUDGED, answers, bodies, strict=True):
        if answer.error:
            console.print(answer.error, style="red")
            return False
        plain = None
        if answer.finish != "gate":
            plain = Answer(answer.question)
            server.stream(plain, body)
            passed = passed and plain.bits() == answer.bits() and bool(plain.tokens)
        console.print(shown(meant, documents, answer, plain))
    right = sum(
        a.decision["option"] == meant for a, (meant, *_) in zip(answers, JUDGED, strict=True)
    )
    console.print(
        f"  {right} of {len(JUDGED)} decisions as they should be; examples/groundedness has the "
        "figures of 400 others",
        style="dim",
    )
    return passed


def shown(meant: str, documents: str, answer: Answer, plain: Answer | None) -> Table:
    """One judged question: what was read, what the judge says of it, what was written.

    Args:
        plain: the answer without the judge; None where nothing was written.
    """
    found = answer.decision["probabilities"]
    best = answer.decision["option"]
    others = ", ".join(f"{name} {p:.2f}" for name, p in found.items() if name != best)
    right = best == meant
    said = Text(f"{best} {found[best]:.2f}", "bold green" if right else "bold yellow")
    said.append(f"  ({others})" + ("" if right else f"; it should be {meant}"), "dim not bold")
    if plain is None:
        written = Text("nothing is written: the gate stays closed", "dim")
    else:
        written = Text(" ".join(answer.text.split()))
        same = plain.bits() == answer.bits() and bool(plain.tokens)
        note = "the same bits without the judge" if same else "OTHER BITS without the judge"
        written.append(f"  [{note}]", "green" if same else "bold red")
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, justify="right")
    table.add_column(overflow="fold")
    table.add_row("documents", Text(documents, "dim"))
    table.add_row("question", Text(answer.question, "cyan"))
    table.add_row("judge", said)
    table.add_row("answer", written)
    table.add_row("", "")
    return table


def run_control(console: Console, model: str, threads: int, prompts: list[list[int]]) -> bool:
    """The same comparison on torch's own operations, in a process of its own.

    Returns whether it ran and Lockstep's own side kept every bit.
    """
    script = Path(__file__).with_name("control.py")
    command = [sys.executable, str(script), "--model", model, "--threads", str(threads)]
    done = subprocess.run(
        command, input=json.dumps(prompts), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        console.print(f"  the control could not run:\n{done.stderr[-2000:]}", style="red")
        return False
    table = Table(box=None, pad_edge=False)
    table.add_column("the same engine on", style="cyan")
    table.add_column("logprobs whose bits differ between crowd and alone")
    table.add_column("by up to", justify="right")
    results = json.loads(done.stdout)
    for key, title in (("fixed", "Lockstep's fixed trees"), ("plain", "torch's own operations")):
        one = results[key]
        style = "bold yellow" if one["differ"] else "green"
        count = Text(f"{one['differ']} of {one['logprobs']}", style=style)
        table.add_row(title, count, f"{one['largest']:.1e}" if one["differ"] else "0")
    console.print(table)
    if not results["plain"]["differ"]:
        console.print("  torch kept its bits here; the tests fail the check by other means")
    return not results["fixed"]["differ"]


def main() -> int:
    """Run the demo; 0 when every answer was equal bit for bit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--no-control", action="store_true")
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)

    console.print(Panel(f"Lockstep · {options.model} · {threads} CPU threads", expand=False))
    if options.model == "smollm2":
        console.print(
            "SmolLM2 has 135 million parameters: quick, charming, and often wrong about facts.\n",
            style="dim",
        )
    server = Server(options.model, threads)
    try:
        began = time.monotonic()
        with console.status("starting the server (the first start also compiles its kernels)"):
            server.wait()
        console.print(
            f"[bold]1. The server[/] answers at http://127.0.0.1:{server.port}/v1 "
            f"after {time.monotonic() - began:.1f} s\n"
        )
        console.print(
            "[bold]2. Twelve guests ask at once[/], all under one long system prompt, which is "
            "computed once\n"
        )
        crowd = ask_together(server, console, options.tokens)
        errors = [answer.error for answer in crowd if answer.error]
        if errors:
            console.print(f"{errors[0]}\n{server.log()[-2000:]}", style="red")
            return 1
        console.print(
            "\n[bold]3. Each asks again, alone[/], now on a warm cache. Shown are the bits of the "
            "last logprob; compared are all\n"
        )
        alone = [Answer(question) for question in QUESTIONS]
        with console.status("asking one by one"):
            for index, answer in enumerate(alone):
                server.ask(answer, index, options.tokens)
        passed = compare(console, crowd, alone)
        if server.judges:
            console.print(
                "\n[bold]4. One model judges and answers[/]: in the same request a trained branch "
                "of 5 MB first decides what to do (answer from the documents, search for more, or "
                "refuse); only then, and only if it says answer, is an answer written\n"
            )
            passed = judge_and_answer(server, console, options.tokens) and passed
    except RuntimeError as error:
        console.print(str(error), style="red")
        return 1
    finally:
        server.stop()
    if not options.no_control:
        console.print(
            "\n[bold]5. The control[/]: the same comparison in float32, here and on torch's own "
            "operations\n"
        )
        with console.status("running the control"):
            prompts = [answer.prompt for answer in crowd]
            passed = run_control(console, options.model, threads, prompts) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
