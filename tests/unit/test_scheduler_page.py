"""docs/scheduler.md tells the truth, and what it describes stands on nothing but the standard library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (_ROOT / "docs/scheduler.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
)
_PURE = """
import sys
before = set(sys.modules)
import timer_service.scheduler
ours = {name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names}
print(*sorted(ours))
"""


@pytest.mark.parametrize("block", _BLOCKS, ids=lambda block: f"block{_BLOCKS.index(block)}")
def test_each_example_runs(block: str) -> None:
    """As it stands there, by itself."""
    exec(compile(block, "docs/scheduler.md", "exec"), {"__name__": "__main__"})


def test_the_page_has_examples_of_everything() -> None:
    """Each class of the library is used in one."""
    assert len(_BLOCKS) == 5
    for name in ("TimerQueue", "DelayedScheduler", "IndexedHeap", "OffsetClock", "ManualClock"):
        assert any(f"{name}(" in block for block in _BLOCKS)


def test_the_library_is_pure() -> None:
    """Importing it imports six modules of ours and nothing that has to be installed."""
    run = subprocess.run([sys.executable, "-c", _PURE], capture_output=True, text=True, check=True, cwd=_ROOT)
    assert run.stdout.split() == [
        "timer_service",
        "timer_service.clock",
        "timer_service.domain",
        "timer_service.domain.heap",
        "timer_service.errors",
        "timer_service.scheduler",
    ]
