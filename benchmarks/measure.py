"""Small tools for measuring: processor time from /proc, percentiles, medians."""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Processor seconds (user and system) that the process has used, in steps of 10 ms.

    Raises OSError if it is gone.
    """
    # The fields are counted from behind the process name, which may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least `percent` of the (ordered) values do not exceed."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median(values: Iterable[float]) -> float:
    """The median, or nan of nothing."""
    known = list(values)
    return statistics.median(known) if known else math.nan
