"""Commands that look and change nothing: get, list, watch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from timer_service import show
from timer_service.cli import arguments
from timer_service.cli.arguments import Creds, Json, Name, Namespace, Nats, Ref
from timer_service.cli.session import client, connected, publisher, refuse, run
from timer_service.clock import SystemClock
from timer_service.config import DEFAULT_NATS_URL
from timer_service.domain.identity import TimerRef
from timer_service.domain.model import Timer
from timer_service.errors import NotFound
from timer_service.jetstream import topology
from timer_service.jetstream.connection import Connection
from timer_service.jetstream.consume import Delivery
from timer_service.jetstream.follow import Follower
from timer_service.jetstream.publish import Publisher
from timer_service.wire.canonical import exact_json, strict_loads
from timer_service.wire.records import UnreadableRecord, decode_timer

_PROGRESS_STEP = 500
NO_STATE = "there is no state bucket here yet; `durable-timer provision` or `durable-timer serve` creates it"


class LivePhase(StrEnum):
    """The phases of entries in the state bucket."""

    WAITING = "waiting"
    ELAPSED = "elapsed"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command()(get)
    app.command("list")(list_timers)
    app.command()(watch)


def get(
    timer_ref: Ref = None,
    name: Name = None,
    namespace: Namespace = None,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Tell the story of one timer, live or ended: did it fire, when, how late, who answered what."""
    ref = arguments.named_ref(timer_ref, name, namespace)
    record = run(_read(ref, nats, creds))
    if record is None:
        refuse(f"no timer {ref}, neither live nor in the archive")
    if as_json:
        sys.stdout.buffer.write(exact_json(record) + b"\n")
    else:
        show.console().print(show.story(record, SystemClock().now_ms()), highlight=False)


async def _read(ref: TimerRef, url: str, creds: str | None) -> dict[str, Any] | None:
    async with client(url, creds) as timers:
        return await timers.get(ref)


# -- list -----------------------------------------------------------------------------------------------------


class Filter(msgspec.Struct, frozen=True):
    """Which timers are wanted; None and False take all. Instants are epoch milliseconds, both exclusive."""

    phase: str | None = None
    flow: str | None = None
    due_before_ms: int | None = None
    due_after_ms: int | None = None
    problems: bool = False
    limit: int | None = None

    @property
    def narrow(self) -> bool:
        return self != Filter(limit=self.limit)

    def takes(self, timer: Timer, key: dict[str, str]) -> bool:
        return (
            (self.phase is None or timer.phase == self.phase)
            and (self.flow is None or key.get("flow_id") == self.flow)
            and (self.due_before_ms is None or timer.due_at_ms < self.due_before_ms)
            and (self.due_after_ms is None or timer.due_at_ms > self.due_after_ms)
        )


def list_timers(
    phase: Annotated[LivePhase | None, typer.Option(help="Only timers in this phase.")] = None,
    flow: Annotated[str | None, typer.Option(metavar="FLOW_ID", help="Only timers of this flow.")] = None,
    due_before: Annotated[
        str | None, typer.Option(metavar="WHEN", help="RFC 3339, or a duration from now such as 10m.")
    ] = None,
    due_after: Annotated[str | None, typer.Option(metavar="WHEN", help="RFC 3339, or a duration from now.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop after so many.")] = None,
    problems: Annotated[bool, typer.Option("--problems", help="Only entries that can't be read, and why.")] = False,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """List the live timers, in the order of their last change. Ended ones are in the archive: see get."""
    wanted = Filter(
        phase=phase and str(phase),
        flow=flow,
        due_before_ms=None if due_before is None else arguments.instant_ms(due_before),
        due_after_ms=None if due_after is None else arguments.instant_ms(due_after),
        problems=problems,
        limit=limit,
    )
    run(_list(wanted, nats, creds, as_json))


async def _list(wanted: Filter, url: str, creds: str | None, as_json: bool) -> None:
    async with connected(url, creds) as connection, publisher(connection) as asker:
        with _progress(wanted) as progress:
            listing = Listing(wanted, as_json, progress)
            await _follow(connection, asker, topology.STATE_FILTER, listing.take, listing.done)
    listing.conclude()


class Listing:
    """Prints what is wanted of each state entry as it comes; ``done`` is set after the last one."""

    def __init__(self, wanted: Filter, as_json: bool, progress: Callable[[int, int], None]) -> None:
        self.done = asyncio.Event()
        self._wanted = wanted
        self._as_json = as_json
        self._progress = progress
        self._colour = sys.stdout.isatty()
        self._now_ms = SystemClock().now_ms()
        self._read = self._printed = 0

    def take(self, delivery: Delivery) -> None:
        if self.done.is_set():
            return
        self._read += 1
        if self._read % _PROGRESS_STEP == 0:
            self._progress(self._read, self._read + delivery.pending)
        if topology.KV_OPERATION_HEADER not in (delivery.headers or {}):
            self._take_entry(TimerRef(delivery.subject[len(topology.STATE_PREFIX) :]), delivery.data)

    def _take_entry(self, ref: TimerRef, data: bytes) -> None:
        try:
            timer = decode_timer(data, ref)
            key = _key(timer)
        except (UnreadableRecord, msgspec.MsgspecError) as error:
            if self._wanted.problems:
                self._print_problem(ref, str(error))
            return
        if not self._wanted.problems and self._wanted.takes(timer, key):
            self._print(_one_line(data) if self._as_json else self._line(timer, key))

    def _line(self, timer: Timer, key: dict[str, str]) -> str:
        return show.line(
            timer.phase, timer.due_at_ms, timer.generation, key, timer.timer_ref, self._now_ms, colour=self._colour
        )

    def _print_problem(self, ref: str, why: str) -> None:
        if self._as_json:
            self._print(exact_json({"timer_ref": ref, "problem": why}).decode())
        else:
            self._print(f"{show.clean(ref)}  {show.clean(why)}")

    def _print(self, line: str) -> None:
        if self._printed == 0 and not self._as_json and not self._wanted.problems:
            sys.stdout.write(f"{show.LIST_HEAD}\n")
        sys.stdout.write(f"{line}\n")
        self._printed += 1
        if self._printed == self._wanted.limit:
            self.done.set()

    def conclude(self) -> None:
        """Say so when there was nothing to list."""
        if self._printed == 0 and not self._as_json:
            what = "unreadable entries" if self._wanted.problems else "live timers"
            typer.echo(f"no {what}{' that match' if self._wanted.narrow and not self._wanted.problems else ''}")


def _key(timer: Timer) -> dict[str, str]:
    return msgspec.json.decode(timer.timer, type=dict[str, str])


def _one_line(data: bytes) -> str:
    """A stored record on one line; a payload that was sent with line breaks is written anew."""
    text = data if b"\n" not in data and b"\r" not in data else exact_json(strict_loads(data))
    return text.decode()


@contextmanager
def _progress(wanted: Filter) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error, where the lines themselves are not to be seen running by."""
    if not sys.stderr.isatty() or (sys.stdout.isatty() and not wanted.narrow):
        yield lambda _done, _total: None
        return
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    # Standard output is for the timers: rich would write what is printed there above its bar, on the terminal.
    with Progress(*columns, console=shown, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# -- watch ----------------------------------------------------------------------------------------------------


def watch(
    timer_ref: Ref = None,
    name: Name = None,
    namespace: Namespace = None,
    nats: Nats = DEFAULT_NATS_URL,
    creds: Creds = None,
    as_json: Json = False,
) -> None:
    """Show each change of the live timers (or of one) as it happens, until Ctrl-C."""
    one = None if timer_ref is None and name is None else arguments.named_ref(timer_ref, name, namespace)
    run(_watch(one, nats, creds, as_json))


async def _watch(one: TimerRef | None, url: str, creds: str | None, as_json: bool) -> None:
    subject = topology.STATE_FILTER if one is None else topology.state_subject(one)
    async with connected(url, creds) as connection, publisher(connection) as asker:
        last_seq = await _last_seq(asker)
        if not as_json:
            typer.echo("watching; Ctrl-C ends it", err=True)
        changes = Changes(as_json)
        await _follow(connection, asker, subject, changes.take, asyncio.Event(), after=last_seq)


async def _last_seq(asker: Publisher) -> int:
    try:
        info = await asker.api(f"STREAM.INFO.{topology.STATE_STREAM}")
    except NotFound:
        raise NotFound(NO_STATE) from None
    return int(info["state"]["last_seq"])


class Changes:
    """Prints each change of a state entry."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._colour = sys.stdout.isatty()
        self._clock = SystemClock()

    def take(self, delivery: Delivery) -> None:
        ref = TimerRef(delivery.subject[len(topology.STATE_PREFIX) :])
        removed = topology.KV_OPERATION_HEADER in (delivery.headers or {})
        text = self._json(ref, removed, delivery) if self._as_json else self._line(ref, removed, delivery)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def _json(self, ref: TimerRef, removed: bool, delivery: Delivery) -> str:
        if removed:
            return exact_json({"timer_ref": ref, "removed": True, "changed_at_ms": delivery.stored_at_ms}).decode()
        try:
            decode_timer(delivery.data, ref)
            return _one_line(delivery.data)
        except (UnreadableRecord, ValueError) as error:
            return exact_json({"timer_ref": show.clean(ref), "problem": str(error)}).decode()

    def _line(self, ref: TimerRef, removed: bool, delivery: Delivery) -> str:
        at = show.instant(delivery.stored_at_ms)[11:]
        if removed:
            return f"{at}  archived   [{ref}]"
        try:
            timer = decode_timer(delivery.data, ref)
            key = _key(timer)
        except (UnreadableRecord, msgspec.MsgspecError) as error:
            return f"{at}  unreadable [{show.clean(ref)}] {show.clean(str(error))}"
        rest = show.line(
            timer.phase, timer.due_at_ms, timer.generation, key, ref, self._clock.now_ms(), colour=self._colour
        )
        return f"{at}  {rest}"


async def _follow(
    connection: Connection,
    asker: Publisher,
    subject: str,
    take: Callable[[Delivery], None],
    done: asyncio.Event,
    *,
    after: int | None = None,
) -> None:
    """Read the state until ``done`` is set: all that stands, or (``after`` a sequence) changes without end.

    An error in ``take`` ends it and is raised here.
    """
    failed: list[BaseException] = []

    def taken(delivery: Delivery) -> None:
        try:
            take(delivery)
        except Exception as error:
            failed.append(error)
            done.set()

    caught_up = done.set if after is None else lambda: None
    follower = Follower(connection, asker, topology.STATE_STREAM, subject, taken, caught_up)
    follower.last_seq = after or 0
    try:
        await follower.start()
        await done.wait()
    except NotFound:
        raise NotFound(NO_STATE) from None
    finally:
        await follower.stop()
    if failed:
        raise failed[0]
