"""The examples, run as their READMEs say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import Running
from timer_service.embedded import free_port

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
            [sys.executable, "publisher.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return running, done.stdout

    yield play
    for running in started:
        running.__exit__()


def test_an_unpaid_order_is_cancelled(example: Example) -> None:
    """The paid order's timer never fires, the unpaid one's does."""
    running, said = example("order_timeout", "PAYMENT_WINDOW_MS", "1000")
    assert "order A-1 paid in time" in said
    running.until("order B-2 was not paid in time: cancelled")
    assert running.end() == 0
    assert "A-1 was not paid" not in running.output


def test_an_offer_moves_on_and_is_taken(example: Example) -> None:
    """The replaced and the accepted offer never pass; the one without an answer does."""
    running, said = example("ride_offer", "ANSWER_WINDOW_MS", "1500")
    assert "offered to Ada for 1.5 s (offer 0)" in said
    assert "offered to Ben for 1.5 s (offer 1)" in said
    running.until("ride R8: Cleo did not answer in time")
    assert running.end() == 0
    assert "R7: " not in running.output
