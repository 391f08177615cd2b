"""The examples, run as their READMEs say."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.cli import DURABLE_TIMER, Running
from tests.support.service import Desk, Service, eventually, ref_of
from tests.support.stage import Stage
from timer_service.embedded import free_port

FLAGS = ("--test-clock",)
EXAMPLES = Path(__file__).parents[2] / "examples"
Example = Callable[[str, str, str], tuple[Running, str]]


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Example]:
    """Runs ``dev --handlers handlers`` in an example's folder and its publisher, with a short window."""
    started: list[Running] = []
    port = free_port()

    def play(name: str, window: str, window_ms: str) -> tuple[Running, str]:
        folder = EXAMPLES / name
        addresses = ("--port", str(port), "--http", "127.0.0.1:0", "--consumer-http", "127.0.0.1:0")
        running = Running("dev", "--handlers", "handlers", "--data", tmp_path, *addresses, cwd=folder)
        started.append(running)
        running.until("Ctrl-C stops everything")
        environment = {**os.environ, "NATS_URL": f"nats://127.0.0.1:{port}", window: window_ms}
        done = subprocess.run(
            [sys.executable, "publisher.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return running, done.stdout

    yield play
    for running in started:
        running.__exit__()


def test_an_unpaid_order_is_cancelled(example: Example) -> None:
    """The paid order's timer never fires, the unpaid one's does."""
    running, said = example("order_timeout", "PAYMENT_WINDOW_MS", "3000")
    assert "order A-1 paid in time" in said
    running.until("order B-2 was not paid in time: cancelled")
    assert running.end() == 0
    assert "A-1 was not paid" not in running.output


def test_an_offer_moves_on_and_is_taken(example: Example) -> None:
    """The replaced and the accepted offer never pass; the one without an answer does."""
    running, said = example("ride_offer", "ANSWER_WINDOW_MS", "3000")
    assert "offered to Ada for 3 s (offer 0)" in said
    assert "offered to Ben for 3 s (offer 1)" in said
    running.until("ride R8: Cleo did not answer in time")
    assert running.end() == 0
    assert "R7: " not in running.output


DAY_MS = 86_400_000


async def test_a_signer_is_reminded_three_times_and_then_the_manager_is_told(
    stage: Stage, service: Service, desk: Desk, tmp_path: Path
) -> None:
    """Days pass by the test clock: each brings one reminder, the fourth the escalation; who signed hears nothing."""
    folder, outbox = EXAMPLES / "reminder", f"sqlite:{tmp_path / 'outbox.db'}"
    flags = ("--nats", stage.broker.url, "--http", "127.0.0.1:0", "--handlers", "handlers", "--outbox", outbox)
    with Running("serve", *flags, cwd=folder, program=DURABLE_TIMER.with_name("notify-consumer")) as consumer:
        await asyncio.to_thread(_publish, folder, stage.broker.url)
        for number in range(4):
            await eventually(partial(_waits, desk, "C-2", number), what=f"day {number + 1} is waited for")
            assert service.http("/debug/clock", b'{"offset_ms": %d}' % DAY_MS)[0] == 200
            said = f"ben: please sign C-2 .reminder {number + 1} of 3" if number < 3 else "mia: ben has not signed C-2"
            await asyncio.to_thread(consumer.until, said)
        record = await desk.ended(_signature("C-2"))
        assert (record["status"], record["failure_code"], record["retries_used"]) == ("failed", "not_signed", 3)
        assert (await desk.ended(_signature("C-1")))["status"] == "cancelled"
        assert consumer.end() == 0
    assert consumer.output.count("to ben:") == 3
    assert "anna" not in consumer.output


def _publish(folder: Path, url: str) -> None:
    environment = {**os.environ, "NATS_URL": url}
    subprocess.run([sys.executable, "publisher.py"], cwd=folder, env=environment, timeout=60, check=True)


async def _waits(desk: Desk, run: str, generation: int) -> bool:
    state = await desk.state(_signature(run))
    return state is not None and (state["phase"], state["generation"]) == ("waiting", generation)


def _signature(run: str) -> str:
    node = "wait_for_signature"
    return ref_of({"flow_id": "contract", "flow_version": "1", "root_execution_id": run, "node_id": node})
