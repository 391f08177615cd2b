"""The ``durable-timer`` command.

Exit codes: 0 accepted, duplicate, found, all well; 1 rejected, not found, unreachable, something is wrong; 2 asked for
wrongly; 130 after Ctrl-C.
"""

from __future__ import annotations

from typing import Annotated

import typer

from timer_service.cli.look import register as register_looking
from timer_service.cli.operate import register as register_operating
from timer_service.cli.send import register as register_sending

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"durable-timer {version('durable-timer')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Durable waiting on NATS JetStream."""


register_sending(app)
register_looking(app)
register_operating(app)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="durable-timer")
