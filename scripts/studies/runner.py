"""The command of all studies: --list, --data, --pack, --table and --plot."""

import argparse
import json
import re
import shlex
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError
from studies.base import Record, Run, Study
from studies.work import Work


def studies() -> list[str]:
    """The names of all studies."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if re.search(r"^STUDY\b", file.read_text(encoding="utf-8"), re.MULTILINE)]


def load(name: str) -> Study:
    return import_module(f"studies.{name}").STUDY


def parse(arguments: list[str], about: str | None) -> tuple[argparse.Namespace, list[Study]]:
    """The options, and the studies that they select."""
    names = studies()
    chosen = [load(name) for name in (arguments[:1] if arguments[:1] and arguments[0] in names else names)]
    parser = argparse.ArgumentParser(
        "study.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", nargs="?", choices=names, help="default: all, for --list, --table and --plot")
    parser.add_argument("--list", action="store_true", help="list finished and missing runs")
    parser.add_argument("--table", action="store_true", help="write the study's pages")
    parser.add_argument("--plot", action="store_true", help="draw the study's figures")
    parser.add_argument("--data", type=Path, help="train the missing runs on the data sets in this folder")
    parser.add_argument("--pack", type=Path, help="do not train: copy the data that the study uses to this folder")
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
    for study in chosen if len(chosen) == 1 else []:
        study.add_options(parser)
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if not (args.list or args.table or args.plot or args.data):
        parser.error("nothing to do: choose --list, --data, --table or --plot")
    if not args.study and (args.data or args.results):
        parser.error(f"--data and --results need one study: choose {', '.join(names)}")
    args.changes = dict(map(change, args.set))
    args.arguments = arguments
    return args, chosen


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
    args, chosen = parse(arguments, about)
    failed = 0
    for study in chosen:
        failed += carry_out(study, args)
    return min(failed, 1)


def carry_out(study: Study, args: argparse.Namespace) -> int:
    """Apply the options to a study; returns the number of failed runs."""
    results, failed = args.results or study.results, 0
    if args.data and not args.data.is_dir():
        raise InputError(f"there is no folder {args.data}: pass the folder of the data sets.")
    if args.pack:
        study.pack(args)
        return 0
    if args.run:
        known = study.planned(study.records(results), args.changes)
        leave_record(study, next(run for run in known if run.name == args.run), args)
        return 0
    if args.data:
        failed = Work(study, args).through()
    records = study.records(results)
    if args.list:
        print(listing(study, records))
    if args.plot:
        from studies.figures import save_figures

        save_figures(study.figures(records), study.plots)
    if args.table:
        for path, text in pages(study, records).items():
            path.write_text(text, encoding="utf-8")
    return failed


def pages(study: Study, records: Mapping[str, Record]) -> dict[Path, str]:
    """The text of the study's pages, with all regions filled from its records."""
    from studies.regions import filled

    return {path: filled(path, contents) for path, contents in study.regions(records).items()}


def listing(study: Study, records: Mapping[str, Record]) -> str:
    """One line for each group of runs that differ only in their seeds."""
    arms: dict[str, list[Run]] = {}
    planned = study.planned(records, {})
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
    from bkn_zoo.checkpoints.provenance import environment
    from bkn_zoo.publishing.results import write_record

    folder = args.output / study.name / run.name
    folder.mkdir(parents=True, exist_ok=True)
    found = study.train(run, args)
    words = ["python", "scripts/study.py", study.name, "--data", args.data.name, "--only", run.name]
    words += ["--set", *args.set] if args.set else []
    origin = {"jobs": args.jobs, **environment(run.seed), "command": shlex.join(words)}
    text = json.dumps({"name": run.name, **found, **origin}, separators=(",", ":"))
    write_record((args.results or study.results) / f"{run.name}.json", text)
