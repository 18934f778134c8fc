"""`lockstep generate`: answers to prompts from options, files or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options

if TYPE_CHECKING:
    from lockstep.settings import EngineSettings
    from lockstep.types import Choice, Completion, Grammar


@options.grouped(sampling=options.SAMPLING, engine=options.ENGINE)
def generate(
    model: options.ModelName = "smollm2",
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="A file with a prompt; may be repeated; - is stdin."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Every line of a file or of stdin is a prompt.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message to the assistant.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line for each answer.")
    ] = False,
    count: Annotated[int | None, typer.Option("--choices", help="Answers to each prompt.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: logprobs and so many alternatives.")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(help="A file with a JSON Schema that every answer follows; - is any object."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="A regular expression that every answer matches.")
    ] = None,
    *,
    sampling: dict[str, Any],
    engine: EngineSettings,
) -> None:
    """Answer prompts and leave.

    Prompts come from --prompt and --file, or from standard input when there are none.
    """
    from lockstep.llm import LLM
    from lockstep.types import SamplingParams

    prompts = _prompts(prompt or [], file or [], lines)
    params = SamplingParams(
        **sampling,
        **options.given(n=count, logprobs=logprobs, grammar=_grammar(json_schema, regex)),
    )
    with LLM(model, **engine) as llm:
        if chat or system is not None:
            completions = llm.chat([_conversation(system, text) for text in prompts], params)
        else:
            completions = llm.generate(prompts, params)
    for index, completion in enumerate(completions):
        for choice in completion.choices:
            if as_json:
                record = _record(index, prompts[index], completion, choice)
                print(json.dumps(record, ensure_ascii=False))
            elif len(completions) * len(completion.choices) == 1:
                print(choice.text)
            else:
                print(f"[{index}.{choice.index}] {choice.text}")


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    from lockstep.types import Grammar

    if json_schema is not None and regex is not None:
        raise typer.BadParameter("give --json-schema or --regex, not both")
    if regex is not None:
        return Grammar("regex", regex, name="--regex")
    if json_schema is None:
        return None
    if str(json_schema) == "-":
        return Grammar("json_object", name="--json-schema")
    source = json_schema.read_text(encoding="utf-8")
    return Grammar("json_schema", source, name="--json-schema")


def _prompts(given: list[str], files: list[Path], lines: bool) -> list[str]:
    texts = list(given)
    if not given and not files:
        if sys.stdin.isatty():
            raise typer.BadParameter("give --prompt, --file, or a prompt on standard input")
        files = [Path("-")]
    for path in files:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        if lines:
            texts.extend(line for line in text.splitlines() if line)
        else:
            texts.append(text.rstrip("\n"))
    if not texts:
        raise typer.BadParameter("there is no prompt in what was given")
    return texts


def _conversation(system: str | None, text: str) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _record(index: int, prompt: str, completion: Completion, choice: Choice) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": index,
        "choice": choice.index,
        "prompt": prompt,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prompt_tokens": len(completion.prompt_token_ids),
        "cached_tokens": completion.cached_tokens,
    }
    if choice.logprobs:
        record["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}
            for entry in choice.logprobs
        ]
    return record
