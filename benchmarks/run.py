"""The benchmark: limit, everyday contender and our service in turn, several rounds, medians.

    python -m benchmarks.run [--quick] [--json FILE]

A round measures all of them one after another, each on a fresh broker, so that noise of the box meets them
alike; ratios are taken within a round. Exit code 1 means that something was lost, early, refused, or did not
run at all.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from benchmarks.broker import Broker, running_broker
from benchmarks.contenders import DURABLE_TIMER, EVERYDAY, ROOT, Contender, ContenderError, serving
from benchmarks.report import render, summary
from timer_service.embedded import EmbeddedServerError

_LOAD_TIMEOUT_S = 170
_MIN_WIDTH = 100  # where output is no terminal, rich would assume 80 columns and break the headings


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how much. Lateness rates are starts a second; a burst of 0 is left out."""

    rounds: int = 3
    limit_s: float = 3.0
    seconds: float = 6.0
    warm_up_s: float = 1.5
    window: int = 512
    rates: tuple[int, ...] = (200, 1000)
    everyday_rates: tuple[int, ...] = (200,)
    burst: int = 10_000
    burst_lead_s: float = 8.0


QUICK = Plan(
    rounds=1,
    limit_s=1.5,
    seconds=2.5,
    warm_up_s=1.0,
    rates=(200,),
    everyday_rates=(),
    burst=2_000,
    burst_lead_s=2.5,
)


@dataclass(slots=True)
class Results:
    """Everything measured, ready for JSON. `problems` are in words, and make the run fail."""

    machine: dict[str, Any]
    plan: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)
    lateness: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Benchmark:
    """Works through a plan and collects what it finds; a contender that fails does not end the run."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self.results = Results(_machine(), asdict(plan))

    def run(self) -> Results:
        """All rounds, then lateness."""
        for number in range(1, self._plan.rounds + 1):
            pair = (EVERYDAY, DURABLE_TIMER) if number % 2 else (DURABLE_TIMER, EVERYDAY)
            self.results.rounds.append(self._round(f"round {number} of {self._plan.rounds}", pair))
        self._lateness(EVERYDAY, self._plan.everyday_rates, 0)
        self._lateness(DURABLE_TIMER, self._plan.rates, self._plan.burst)
        return self.results

    def _round(self, label: str, pair: tuple[Contender, Contender]) -> dict[str, Any]:
        """Limit and both contenders; who comes first changes from round to round, as no place is neutral."""
        self._say(f"{label}: limit")
        measured: dict[str, Any] = {"limit": self._limit()}
        for contender in pair:
            self._say(f"{label}: {contender.name}")
            measured[contender.name] = self._guarded(contender, self._throughput)
        return measured

    def _limit(self) -> dict[str, Any]:
        with running_broker() as broker:
            return _json_of("benchmarks.limit", "--nats", broker.url, "--seconds", str(self._plan.limit_s))

    def _throughput(self, contender: Contender, broker: Broker) -> dict[str, Any]:
        with serving(contender, broker.url) as pid:
            options = ("--seconds", str(self._plan.seconds), "--window", str(self._plan.window))
            watch = ("--watch", f"service={pid}", "--watch", f"broker={broker.pid}")
            return self._load(contender, "throughput", broker, *options, *watch)

    def _lateness(self, contender: Contender, rates: tuple[int, ...], burst: int) -> None:
        if not rates and not burst:
            return
        self._guarded(contender, lambda _, broker: self._lateness_runs(contender, broker, rates, burst))

    def _lateness_runs(
        self, contender: Contender, broker: Broker, rates: tuple[int, ...], burst: int
    ) -> dict[str, Any]:
        with serving(contender, broker.url):
            for rate in rates:
                self._say(f"lateness: {contender.name}, {rate}/s")
                options = ("--rate", str(rate), "--seconds", str(self._plan.seconds))
                self._record(contender, f"{rate}/s", self._load(contender, "paced", broker, *options))
            if burst:
                self._say(f"lateness: {contender.name}, {burst} at once")
                options = ("--count", str(burst), "--lead", str(self._plan.burst_lead_s))
                self._record(contender, f"{burst} at once", self._load(contender, "burst", broker, *options))
        return {}

    def _record(self, contender: Contender, load: str, measured: dict[str, Any]) -> None:
        self.results.lateness.append({"contender": contender.name, "load": load, **measured})
        if early := measured["lateness"]["early"]:
            self.results.problems.append(f"{contender.name}, {load}: {early} resumes came early")

    def _load(self, contender: Contender, scenario: str, broker: Broker, *options: str) -> dict[str, Any]:
        warm_up = ("--warm-up", str(self._plan.warm_up_s))
        measured = _json_of("benchmarks.load", scenario, "--nats", broker.url, *warm_up, *options)
        for fault in ("lost", "live_left", "refused"):
            if measured[fault]:
                self.results.problems.append(f"{contender.name}, {scenario}: {fault} {measured[fault]}")
        return measured

    def _guarded(
        self, contender: Contender, measure: Callable[[Contender, Broker], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """What `measure` finds on a fresh broker, or None and a problem in words."""
        try:
            with running_broker() as broker:
                return measure(contender, broker)
        except ContenderError as error:
            self.results.problems.append(str(error))
            return None


def _json_of(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of this package as a process of its own and read its JSON. Raises ContenderError."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LOAD_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise ContenderError(f"{module} failed: {str(error.stderr).strip()[-1500:]}") from error
    except subprocess.TimeoutExpired as error:
        raise ContenderError(f"{module} did not end within {_LOAD_TIMEOUT_S} s") from error
    return cast("dict[str, Any]", json.loads(done.stdout))


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": os.getloadavg()[0],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="throughput, lateness and processor time, as ratios")
    parser.add_argument("--quick", action="store_true", help="one short round, about 20 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    return parser.parse_args()


def main() -> int:
    """Command line entry."""
    options = _options()
    progress = Console(stderr=True)
    with progress.status("starting") as status:
        try:
            results = Benchmark(QUICK if options.quick else Plan(), status.update).run()
        except (ContenderError, EmbeddedServerError) as error:
            sys.exit(str(error))
    figures = asdict(results)
    figures["summary"] = summary(figures)
    render(figures, Console(width=max(_MIN_WIDTH, progress.width)))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if results.problems else 0


if __name__ == "__main__":
    sys.exit(main())
