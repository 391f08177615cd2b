"""``durable-timer demo``: the main promise on a broker of one's own, from nothing, with a crash in the middle.

Six timers with human names; one is cancelled, one replaced, one asks to be called again; the timer service is killed
with SIGKILL while four wait, one of which falls due while it is down. Whether all went well is judged by
``demo_verdict``, from the archive's records and from what the handlers saw.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.live import Live
from rich.table import Table
from rich.text import Text

from timer_service import show
from timer_service.children import Child, python_program
from timer_service.client import TimerClient, timer_ref_of
from timer_service.clock import SystemClock
from timer_service.demo_verdict import Outage, Promise, Record, Row, Seen, judge
from timer_service.embedded import EmbeddedBroker
from timer_service.errors import DurableTimerError
from timer_service.wire.records import Outcome

_READY_S: Final = 20.0
_END_S: Final = 10.0
_POLL_S: Final = 0.05
_REFRESH_S: Final = 0.2
_SETTLE_S: Final = 0.5
_LOG_LINES: Final = 15
_CALL_AGAIN_MS: Final = 5_500
_seen = msgspec.json.Decoder(Seen)


class DemoFailed(DurableTimerError):
    """The demo could not be played to its end; the text says why."""


def demo() -> int:
    """Play the demo and return the exit code: 0 when every promise was kept, else 1. About 12 seconds."""
    folder = Path(tempfile.mkdtemp(prefix="durable-timer-demo-"))
    kept = True
    try:
        code = _on_a_broker(folder)
        kept = code != 0
    except KeyboardInterrupt:
        kept = False
        raise
    finally:
        if kept:
            sys.stderr.write(f"the logs are in {folder}\n")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _on_a_broker(folder: Path) -> int:
    teller = Teller()
    teller.say("starting a NATS server with an empty data folder …")
    with EmbeddedBroker(folder / "nats", dies_with_parent=True) as broker:
        return asyncio.run(_play(broker.url, folder, teller))


async def _play(url: str, folder: Path, teller: Teller) -> int:
    stage = Stage(url, folder)
    with _cancelled_by_sigterm():
        try:
            await stage.raise_curtain(teller)
            async with await TimerClient.connect(url) as timers:
                play = Play(stage, timers, teller)
                with teller.showing(play.table):
                    await play.run()
                rows, problems = play.verdict()
        finally:
            await stage.lower_curtain()
    teller.conclude(rows, problems, play.began_ms)
    return 1 if problems else 0


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the play like Ctrl-C does: children first."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class Stage:
    """The processes: timer service and notify consumer, with their logs in the folder."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder = folder
        self._seen_file = folder / "seen.jsonl"
        common = ("--nats", url, "--http", "127.0.0.1:0", "--instance", "demo")
        self.service = Child("timer-service", python_program("timer_service.cli", "serve", *common), self._log)
        handing = ("--handlers", "notify_consumer.demo_handlers", "--outbox", f"sqlite:{folder / 'outbox.sqlite3'}")
        self.consumer = Child(
            "notify-consumer",
            python_program("notify_consumer.cli", "serve", *common, *handing),
            self._log,
            {"DURABLE_TIMER_DEMO_SEEN": str(self._seen_file)},
        )

    async def raise_curtain(self, teller: Teller) -> None:
        """Start both, and return when they are ready. Raises DemoFailed with the end of the log."""
        teller.say("starting the timer service and the notify consumer, each a process of its own …")
        await self.service.start()
        await self.consumer.start()
        await self.until_ready(self.service)
        await self.until_ready(self.consumer)

    async def lower_curtain(self) -> None:
        """Stop both, the last one first. Also after a failed start."""
        await self.consumer.stop()
        await self.service.stop()

    async def until_ready(self, child: Child) -> None:
        """Raises DemoFailed when ``child`` ends, or is not ready in time."""
        ready, ended = asyncio.create_task(child.ready.wait()), asyncio.create_task(child.wait())
        await asyncio.wait({ready, ended}, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        succeeded = ready.done()
        ready.cancel()
        ended.cancel()
        if not succeeded:
            state = "is not ready" if child.running else "ended"
            raise DemoFailed(f"the {child.name} {state}; the end of its log:\n{self._tail(child.name)}")

    def seen(self) -> list[Seen]:
        """What the handlers noted so far."""
        with suppress(FileNotFoundError):
            return [
                _seen.decode(line)
                for line in self._seen_file.read_bytes().splitlines(keepends=True)
                if line.endswith(b"\n")
            ]
        return []

    def _log(self, name: str, line: dict[str, Any] | str) -> None:
        with (self._folder / f"{name}.log").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def _tail(self, name: str) -> str:
        with suppress(FileNotFoundError):
            lines = (self._folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
            return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])
        return "  (empty)"


class Play:
    """The story: what is started when, what is promised thereby, and what became of it."""

    def __init__(self, stage: Stage, timers: TimerClient, teller: Teller) -> None:
        self._stage = stage
        self._timers = timers
        self._say = teller.say
        self._clock = SystemClock()
        self.began_ms = self._clock.now_ms()
        teller.began_ms = self.began_ms
        self._promises: list[Promise] = []
        self._records: dict[str, Record | None] = {}
        self._told: set[tuple[str, int]] = set()
        self._outage: Outage | None = None

    async def run(self) -> None:
        watching = asyncio.create_task(self._keep_looking(), name="demo.look")
        try:
            await self._first_act()
            await self._crash()
            await self._last_act()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._look()

    async def _first_act(self) -> None:
        await self._start("soft-boiled egg", 2_000)
        await self._start("call the plumber", 1_500, {"retries": 1, "retry_delay_ms": _CALL_AGAIN_MS}, answer="retry")
        await self._start("parking meter", 6_000, answer="cancel")
        await self._start("pizza", 4_000, answer="replace")
        await self._start("night train", 5_000, overdue=True)
        await self._start("wake-up call", 9_000)
        await self._at(700)
        self._say("the driver is back: cancelling the parking meter")
        self._accepted(await self._timers.cancel({"name": "parking meter"}, reason="back in time"))
        self._say("the pizza needs longer: starting it again replaces the old timer")
        await self._start("pizza", 7_500)
        await self._until(lambda: self._delivered("soft-boiled egg") and self._called_again(), "the first timers fire")

    async def _crash(self) -> None:
        await self._at(3_000)
        waiting = [ref for ref, record in self._records.items() if record and record["phase"] == "waiting"]
        self._say(f"killing the timer service (SIGKILL) while {len(waiting)} timers wait")
        await self._stage.service.kill()
        down_ms = self._clock.now_ms()
        await self._at(5_100)
        self._say("the night train falls due, and nobody is there to notice")
        await self._at(5_700)
        self._say("starting the timer service again")
        self._outage = Outage(down_ms, self._clock.now_ms())
        await self._stage.service.start()
        await self._stage.until_ready(self._stage.service)
        self._say("it is ready: all it knows, it has read from the broker")

    async def _last_act(self) -> None:
        last_ms = max(promise.not_before_ms for promise in self._promises)
        patience_s = max(0, last_ms - self._clock.now_ms()) / 1000 + _END_S
        with suppress(DemoFailed):  # then the verdict says what is missing
            await self._until(self._all_archived, "all timers end", patience_s)
        await asyncio.sleep(_SETTLE_S)  # a second delivery, if there were one, would come now

    # -- commands -----------------------------------------------------------------------------------------------

    async def _start(
        self, name: str, delay_ms: int, payload: Any = None, *, answer: Any = "complete", overdue: bool = False
    ) -> None:
        retries = 0 if payload is None else payload["retries"]
        outcome = self._accepted(
            await self._timers.start({"name": name}, delay_ms=delay_ms, payload=payload, max_retries=retries)
        )
        assert outcome.timer_ref is not None
        assert outcome.generation is not None
        assert outcome.due_at_ms is not None
        first = Promise(name, outcome.timer_ref, outcome.generation, outcome.due_at_ms, answer, overdue)
        self._promises.append(first)
        if answer == "retry":
            again_ms = outcome.due_at_ms + payload["retry_delay_ms"]
            self._promises.append(Promise(name, first.timer_ref, first.generation + 1, again_ms, "complete"))
        self._say(f"started {name}: due in {show.duration(delay_ms)}")

    def _accepted(self, outcome: Outcome | None) -> Outcome:
        if outcome is None or outcome.code is not None:
            raise DemoFailed(f"a command was settled otherwise than planned: {outcome}")
        return outcome

    # -- time and conditions --------------------------------------------------------------------------------------

    async def _at(self, offset_ms: int) -> None:
        """Wait until so long after the beginning."""
        await asyncio.sleep(max(0, self.began_ms + offset_ms - self._clock.now_ms()) / 1000)

    async def _until(self, condition: Callable[[], bool], what: str, patience_s: float = _END_S) -> None:
        try:
            async with asyncio.timeout(patience_s):
                while not condition():  # noqa: ASYNC110  (what it looks at lies in other processes)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise DemoFailed(f"not within {patience_s:.0f} s: {what}") from None

    def _delivered(self, name: str) -> bool:
        ref = timer_ref_of({"name": name})
        return any(one.timer_ref == ref for one in self._stage.seen())

    def _called_again(self) -> bool:
        record = self._records.get(timer_ref_of({"name": "call the plumber"}))
        return record is not None and record["generation"] == 1

    def _all_archived(self) -> bool:
        refs = {promise.timer_ref for promise in self._promises}
        return all((self._records.get(ref) or {}).get("status") for ref in refs)

    # -- looking --------------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            with suppress(DurableTimerError):
                await self._look()
            await asyncio.sleep(_REFRESH_S)

    async def _look(self) -> None:
        for ref in {promise.timer_ref for promise in self._promises}:
            self._records[ref] = await self._timers.get(ref)
        for row in judge(self._promises, self._records, self._stage.seen(), self._outage)[0]:
            self._tell(row)

    def _tell(self, row: Row) -> None:
        """Say once of each occurrence that it fired."""
        place = (row.promise.timer_ref, row.promise.generation)
        if row.lateness_ms is None or place in self._told:
            return
        self._told.add(place)
        again = f"; it asks to be called again in {show.duration(_CALL_AGAIN_MS)}"
        self._say(
            f"{row.promise.name} fired, {show.duration(row.lateness_ms)} after it was due"
            f"{again if row.promise.answer == 'retry' else ''}"
        )

    def verdict(self) -> tuple[list[Row], list[str]]:
        return judge(self._promises, self._records, self._stage.seen(), self._outage)

    def table(self) -> Table:
        """Where everything stands now."""
        return timers_table(self.verdict()[0], self.began_ms, self._clock.now_ms())


# -- telling ------------------------------------------------------------------------------------------------------


class Teller:
    """Says what happens; on a terminal with a live table below, otherwise in plain lines."""

    def __init__(self) -> None:
        self._console = show.console()
        self._clock = SystemClock()
        self.began_ms: int | None = None

    def say(self, text: str) -> None:
        passed = "" if self.began_ms is None else f"{(self._clock.now_ms() - self.began_ms) / 1000:5.1f} s"
        self._console.print(Text(f"{passed:>8}", "dim").append(f"  {text}", "default"), highlight=False)

    @contextmanager
    def showing(self, table: Callable[[], Table]) -> Iterator[None]:
        """The live table during the block, where there is a terminal."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            yield
            return
        with Live(get_renderable=table, console=self._console, refresh_per_second=8, transient=True):
            yield

    def conclude(self, rows: list[Row], problems: list[str], began_ms: int) -> None:
        """The last table, and the verdict in a sentence."""
        self._console.print()
        self._console.print(timers_table(rows, began_ms, None))
        self._console.print()
        if not problems:
            fired = sum(row.promise.fires for row in rows)
            self._console.print(
                f"✓ {fired} occurrences fired, each exactly once, none early; what was cancelled or replaced did not.",
                style="green",
                highlight=False,
            )
        for problem in problems:
            self._console.print(f"✗ {problem}", style="red", highlight=False, soft_wrap=True)


def timers_table(rows: list[Row], began_ms: int, now_ms: int | None) -> Table:
    """One line for each promised occurrence; ``now_ms`` None: it is over, and each is ticked off."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = [row.promise.name for row in rows]
    for column in ("timer", "what", "due", "fired", "late", "times"):
        table.add_column(column, justify="left" if column in ("timer", "what") else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: (names.index(row.promise.name), row.promise.generation)):
        late = "–" if row.lateness_ms is None else show.duration(row.lateness_ms)
        style = "red" if row.problems and now_ms is None else ""
        table.add_row(
            row.promise.name,
            _what(row, now_ms),
            _offset(row.due_at_ms or row.promise.not_before_ms, began_ms),
            _offset(row.seen_at_ms, began_ms),
            late,
            f"{row.delivered}×",
            style=style,
        )
    return table


def _offset(at_ms: int | None, began_ms: int) -> str:
    return "–" if at_ms is None else f"{(at_ms - began_ms) / 1000:.2f} s"


def _what(row: Row, now_ms: int | None) -> str:
    if now_ms is not None:
        return _now(row, now_ms)
    if row.problems:
        return f"✗ {row.problems[0]}"
    fates = {
        "complete": "fired, completed",
        "retry": "fired, to be retried",
        "cancel": "cancelled",
        "replace": "replaced",
    }
    return "✓ fired after the outage" if row.promise.overdue else f"✓ {fates[row.promise.answer]}"


def _now(row: Row, now_ms: int) -> str:
    if row.seen_at_ms is not None:
        return "fired" if row.phase is None or row.phase == "completed" else "fired, being answered"
    if row.phase is None:
        return "replaced" if row.promise.answer == "replace" else "not yet"
    if row.phase == "waiting":
        due_at_ms = row.due_at_ms or row.promise.not_before_ms
        return f"waits, due {show.relative(due_at_ms, now_ms)}" if due_at_ms >= now_ms else "OVERDUE"
    return row.phase
