"""docs/contract-tests.md names tests that exist, and leaves no promise without a test or a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_TABLE = (_ROOT / "docs" / "contract-tests.md").read_text(encoding="utf-8")
_NAMED = re.compile(r"`([a-z0-9]+/test_\w+\.py)(?:::(\w+))?`")
_ROWS = [line for line in _TABLE.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| case"))]

_CASES = [f"C{number:02}" for number in (3, 5, 9, 10, 12, *range(17, 20), *range(21, 28), 29, *range(31, 46))]


@pytest.mark.parametrize(("path", "name"), sorted(set(_NAMED.findall(_TABLE))))
def test_every_test_named_there_exists(path: str, name: str) -> None:
    """A renamed test takes its row along."""
    text = (_ROOT / "tests" / path).read_text(encoding="utf-8")
    if name:
        assert re.search(rf"^(?:async def|def|class) {name}\b", text, re.MULTILINE), f"{path} has no {name}"


def test_every_row_has_a_test_or_says_why_not() -> None:
    """No promise stands there without either."""
    assert len(_ROWS) > 100
    bare = [row for row in _ROWS if not _NAMED.search(row) and "Not yet: " not in row]
    assert bare == []


def test_every_case_has_its_row() -> None:
    """The faults seen in the field, by their numbers in the acceptance list: one row each, in order."""
    assert re.findall(r"^\| (C\d\d) \|", _TABLE, re.MULTILINE) == _CASES


def test_a_row_names_nothing_that_is_not_checked() -> None:
    """Whatever looks like a test is one that the check above has found."""
    assert len(re.findall(r"::test_|::[A-Z]", _TABLE)) == sum(bool(name) for _, name in _NAMED.findall(_TABLE))
