"""The tables at the end of a benchmark run: medians over the rounds, ratios taken within each round."""

from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import median

Round = dict[str, Any]
OURS, RIVAL, LIMIT = "durable-timer", "everyday", "limit"


def rate_of(measured: Round, name: str) -> float | None:
    """Messages a second (limit) or lifecycles a second; None if that contender did not run."""
    if measured[name] is None:
        return None
    return float(measured[name]["acked_per_s" if name == LIMIT else "lifecycles_per_s"])


def share_of_limit(measured: Round, name: str) -> float | None:
    """Stored writes a second in lifecycles, as a part of the acknowledged writes a second of the limit."""
    rate, limit = rate_of(measured, name), rate_of(measured, LIMIT)
    if rate is None or not limit:
        return None
    return rate * float(measured[name]["writes_per_lifecycle"]) / limit


def ratio_to_rival(measured: Round, name: str) -> float | None:
    """How many times the everyday contender's lifecycles a second."""
    rate, rival = rate_of(measured, name), rate_of(measured, RIVAL)
    return rate / rival if rate is not None and rival else None


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The headline figures, also part of the JSON file."""
    rounds = figures["rounds"]
    return {
        "limit_acked_per_s": _median(rounds, lambda one: rate_of(one, LIMIT)),
        "everyday_lifecycles_per_s": _median(rounds, lambda one: rate_of(one, RIVAL)),
        "durable_timer_lifecycles_per_s": _median(rounds, lambda one: rate_of(one, OURS)),
        "ratio_to_everyday": _median(rounds, lambda one: ratio_to_rival(one, OURS)),
        "share_of_limit": _median(rounds, lambda one: share_of_limit(one, OURS)),
        "everyday_share_of_limit": _median(rounds, lambda one: share_of_limit(one, RIVAL)),
    }


def render(figures: dict[str, Any], console: Console) -> None:
    """Print the tables, what they mean, and the problems."""
    machine = figures["machine"]
    console.print(
        f"{machine['cores']} cores, Python {machine['python']}, {machine['system']}, "
        f"load average at start {machine['load_average']:.1f}"
    )
    console.print(_throughput_table(figures["rounds"]))
    console.print("  per second: lifecycles; limit: acknowledged 600-byte messages, 256 in flight\n", style="dim")
    console.print(_cpu_table(figures["rounds"]))
    if figures["lateness"]:
        console.print(_lateness_table(figures["lateness"]))
        console.print("  from due until the flow engine has the resume; at once: max = the last one\n", style="dim")
    for problem in dict.fromkeys(figures["problems"]):
        console.print(f"problem: {problem}", style="red", markup=False)


def _throughput_table(rounds: list[Round]) -> Table:
    table = _table("throughput (median of rounds)")
    for heading in ("per second", "range", "writes", "of limit", "to everyday"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in (LIMIT, RIVAL, OURS):
        table.add_row(name, *_throughput_cells(rounds, name))
    return table


def _throughput_cells(rounds: list[Round], name: str) -> list[str]:
    ran = _ran(rounds, name)
    if not ran:
        return ["-", "did not run"]
    speeds = [rate_of(one, name) or 0.0 for one in ran]
    cells = [f"{median(speeds):,.0f}", f"{min(speeds):,.0f}-{max(speeds):,.0f}"]
    if name == LIMIT:
        return [*cells, "1.0", "100.0%"]
    writes = median(one[name]["writes_per_lifecycle"] for one in ran)
    share = _median(ran, lambda one: share_of_limit(one, name))
    ratio = _median(ran, lambda one: ratio_to_rival(one, name))
    return [*cells, f"{writes:.1f}", _format(share, "{:.1%}"), _format(ratio, "{:.2f}x")]


def _cpu_table(rounds: list[Round]) -> Table:
    table = _table("processor ms per lifecycle")
    processes = ("service", "broker", "load")
    for process in processes:
        table.add_column(process, justify="right")
    for name in (RIVAL, OURS):
        if ran := _ran(rounds, name):
            table.add_row(name, *(f"{_cpu(ran, name, process):.2f}" for process in processes))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("contender", no_wrap=True)
    return table


def _ran(rounds: Iterable[Round], name: str) -> list[Round]:
    return [one for one in rounds if one[name] is not None]


def _cpu(rounds: Iterable[Round], name: str, process: str) -> float:
    return median(one[name]["cpu_ms_per_lifecycle"][process] for one in rounds)


def _lateness_table(runs: list[dict[str, Any]]) -> Table:
    table = _table("lateness of resumes")
    table.add_column("load")
    for heading in ("resumes", "p50 ms", "p99 ms", "max ms", "early", "per second"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(run["contender"], run["load"], *_lateness_cells(run))
    return table


def _lateness_cells(run: dict[str, Any]) -> list[str]:
    late = run["lateness"]
    cells = [f"{late['samples']:,}", *(f"{late[key]:,.1f}" for key in ("p50_ms", "p99_ms", "max_ms"))]
    at_once = "armed_before_due" in run and late["max_ms"] > 0
    speed = f"{late['samples'] * 1000 / late['max_ms']:,.0f}" if at_once else ""
    return [*cells, str(late["early"]), speed]


def _median(rounds: Iterable[Round], value: Callable[[Round], float | None]) -> float | None:
    known = [found for one in rounds if (found := value(one)) is not None]
    return median(known) if known else None


def _format(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
