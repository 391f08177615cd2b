"""The ``durable-timer`` command."""

from __future__ import annotations

import typer

from timer_service.cli import operate

app = typer.Typer(no_args_is_help=True, help="Durable waiting on NATS JetStream.", pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Durable waiting on NATS JetStream."""


operate.register(app)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="durable-timer")
