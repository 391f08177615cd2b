"""The example of a durable sleep, killed halfway as its README says."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.cli import Running
from tests.support.service import Desk, eventually, name_ref
from timer_service.embedded import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


async def test_a_flow_that_sleeps_is_killed_and_finishes_once(tmp_path: Path) -> None:
    """It is killed in its first wait, and so is all else; started again each step is done once, and then no wait is."""
    folder, port, journal = EXAMPLES / "durable_sleep", str(free_port()), tmp_path / "journal.txt"
    url = f"nats://127.0.0.1:{port}"
    environment = {"NATS_URL": url, "TRIAL_PAUSE_MS": "3000", "TRIAL_JOURNAL": str(journal)}

    def dev() -> Running:
        addresses = ("--port", port, "--http", "127.0.0.1:0", "--consumer-http", "127.0.0.1:0")
        return Running("dev", "--data", tmp_path, *addresses)

    def application() -> Running:
        return Running("application.py", cwd=folder, environment=environment, program=sys.executable)

    with dev() as services:
        services.until("Ctrl-C stops everything")
        async with Desk.at(url) as desk:
            with application() as killed:
                await eventually(
                    lambda: desk.state(name_ref("trial/C-1/ends soon", "sleep")), 20, what="the first wait"
                )
                killed.process.kill()
                assert killed.wait() != 0
        services.process.kill()
        services.wait()
    assert journal.read_text(encoding="utf-8").splitlines() == ["C-1: welcome"]
    with dev() as services:
        services.until("Ctrl-C stops everything", 60)
        for _ in range(2):
            with application() as again:
                again.until("finished", 40)
                assert again.wait() == 0
        assert services.end() == 0
    steps = ["C-1: welcome", "C-1: your trial ends soon", "C-1: your trial is over"]
    assert journal.read_text(encoding="utf-8").splitlines() == steps
