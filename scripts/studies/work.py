"""Trains the runs of a study in parallel, one process per run."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError
from studies.base import ROOT, Run, Study


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
    """Trains the missing runs of a study.

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
                if self.gather():
                    runs = self.missing()  # a finished run may lead to further ones
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
        """Selected runs that have data and no record, and are neither running nor failed."""
        records = self.study.records(self.results)
        runs = selected(self.study.planned(records, self.args.changes), self.args.only)
        busy = {job.run.name for job in self.jobs} | self.failed
        wanted = [run for run in runs if run.key not in records and run.name not in busy]
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

    def gather(self) -> bool:
        """Remove finished jobs; returns whether there were any."""
        ended = [job for job in self.jobs if job.process.poll() is not None]
        for job in ended:
            self.jobs.remove(job)
            if job.process.returncode:
                self.failed.add(job.run.name)
                print(f"{job.run.name} failed {job.failure()}", flush=True)
                continue
            self.done += 1
            seconds = time.monotonic() - job.started
            self.pace[job.run.like] = max(seconds / job.run.epochs, self.pace.get(job.run.like, 0.0))
            print(f"{self.clock()}{job.run.name}: {seconds:.0f} s", flush=True)
        return bool(ended)

    def end(self) -> None:
        """Stop the active jobs. Trainings that saved their state resume from it next time."""
        self.gather()
        for job in self.jobs:
            job.process.terminate()
        for job in self.jobs:
            job.process.wait()
            print(f"{job.run.name} stopped after {self.epochs_done(job.run)} of {job.run.epochs} epochs", flush=True)
