"""``durable-timer dev``: broker, timer service and notify consumer on this machine until Ctrl-C, data kept in a folder.

Nothing is restarted silently: when a program ends, it is said, the others are stopped in the reverse order of their
start, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.text import Text

from timer_service import show
from timer_service.children import Child, python_program
from timer_service.embedded import EmbeddedBroker, EmbeddedServerError, port_taken

DEFAULT_HANDLERS: Final = "notify_consumer.demo_handlers"
_LOOK_S: Final = 0.2
_QUIET: Final = frozenset({"event", "level", "timestamp", "instance"})
_COLOURS: Final = {"timer-service": "cyan", "notify-consumer": "magenta"}


class DevOptions(msgspec.Struct, frozen=True):
    """What ``dev`` runs with; the addresses are HOST:PORT."""

    data: Path
    port: int
    http: str
    consumer_http: str
    handlers: str


def dev(options: DevOptions) -> int:
    """Run everything until SIGINT or SIGTERM (returns 0) or until a program ends by itself (returns 1).

    Raises EmbeddedServerError when the broker can't be run, DataDirInUse when the folder is in use.
    """
    broker = EmbeddedBroker(options.data / "nats", port=options.port, dies_with_parent=True)
    terminal = Terminal()
    _start_broker(broker, options)
    try:
        terminal.say(f"broker at {broker.url}, data in {options.data}")
        return asyncio.run(_Dev(options, broker, terminal).run())
    finally:
        broker.stop()
        terminal.say("stopped; what waits is kept in the data folder")


def _start_broker(broker: EmbeddedBroker, options: DevOptions) -> None:
    try:
        broker.start()
    except EmbeddedServerError:
        if port_taken(options.port):
            hint = "another server runs there; choose one with --port"
            raise EmbeddedServerError(f"port {options.port} is taken: {hint}") from None
        raise


class _Dev:
    """The programs beside the broker, and the watch over all three."""

    def __init__(self, options: DevOptions, broker: EmbeddedBroker, terminal: Terminal) -> None:
        self._options = options
        self._broker = broker
        self._terminal = terminal
        self._signals = 0
        self._stopping = asyncio.Event()
        common = ("--nats", broker.url, "--instance", "dev")
        serve = python_program("timer_service.cli", "serve", *common, "--http", options.http)
        outbox = f"sqlite:{(options.data / 'outbox.sqlite3').absolute()}"
        hand = ("--http", options.consumer_http, "--handlers", options.handlers, "--outbox", outbox)
        self._children = [
            Child("timer-service", serve, terminal.show),
            Child("notify-consumer", python_program("notify_consumer.cli", "serve", *common, *hand), terminal.show),
        ]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            for child in self._children:
                await child.start()
            greeting = asyncio.create_task(self._greet())
            died = await self._first_death()
            greeting.cancel()
        finally:
            await self._stop()
        if died is not None:
            self._terminal.say(f"{died}; everything else was stopped", "red")
        return 0 if died is None else 1

    def _on_signal(self) -> None:
        """The first signal stops in order; a further one kills what still runs."""
        self._stopping.set()
        self._signals += 1
        if self._signals > 1:
            for child in self._children:
                child.signal(signal.SIGKILL)

    async def _greet(self) -> None:
        """Say what to do next when everything is ready."""
        await asyncio.gather(*(child.ready.wait() for child in self._children))
        at = "" if self._options.port == 4222 else f" --nats {self._broker.url}"
        self._terminal.say("ready; in another terminal try", "green")
        self._terminal.say(f"    durable-timer start --name hello --delay 5s{at}")
        self._terminal.say(f"    durable-timer watch{at}")
        self._terminal.say("Ctrl-C stops everything")

    async def _first_death(self) -> str | None:
        """Wait until a program ends and say which; None when it is a signal that ends it all."""
        stopping = asyncio.create_task(self._stopping.wait())
        ends: dict[asyncio.Task[Any], str] = {asyncio.create_task(child.wait()): child.name for child in self._children}
        ends[asyncio.create_task(self._broker_ends())] = "nats-server"
        done, rest = await asyncio.wait({stopping, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        dead = next((task for task in ends if task in done), None)
        if self._stopping.is_set() or dead is None:
            return None
        return f"{ends[dead]} ended by itself ({_ending(dead.result())})"

    async def _broker_ends(self) -> int | None:
        while self._broker.running:  # noqa: ASYNC110  (nobody tells us)
            await asyncio.sleep(_LOOK_S)
        return None

    async def _stop(self) -> None:
        for child in reversed(self._children):
            if child.running:
                self._terminal.say(f"stopping the {child.name} …")
            await child.stop()


def _ending(code: int | None) -> str:
    if code is None:
        return "its log is nats-server.log in the data folder"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Terminal:
    """Our own words, and the lines of the children with their names in front."""

    def __init__(self) -> None:
        self._console = show.console()

    def say(self, text: str, style: str = "bold") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def show(self, name: str, line: Mapping[str, Any] | str) -> None:
        text = Text(f"{name:>15} │ ", _COLOURS.get(name, ""))
        if isinstance(line, str):
            text.append(show.clean(line), "default")
        else:
            level = str(line.get("level", "info"))
            style = {"warning": "yellow", "error": "red", "critical": "red"}.get(level, "default")
            said = {key: value for key, value in line.items() if key not in _QUIET}
            text.append(str(line["event"]), style)
            text.append("".join(f"  {key}={_short(value)}" for key, value in said.items()), "dim")
        self._console.print(text, soft_wrap=True, highlight=False)


def _short(value: Any) -> str:
    return show.clean(value if isinstance(value, str) else msgspec.json.encode(value).decode())
