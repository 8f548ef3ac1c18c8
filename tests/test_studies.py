"""Studies: the runner, on one of its own, and what holds for all that there are."""

import json
import signal
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest
from studies.base import Run, Study
from studies.figures import plotted
from studies.full_length import drawn
from studies.runner import listing, load, main, pages, parse, studies
from studies.work import Work

from bkn_zoo.errors import InputError

ROOT = Path(__file__).parent.parent
SLEEP = "import time; time.sleep({})"


class Toy(Study):
    """Three seeds of one arm and, once these are done, one of another; a run's process does what `does` says."""

    name = "toy"

    def __init__(self, folder, does):
        self.results, self.does = folder / "results", does

    def planned(self, records, changes):
        first = [Run(f"one.seed={seed}", seed) for seed in range(3)]
        return [*first, *([Run("two.seed=0", 0)] if all(run.key in records for run in first) else [])]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Work on a toy; the processes wait, or do what they are told, and leave records."""

    def make(does="", jobs=2, minutes=5, **options):
        toy = Toy(tmp_path, does if callable(does) else lambda _: does)
        toy.results.mkdir(exist_ok=True)
        (tmp_path / "data").mkdir(exist_ok=True)
        base = {"data": tmp_path / "data", "output": tmp_path / "runs", "results": None, "only": None, "changes": {}}
        made = Work(toy, Namespace(**{**base, "jobs": jobs, "minutes": minutes, "arguments": [], **options}))

        def command(run):
            record = f"open({str(toy.results / run.name) + '.json'!r}, 'w').write({json.dumps({'name': run.name})!r})"
            return [sys.executable, "-S", "-c", f"{toy.does(run)}\n{record}"]

        monkeypatch.setattr(made, "command", command)
        return made

    return make


def left(work):
    return sorted(path.stem for path in work.study.results.iterdir())


def test_runs_are_trained_once_and_may_decide_on_more(work, capsys):
    assert work().through() == 0
    assert "4 runs done, 0 failed, 0 left" in capsys.readouterr().out
    again = work()
    assert again.through() == 0
    assert "0 runs to train" in capsys.readouterr().out
    assert Work.command(again, Run("one", 0)) == [sys.executable, str(ROOT / "scripts" / "study.py"), "--run", "one"]
    assert left(again) == ["one.seed=0", "one.seed=1", "one.seed=2", "two.seed=0"]


def test_no_run_starts_that_would_end_too_late(work):
    late = work(SLEEP.format(1.0), minutes=1.6 / 60)
    late.through()
    assert left(late) == ["one.seed=0", "one.seed=1"]


@pytest.mark.parametrize("by", ["the time", "SIGTERM"])
def test_running_jobs_are_stopped_at_the_end(work, by, capsys):
    begun = time.monotonic()
    if by == "SIGTERM":
        threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGTERM)).start()
    stopped = work(SLEEP.format(60), jobs=3, minutes=0.01 if by == "the time" else 5)
    assert stopped.through() == 0
    assert time.monotonic() - begun < 30
    assert "one.seed=0 stopped after 0 of 1 epochs" in capsys.readouterr().out
    assert left(stopped) == []


def test_failed_run_is_reported_and_others_continue(work, capsys):
    broken = work(lambda run: "print('it broke'); raise SystemExit(1)" if run.seed == 0 else "")
    assert broken.through() == 1
    output = capsys.readouterr().out
    assert "one.seed=0 failed (1): it broke" in output
    assert "2 runs done, 1 failed, 0 left" in output


def test_runs_are_chosen_by_name_and_by_their_data(work, tmp_path, monkeypatch, capsys):
    chosen = work(only=["one.seed=1"])
    chosen.through()
    assert left(chosen) == ["one.seed=1"]
    assert "one                                                          done: [1]  missing: [0, 2]" in listing(
        chosen.study, chosen.study.records(chosen.study.results)
    )
    with pytest.raises(InputError, match="unknown run or group 'three'"):
        work(only=["three"]).through()
    monkeypatch.setattr(Run, "data", "cats")
    assert work().through() == 0
    assert "skipping runs without data: data has no cats" in capsys.readouterr().out


def test_bad_arguments_of_a_study_are_one_sentence(tmp_path, capsys):
    for arguments, says in [
        ([], "nothing to do: choose --list, --data, --table or --plot"),
        (["replication", "--list", "--jobs", "0"], "--jobs must be at least 1"),
        (["--data", "x"], "--data and --results need one study"),
    ]:
        with pytest.raises(SystemExit):
            parse(arguments, None)
        assert says in capsys.readouterr().err
    for arguments, says in [
        (["--data", str(tmp_path / "none")], "there is no folder"),
        (["--list", "--set", "epochs"], "--set 'epochs' is not of the form FIELD=VALUE"),
        (["--data", str(tmp_path), "--pack", "x"], "replication uses the data sets as they are"),
    ]:
        with pytest.raises(InputError, match=says):
            main(["replication", *arguments])


# All studies.


@pytest.fixture(scope="module")
def known():
    found = [load(name) for name in studies()]
    return {study.name: (study, study.records(study.results)) for study in found}


@pytest.mark.parametrize("name", studies())
def test_pages_are_those_of_the_records(name, known):
    """`python scripts/study.py --table` writes them again."""
    study, records = known[name]
    assert study.name == name
    for path, text in pages(study, records).items():
        assert path.read_text(encoding="utf-8") == text, path.name


@pytest.mark.parametrize("name", ["replication", "pretrained"])
def test_pictures_are_those_of_the_records(name, known):
    """`python scripts/study.py --plot` draws them again."""
    pytest.importorskip("matplotlib")
    study, records = known[name]
    anew = {name: plotted(figure) for name, figure in study.figures(records).items() if figure is not None}
    assert {path.stem: drawn(path) for path in study.plots.glob("*.png")} == anew
