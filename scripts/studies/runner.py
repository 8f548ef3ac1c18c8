"""The command of all studies: lists runs, trains the missing ones in parallel, and writes pages and figures.

It imports neither pandas nor scipy unless pages are written, because the machines that train may lack them.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError
from studies.base import RESULTS, ROOT, Record, Run, Study


def studies() -> list[str]:
    """The names of all studies."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if re.search(r"^STUDY\b", file.read_text(encoding="utf-8"), re.MULTILINE)]


def load(name: str) -> Study:
    return import_module(f"studies.{name}").STUDY


def parse(arguments: list[str], about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "study.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = studies()
    parser.add_argument("study", nargs="?", choices=names, help="default: all, for --list, --table and --plot")
    parser.add_argument("--list", action="store_true", help="list finished and missing runs")
    parser.add_argument("--table", action="store_true", help="write the study's pages, and results/tables/")
    parser.add_argument("--plot", action="store_true", help="draw the study's figures")
    parser.add_argument("--data", type=Path, help="train the missing runs on the data sets in this folder")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="train only these runs or groups of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--device", default=None, help="device (default: cuda if available)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/studies"), help="folder for unfinished runs and decoded images"
    )
    parser.add_argument("--results", type=Path, help="folder for the records; default: the study's folder in results/")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="override recipe fields; use with another --results"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)  # used by the runner for its processes
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if not (args.list or args.table or args.plot or args.data):
        parser.error("nothing to do: choose --list, --data, --table or --plot")
    if not args.study and (args.data or args.results):
        parser.error(f"--data and --results need one study: choose {', '.join(names)}")
    args.changes = dict(map(change, args.set))
    args.arguments = arguments
    return args


def change(text: str) -> tuple[str, Any]:
    """A field and its value, parsed as JSON if possible."""
    field, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text!r} is not of the form FIELD=VALUE: correct it.")
    try:
        return field, json.loads(value)
    except json.JSONDecodeError:
        return field, value


def main(arguments: list[str], about: str | None = None) -> int:
    args = parse(arguments, about)
    failed = [carry_out(load(name), args) for name in ([args.study] if args.study else studies())]
    return min(sum(failed), 1)


def carry_out(study: Study, args: argparse.Namespace) -> int:
    """Apply the options to a study; returns the number of failed runs."""
    results, failed = args.results or study.results, 0
    if args.data and not args.data.is_dir():
        raise InputError(f"there is no folder {args.data}: pass the folder of the data sets.")
    if args.run:
        leave_record(study, next(run for run in study.planned(args.changes) if run.name == args.run), args)
        return 0
    if args.data:
        failed = Work(study, args).through()
    records = study.records(results)
    if args.list:
        print(listing(study, records))
    if args.plot:
        from studies.figures import save_figures

        save_figures(study.figures(records), RESULTS / "plots")
    if args.table:
        from studies.render import rendered, write

        write(rendered(study.regions(records)))
    return failed


def listing(study: Study, records: Mapping[str, Record]) -> str:
    """One line for each group of runs that differ only in their seeds."""
    arms: dict[str, list[Run]] = {}
    planned = study.planned({})
    for run in planned:
        arms.setdefault(run.name.partition(".seed=")[0], []).append(run)
    lines = [f"{study.name}:"]
    for arm, runs in arms.items():
        done, rest = ([run.seed for run in runs if (run.key in records) is there] for there in (True, False))
        lines.append(f"  {arm:<60} done: {done or '-'}  missing: {rest or '-'}")
    count = sum(run.key in records for run in planned)
    return "\n".join([*lines, f"{count} of {len(planned)} runs are done"])


def leave_record(study: Study, run: Run, args: argparse.Namespace) -> None:
    """Train a run and write its record, with command, hardware and versions."""
    from bkn_zoo.checkpoints.files import replace_file
    from bkn_zoo.checkpoints.provenance import environment

    (args.output / study.name / run.name).mkdir(parents=True, exist_ok=True)
    found = study.train(run, args)
    words = ["python", "scripts/study.py", study.name, "--data", args.data.name, "--only", run.name]
    words += ["--set", *args.set] if args.set else []
    origin = {"jobs": args.jobs, **environment(run.seed, args.device), "command": shlex.join(words)}
    text = json.dumps({"name": run.name, **found, **origin}, separators=(",", ":"))
    path = (args.results or study.results) / f"{run.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text + "\n")  # completely or not at all, because an existing file means that the run is done


def selected(runs: Sequence[Run], only: Sequence[str] | None) -> list[Run]:
    """The runs selected by --only; all runs if it is not given."""
    if only is None:
        return list(runs)
    known = {name for run in runs for name in (run.name, *run.groups)}
    for name in only:
        if name not in known:
            groups = ", ".join(dict.fromkeys(name for run in runs for name in run.groups))
            raise InputError(f"unknown run or group {name!r} for --only: choose among {groups}.")
    return [run for run in runs if not {run.name, *run.groups}.isdisjoint(only)]


@dataclass
class Job:
    run: Run
    process: subprocess.Popen[bytes]
    folder: Path
    started: float

    def failure(self) -> str:
        """Exit code and last lines of output."""
        tail = (self.folder / "output.txt").read_text(errors="replace").strip().splitlines()[-3:]
        return f"({self.process.returncode}): {' | '.join(tail)}"


class Work:
    """Trains the missing runs of a study in parallel, one process per run.

    Args:
        study: the study.
        args: the options of the command.
    """

    def __init__(self, study: Study, args: argparse.Namespace) -> None:
        self.study, self.args = study, args
        self.results = args.results or study.results
        self.begun = time.monotonic()
        self.deadline = self.begun + 60 * args.minutes
        self.jobs: list[Job] = []
        self.failed: set[str] = set()
        self.lacking: set[str] = set()  # folders of data sets
        self.pace: dict[str, float] = {}  # largest number of seconds per epoch, by Run.like
        self.done = 0

    def through(self) -> int:
        """Train until no run is missing or the time limit is reached; returns the number of failed runs."""
        runs = self.missing()
        print(f"{len(runs)} runs to train", flush=True)
        if self.lacking:
            print(f"skipping runs without data: {self.args.data.name} has no {', '.join(sorted(self.lacking))}")
        self.study.prepare(runs, self.args)
        before = signal.signal(signal.SIGTERM, self.stop)
        said = time.monotonic()
        try:
            while time.monotonic() < self.deadline:
                self.gather()
                runs = [run for run in runs if self.fits(run)]
                while runs and len(self.jobs) < self.args.jobs:
                    self.jobs.append(self.start(runs.pop(0)))
                if not self.jobs:
                    break
                if time.monotonic() - said > 20:
                    said = time.monotonic()
                    epochs = sorted(self.epochs_done(job.run) for job in self.jobs)
                    print(f"{self.clock()}{self.done} done, {len(runs)} to start; running: epochs {epochs}", flush=True)
                time.sleep(0.1)
        finally:
            self.end()
            signal.signal(signal.SIGTERM, before)
        left = len(self.missing())
        print(f"{self.done} runs done, {len(self.failed)} failed, {left} left,{self.clock()}", flush=True)
        return len(self.failed)

    def clock(self) -> str:
        return f"{time.monotonic() - self.begun:5.0f} s  "

    def stop(self, *_: Any) -> None:
        self.deadline = 0.0

    def missing(self) -> list[Run]:
        """Selected runs that have data and no record, and did not fail."""
        records = self.study.records(self.results)
        runs = selected(self.study.planned(self.args.changes), self.args.only)
        wanted = [run for run in runs if run.key not in records and run.name not in self.failed]
        self.lacking = {run.data for run in wanted if not (self.args.data / run.data).is_dir()}
        return [run for run in wanted if run.data not in self.lacking]

    def folder(self, run: Run) -> Path:
        return self.args.output / self.study.name / run.name

    def epochs_done(self, run: Run) -> int:
        log = self.folder(run) / "log.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def fits(self, run: Run) -> bool:
        """Whether a run would finish before the deadline, at the pace of similar runs."""
        rest = run.epochs - self.epochs_done(run)
        return time.monotonic() + rest * self.pace.get(run.like, 0.0) < self.deadline

    def start(self, run: Run) -> Job:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        environ = os.environ | ({"OMP_NUM_THREADS": "1"} if self.args.jobs > 1 else {})
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(self.command(run), stdout=output, stderr=subprocess.STDOUT, env=environ)
        return Job(run, process, folder, time.monotonic())

    def command(self, run: Run) -> list[str]:
        """The same command for one run."""
        return [sys.executable, str(ROOT / "scripts" / "study.py"), *self.args.arguments, "--run", run.name]

    def gather(self) -> None:
        """Remove finished jobs."""
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            self.jobs.remove(job)
            if job.process.returncode:
                self.failed.add(job.run.name)
                print(f"{job.run.name} failed {job.failure()}", flush=True)
                continue
            self.done += 1
            seconds = time.monotonic() - job.started
            self.pace[job.run.like] = max(seconds / job.run.epochs, self.pace.get(job.run.like, 0.0))
            print(f"{self.clock()}{job.run.name}: {seconds:.0f} s", flush=True)

    def end(self) -> None:
        """Stop the active jobs. Trainings that saved their state resume from it next time."""
        self.gather()
        for job in self.jobs:
            job.process.terminate()
        for job in self.jobs:
            job.process.wait()
            print(f"{job.run.name} stopped after {self.epochs_done(job.run)} of {job.run.epochs} epochs", flush=True)
