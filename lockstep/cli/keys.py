"""`lockstep keys`: API keys of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

keys = typer.Typer(
    name="keys",
    help="Make and list API keys for `lockstep serve --keys-file`.",
    no_args_is_help=True,
)

KeysFile = Annotated[
    Path, typer.Option("--file", "-f", help="The file of hashed keys; made if there is none.")
]


@keys.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is; shows in logs and metrics.")],
    file: KeysFile = Path("keys.toml"),
    admin: Annotated[bool, typer.Option("--admin", help="It may call /admin.")] = False,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="In place of the server's limit; 0 is none.")
    ] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="The same for tokens.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="And for requests at once.")] = None,
) -> None:
    """Make a key, print it once, and keep only its hash."""
    from lockstep.server.auth import new_key

    secret = new_key(
        file,
        name,
        admin=admin,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
    )
    typer.echo(secret)
    typer.echo(f"{file} has its hash; nobody can read the key from it. Keep it safe.", err=True)


@keys.command("list")
def show(
    file: Annotated[Path, typer.Option("--file", "-f", help="The file of hashed keys.")] = Path(
        "keys.toml"
    ),
) -> None:
    """Names, rights and limits; to take a key back, delete its table from the file."""
    from rich.console import Console
    from rich.table import Table

    from lockstep.server.auth import read_keys

    table = Table("name", "admin", "requests/min", "tokens/min", "at once", "sha256")
    for key in read_keys(file):
        limits = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)
        shown = ("default" if value is None else str(value or "none") for value in limits)
        table.add_row(key.name, "yes" if key.admin else "", *shown, key.sha256[:12])
    Console(highlight=False).print(table)
