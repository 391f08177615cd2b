"""C36: a quiet service is not late. Two minutes of it, in a process of its own beside the other tests."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.steady import Steady


@pytest.mark.timeout(240)
def test_c36_a_quiet_service_is_not_late(steady: Steady, record_property: Any) -> None:
    """C36: starts 1.7 s apart with idle gaps of 7 s, due after 1.5 s: each fires once, none late by a fetch."""
    result = steady.result()
    for name in ("p50_ms", "p99_ms", "max_ms"):
        record_property(name, result[name])
    print(f"a quiet service: {result}")
    assert result["started"] >= 45
    assert result["fired"] == result["started"]
    assert (result["twice"], result["early"]) == (0, 0)
    assert result["max_ms"] < 2_000 + result["stall_ms"], f"late by a fetch time-out: {result}"


def test_the_long_version_runs(tmp_path: Any) -> None:
    """``python -m benchmarks.steady`` measures what it says: a few seconds of the twenty minutes."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.steady", "--minutes", "0.05", "--every", "0.5"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["started"] == result["fired"] >= 4, done.stderr
