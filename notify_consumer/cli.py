"""The ``notify-consumer`` command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from notify_consumer.config import Settings
from notify_consumer.errors import BadSetting, OutboxError
from notify_consumer.loading import load_handlers
from notify_consumer.outbox import make_outbox
from notify_consumer.outbox.base import Outbox, Row, State
from timer_service.logs import configure_logs
from timer_service.options import WholeHelp, settings_command
from timer_service.urls import shown_url
from timer_service.wire.canonical import MalformedJson, exact_json, strict_loads

Json = Annotated[bool, typer.Option("--json", help="print one line of JSON, for machines")]
ResumeId = Annotated[str, typer.Argument(metavar="RESUME_ID", help="as `outbox list` shows it")]

app = typer.Typer(
    no_args_is_help=True,
    help="Hands elapsed timers to handlers, and tells the timer service what became of them.",
    pretty_exceptions_enable=False,
)
outbox_app = typer.Typer(no_args_is_help=True, help="Look into the outbox, and mend it; the consumer may run.")
app.add_typer(outbox_app, name="outbox")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="notify-consumer")


def refuse(message: str, code: int = 1) -> NoReturn:
    """End with one line on standard error. ``code`` 1: it did not work out; 2: it was asked for wrongly."""
    typer.echo(f"notify-consumer: {message}", err=True)
    raise typer.Exit(code)


def _serve(settings: Settings) -> None:
    """Take resumes in and hand them to the handlers, until SIGTERM."""
    from notify_consumer.app import serve

    if settings.handlers is None:
        refuse("--handlers MODULE[:ATTRIBUTE] is needed (or NOTIFY_CONSUMER_HANDLERS)", 2)
    configure_logs()
    try:
        handlers = load_handlers(settings.handlers)
    except BadSetting as error:
        refuse(str(error), 2)
    try:
        asyncio.run(serve(settings, handlers))
    except OSError as error:
        refuse(str(error))


app.command("serve", cls=WholeHelp)(settings_command(Settings, _serve))


# -- outbox ---------------------------------------------------------------------------------------------------


def _list(
    settings: Settings,
    state: Annotated[State | None, typer.Option(help="only rows in this state")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="rows at most, the latest change first")] = 50,
    json: Json = False,
) -> None:
    """List rows of the outbox."""
    rows, counts = _run(settings, lambda outbox: _listed(outbox, state, limit))
    if json:
        _print_json({"counts": counts, "rows": [_plain(row, body=False) for row in rows]})
        return
    table = Table(
        Column("resume_id", no_wrap=True, overflow="fold"),
        "flow",
        "state",
        "attempts",
        "last error or outcome",
        box=None,
    )
    for row in rows:
        cells = (row.resume_id, row.flow, row.state, str(row.attempts), row.last_error or row.settled or "")
        table.add_row(*(Text(cell) for cell in cells))  # not markup, whatever brackets are in it
    console = Console()
    console.print(table)
    console.print("  ".join(f"{name} {count}" for name, count in counts.items()))


async def _listed(outbox: Outbox, state: State | None, limit: int) -> tuple[list[Row], dict[str, int]]:
    counts = await outbox.counts()
    return await outbox.browse(state, limit), {each.value: count for each, count in counts.items()}


def _show(settings: Settings, resume_id: ResumeId, json: Json = False) -> None:
    """Show all that is known of one row."""
    row = _run(settings, lambda outbox: outbox.get(resume_id))
    if row is None:
        refuse(f"{resume_id} is not in {shown_url(settings.outbox)}")
    _print_json(_plain(row, body=True), indent=0 if json else 2)


def _revive(settings: Settings, resume_id: ResumeId, json: Json = False) -> None:
    """Hand a dead row to its handler anew, as if it had just come in."""
    if (why_not := _run(settings, lambda outbox: _revived(outbox, resume_id))) is not None:
        refuse(f"{resume_id} {why_not.format(outbox=shown_url(settings.outbox))}")
    _tell(f"{resume_id} is pending", {"resume_id": resume_id, "state": "pending"}, json)


async def _revived(outbox: Outbox, resume_id: str) -> str | None:
    """Why the row could not be revived, None when it was."""
    if await outbox.revive(resume_id):
        return None
    row = await outbox.get(resume_id)
    if row is None:
        return "is not in {outbox}"
    if row.state is not State.DEAD:
        return f"is {row.state}, not dead: there is nothing to revive"
    return "can't be read, so no handler could be given it; `show` tells what came"


def _purge(
    settings: Settings,
    older_than_s: Annotated[int, typer.Option(min=0, max=3_155_760_000, help="done rows older than this many seconds")],
    json: Json = False,
) -> None:
    """Remove done rows. A resume of theirs that comes again would be handed off a second time."""
    removed = _run(settings, lambda outbox: outbox.prune_done(older_than_s * 1000))
    _tell(f"removed {removed}", {"removed": removed}, json)


def _tell(text: str, value: object, json: bool) -> None:
    _print_json(value) if json else typer.echo(text)


def _create(settings: Settings, json: Json = False) -> None:
    """Make what the outbox needs, where it is missing. `serve` does that too, where it may."""
    _run(settings, lambda outbox: outbox.counts(), create=True)
    name = shown_url(settings.outbox)
    _tell(f"{name} is there", {"outbox": name}, json)


_COMMANDS: dict[str, Callable[..., None]] = {
    "create": _create,
    "list": _list,
    "show": _show,
    "revive": _revive,
    "purge": _purge,
}
for _name, _command in _COMMANDS.items():
    outbox_app.command(_name)(settings_command(Settings, _command, only=("outbox", "nats", "creds")))


def _run(settings: Settings, work: Any, *, create: bool = False) -> Any:
    try:
        outbox = make_outbox(settings.outbox, create=create, nats=settings.nats, creds=settings.creds)
        return asyncio.run(_with_outbox(outbox, work))
    except OutboxError as error:
        refuse(str(error))


async def _with_outbox(outbox: Outbox, work: Any) -> Any:
    await outbox.open()
    try:
        return await work(outbox)
    finally:
        await outbox.close()


def _plain(row: Row, *, body: bool) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(row)
    del shown["body"]
    if body and row.body:
        shown["resume"] = _readable(row.body)
    return shown


def _readable(body: bytes) -> object:
    try:
        return strict_loads(body)
    except MalformedJson:
        return body.decode("utf-8", "replace")


def _print_json(value: object, indent: int = 0) -> None:
    """On one line, or indented for people."""
    text = exact_json(value)
    typer.echo((msgspec.json.format(text, indent=indent) if indent else text).decode())
