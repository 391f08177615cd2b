"""``durable-timer demo`` and ``durable-timer dev`` as a newcomer runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import DURABLE_TIMER, Cli, Running
from timer_service.embedded import free_port

READY = "Ctrl-C stops everything"


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


# -- demo -----------------------------------------------------------------------------------------------------


def test_the_demo_keeps_its_promises_without_a_terminal(tmp_path: Path) -> None:
    """Exit code 0 within a minute, and plain lines that tell the kill, and each timer with what became of it."""
    began = time.monotonic()
    done = subprocess.run(
        [DURABLE_TIMER, "demo"], capture_output=True, text=True, timeout=90, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    assert "killing the timer service (SIGKILL) while 4 timers wait" in done.stdout
    assert "\x1b" not in done.stdout
    last_table = done.stdout.rpartition("times")[2]
    assert "6 occurrences fired, each exactly once, none early" in last_table
    assert "✗" not in last_table
    train = next(line for line in last_table.splitlines() if line.startswith("night train"))
    assert "after the outage" in train
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle ends it with 130; no process and no folder stays."""
    with Running("demo", environment={"TMPDIR": str(tmp_path)}) as demo:
        demo.until("started wake-up call")
        children = children_of(demo.process.pid)
        assert len(children) == 3
        assert demo.end() == 130
        assert "Traceback" not in demo.output
    assert not any(alive(child) for child in children)
    assert list(tmp_path.iterdir()) == []


# -- dev ------------------------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def dev(tmp_path: Path, port: int) -> Iterator[Callable[..., Running]]:
    """Starts ``durable-timer dev`` in a folder of its own."""
    started: list[Running] = []

    def start(*more: str, ready: bool = True) -> Running:
        free = ("--http", "127.0.0.1:0", "--consumer-http", "127.0.0.1:0")
        running = Running("dev", "--port", str(port), *free, *more, cwd=tmp_path)
        started.append(running)
        if ready:
            running.until(READY)
        return running

    yield start
    for running in started:
        running.__exit__()


def test_dev_runs_it_all_and_keeps_what_waits(dev: Callable[..., Running], port: int) -> None:
    """A timer fires and is shown; Ctrl-C exits 0; what waited is there at the next start."""
    cli = Cli(f"nats://127.0.0.1:{port}")
    running = dev()
    cli.json("start", "--name", "soon", "--delay", "50ms", "--payload", '{"a":1}')
    cli.json("start", "--name", "later", "--delay", "1h")
    running.until(r"demo\.seen .*soon")
    assert running.end() == 0
    stopping = running.output[running.output.index("stopping") :]
    assert stopping.index("stopping the notify-consumer") < stopping.index("stopping the timer-service")
    again = dev()
    assert cli.json("get", "--name", "later")["phase"] == "waiting"
    assert again.end(signal.SIGTERM) == 0


def test_a_data_folder_or_port_in_use_is_refused(dev: Callable[..., Running], port: int, tmp_path: Path) -> None:
    """A second dev on the same folder or port ends with 1 and a clear line; the first one goes on."""
    first = dev()
    same_folder = subprocess.run(
        [DURABLE_TIMER, "dev", "--port", str(port + 1)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert same_folder.returncode == 1
    assert "another nats-server is running on" in same_folder.stderr
    same_port = dev("--data", "elsewhere", ready=False)
    assert same_port.wait() == 1
    assert f"port {port} is taken" in same_port.output
    assert first.process.poll() is None


def test_a_child_that_dies_ends_it_all(dev: Callable[..., Running]) -> None:
    """Nothing is restarted silently: it says who died and exits 1, and the others are gone."""
    running = dev()
    children = children_of(running.process.pid)
    consumer = next(child for child in children if "notify_consumer" in command_of(child))
    os.kill(consumer, signal.SIGKILL)
    assert running.wait() == 1
    assert "notify-consumer ended by itself (killed by SIGKILL)" in running.output
    assert not any(alive(child) for child in children)


def test_children_do_not_outlive_a_killed_parent(dev: Callable[..., Running]) -> None:
    """SIGKILL of the parent takes broker, service and consumer with it; the folder is free again."""
    running = dev()
    children = children_of(running.process.pid)
    assert len(children) == 3
    running.process.kill()
    wait_until(lambda: not any(alive(child) for child in children))
    assert dev().end() == 0


def test_handlers_that_can_not_be_loaded_end_it(dev: Callable[..., Running]) -> None:
    """A mistyped handlers module is told, and nothing goes on without it."""
    running = dev("--handlers", "no_such_module", ready=False)
    assert running.wait() == 1
    assert "no_such_module" in running.output
    assert "notify-consumer ended by itself (exit code 2)" in running.output
