"""docs/notify-consumer.md tells the truth: its code runs, its metrics and commands exist, its links lead somewhere."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from notify_consumer.cli import app
from notify_consumer.metrics import Metrics
from notify_consumer.resume import read_resume
from notify_consumer.testkit import TimerTestKit
from tests.support.notify import resume_bytes

_DOCS = Path(__file__).parents[2] / "docs"
_PAGE = (_DOCS / "notify-consumer.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.DOTALL | re.MULTILINE)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "docs/notify-consumer.md", "exec"), names)
    return names


@pytest.mark.parametrize("block", _BLOCKS, ids=lambda block: f"block{_BLOCKS.index(block)}")
async def test_each_example_runs(block: str) -> None:
    """As it stands there, by itself; a test in it passes."""
    for name, value in run(block).items():
        if name.startswith("test_") and inspect.iscoroutinefunction(value):
            await value()


async def test_the_reminder_reminds_three_times_and_then_escalates() -> None:
    """The example of the page, with its own start, on a timer service in memory: days pass by hand."""
    starting, handling = run(_BLOCKS[0]), run(_BLOCKS[1])
    sent: list[tuple[str, str]] = []

    async def send(to: str, text: str, resume: Any) -> None:
        sent.append((to, resume.resume_id))

    handling["send"] = send
    async with TimerTestKit(handling["handlers"]) as kit:
        await starting["ask"](kit.client, "C-2", "ben")
        for day in range(1, 5):
            await kit.advance(86_400_000)
            assert len(sent) == day
        await kit.advance(30 * 86_400_000)
    assert [to for to, _ in sent] == ["ben", "ben", "ben", "mia"]
    assert len({resume_id for _, resume_id in sent}) == 4


def test_the_actions_of_the_page_are_found() -> None:
    """What is deferred there is registered there."""
    names = run(next(block for block in _BLOCKS if "class OrderTimers" in block))
    payload = names["OrderTimers"].expire.deferred("o-1").payload
    key = {"namespace": "timed-actions", "name": "expire-o-1"}
    assert names["handlers"].flow_of(read_resume(resume_bytes())) == "name:default/order"
    resume = read_resume(resume_bytes(timer=key, payload=payload))
    assert names["handlers"].find(resume).place == "order-timers/expire"


def test_metrics_and_commands_exist() -> None:
    """Every name in the table is a metric; every outbox command and flag is one."""
    known = {family.name for family in Metrics().registry.collect()}
    named = set(re.findall(r"`(notify_consumer_\w+?)(?:_total)?(?:\{[\w,]+\})?`", _PAGE))
    assert len(named) == 8
    assert named <= known
    for command in set(re.findall(r"outbox (list|show|revive|purge)", _PAGE)):
        assert CliRunner().invoke(app, ["outbox", command, "--help"]).exit_code == 0
    served = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    for flag in ("--drain-grace-ms", "--backoff-initial-ms", "--backoff-max-ms", "--max-attempts", "--concurrency"):
        assert flag in _PAGE
        assert flag in served


def test_links_lead_somewhere() -> None:
    """Files are there, and headings too."""
    titles = re.findall(r"^## (.+)$", _PAGE, re.MULTILINE)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(([^)]+)\)", _PAGE)
    assert len(links) >= 8
    for link in links:
        assert link[1:] in headings if link.startswith("#") else (_DOCS / link).exists(), link
