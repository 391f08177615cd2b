"""The examples of docs/testing.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def _examples() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, block in enumerate(_BLOCK.findall(_PAGE.read_text(encoding="utf-8"))):
        names: dict[str, Any] = {"__name__": f"example_{number}"}
        exec(compile(block, str(_PAGE), "exec"), names)
        found |= {name: value for name, value in names.items() if name.startswith("test_")}
    return found


def test_there_are_examples() -> None:
    """They were found."""
    assert len(_examples()) == 3


@pytest.mark.parametrize("name", sorted(_examples()))
async def test_an_example_holds(name: str) -> None:
    """What the page promises is what happens."""
    await _examples()[name]()
