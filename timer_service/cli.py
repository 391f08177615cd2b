"""The ``durable-timer`` command."""

from __future__ import annotations

import asyncio

import typer

from timer_service.config import Settings
from timer_service.logs import configure_logs, get_logger
from timer_service.options import settings_command

app = typer.Typer(no_args_is_help=True, help="Durable waiting on NATS JetStream.", pretty_exceptions_enable=False)


@app.callback()
def _root() -> None:
    """Durable waiting on NATS JetStream."""


def _serve(settings: Settings) -> None:
    """Run the timer service against a NATS server until SIGTERM."""
    from timer_service.app import serve

    configure_logs()
    try:
        asyncio.run(serve(settings, get_logger()))
    except OSError as error:
        typer.echo(f"durable-timer: {error}", err=True)
        raise typer.Exit(1) from None


app.command("serve")(settings_command(Settings, _serve, flags={"provision": ("--provision/--no-provision",)}))


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="durable-timer")


if __name__ == "__main__":
    main()
