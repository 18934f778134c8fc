"""Options that several commands share, and what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lockstep.settings import EngineSettings

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A packaged name (smollm2, gemma3-270m), a path or a hub id."
    ),
]

_ENGINE = "Engine"
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.", rich_help_panel=_ENGINE)]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)]
BackendName = Annotated[
    str,
    typer.Option(
        "--backend", help="Kernels: auto, native, torch or triton.", rich_help_panel=_ENGINE
    ),
]
Threads = Annotated[
    int, typer.Option(help="CPU threads; 0 takes all cores.", rich_help_panel=_ENGINE)
]
MaxContext = Annotated[
    int,
    typer.Option(help="Most tokens of a sequence; 0 is the model's own.", rich_help_panel=_ENGINE),
]
CacheMegabytes = Annotated[
    int,
    typer.Option(
        "--cache-mb", help="Page pool in MiB; 0 sizes it by free memory.", rich_help_panel=_ENGINE
    ),
]

_SAMPLING = "Sampling"
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopP = Annotated[float | None, typer.Option("--top-p", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option("--top-k", help="0 is off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float | None, typer.Option("--min-p", rich_help_panel=_SAMPLING)]
RepetitionPenalty = Annotated[
    float | None, typer.Option("--repetition-penalty", rich_help_panel=_SAMPLING)
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", help="Most tokens to write.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed, the same text.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends the answer; may be repeated.", rich_help_panel=_SAMPLING),
]


_BRANCHES = "Branches"
BranchFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--branch",
        metavar="NAME=FOLDER",
        help="A trained branch, e.g. judge=judge/, that decides beside the model; may be repeated.",
        rich_help_panel=_BRANCHES,
    ),
]
BranchDepth = Annotated[
    str,
    typer.Option(
        help="How far a context is computed for a decision alone: full, so that a later answer "
        "finds it, or exit, which is less work.",
        rich_help_panel=_BRANCHES,
    ),
]
KeepActivations = Annotated[
    bool,
    typer.Option(
        "--keep-activations",
        help="Keep what enters a fork: a later decision of a context branch skips the trunk.",
        rich_help_panel=_BRANCHES,
    ),
]
KeepTails = Annotated[
    bool,
    typer.Option(
        "--keep-tails",
        help="Keep a context branch's own keys and values after its decision.",
        rich_help_panel=_BRANCHES,
    ),
]


def branch_folders(given: list[str] | None) -> dict[str, str]:
    """`--branch` options as a map from names to folders."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise typer.BadParameter(f"--branch must be NAME=FOLDER, got {text!r}")
        if name in found:
            raise typer.BadParameter(f"--branch: {name!r} is named twice")
        found[name] = folder
    return found


def require_server() -> None:
    """End the command with a hint where the server's own dependencies are missing."""
    try:
        import lockstep.server  # noqa: F401
    except ModuleNotFoundError as error:
        raise typer.BadParameter(
            f"{error.name} is not installed: pip install '.[server]' in Lockstep's folder"
        ) from None


def engine_settings(*, cache_mb: int, **others: Any) -> EngineSettings:
    """What the engine options say, as keyword arguments of `LLM`; checked there."""
    settings: Any = {**others, "cache_bytes": cache_mb * 1024 * 1024}
    result: EngineSettings = settings
    return result


def _sampling(stop: list[str] | None, **others: Any) -> dict[str, Any]:
    return given(**others, stop=tuple(stop or ()) or None)


@dataclass(frozen=True, slots=True)
class Group:
    """Options that several commands have.

    Attributes:
        parameters: name -> its type as typer reads it, and its default.
        made: what a command gets in the place of them all.
    """

    parameters: Mapping[str, tuple[Any, Any]]
    made: Callable[..., Any]

    def defaults(self, **own: Any) -> Group:
        """The same options with other defaults."""
        changed = {name: (self.parameters[name][0], value) for name, value in own.items()}
        return Group({**self.parameters, **changed}, self.made)


ENGINE = Group(
    {
        "dtype": (Dtype, "auto"),
        "device": (Device, "auto"),
        "backend": (BackendName, "auto"),
        "threads": (Threads, 0),
        "max_context": (MaxContext, 0),
        "cache_mb": (CacheMegabytes, 0),
    },
    engine_settings,
)
SAMPLING = Group(
    {
        "max_tokens": (MaxTokens, 256),
        "temperature": (Temperature, None),
        "top_p": (TopP, None),
        "top_k": (TopK, None),
        "min_p": (MinP, None),
        "repetition_penalty": (RepetitionPenalty, None),
        "seed": (Seed, None),
        "stop": (Stop, None),
    },
    _sampling,
)
"""As keyword arguments of `SamplingParams`."""


def grouped(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameters of these names stand for all options of a group."""

    def changed(command: Callable[..., None]) -> Callable[..., None]:
        command.__annotations__.update(dict.fromkeys(groups, Any))  # known to type checkers alone
        own = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in own.parameters.values():
            if parameter.name not in groups:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            parameters += [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
                for name, (annotation, default) in groups[parameter.name].parameters.items()
            ]

        def run(**values: Any) -> None:
            made = {
                name: group.made(**{each: values.pop(each) for each in group.parameters})
                for name, group in groups.items()
            }
            command(**values, **made)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return changed


def given(**values: Any) -> dict[str, Any]:
    """Only what was given on the command line; the rest keeps its own default."""
    return {name: value for name, value in values.items() if value is not None and value != []}
