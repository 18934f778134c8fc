"""`lockstep`: the commands put together, and the one place where errors become lines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep import __version__
from lockstep.cli import batch, branch, verify, verify_drift
from lockstep.cli.chat import chat
from lockstep.cli.check_model import check_model
from lockstep.cli.doctor import doctor
from lockstep.cli.generate import generate
from lockstep.cli.keys import keys
from lockstep.cli.models import models
from lockstep.cli.serve import serve
from lockstep.types import LockstepError

USER_ERROR = 2

app = typer.Typer(
    name="lockstep",
    help="An LLM inference engine in which no answer changes by sharing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """An LLM inference engine in which no answer changes by sharing."""


app.command()(chat)
app.command()(generate)
app.command()(serve)
app.add_typer(keys)
app.add_typer(batch.app, name="batch")
app.add_typer(branch.app, name="branch")
verify_drift.add_to(verify.app)
app.add_typer(verify.app, name="verify")
app.command()(models)
app.command()(doctor)
app.command("check-model")(check_model)


def main() -> None:
    """Run the command line; what the user did wrong is one line and exit status 2."""
    try:
        app()
    except (LockstepError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
