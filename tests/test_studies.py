"""Studies: the runner, on one of its own, and what holds for all that there are."""

import json
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from statistics import mean

import pytest
import torch
from studies.base import RESULTS, Run, Study
from studies.figures import drawn, plotted
from studies.render import fill, frame, rendered
from studies.runner import Work, listing, load, main, parse, studies
from timm.layers import EvoNorm2dS0, FilterResponseNormTlu2d

import bkn_zoo
from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES

ROOT = Path(__file__).parent.parent
SLEEP = "import time; time.sleep({})"


class Toy(Study):
    """Three seeds of one arm; a run's process does what `does` says."""

    name, data = "toy", ""

    def __init__(self, folder, does):
        self.results, self.does = folder / "results", does

    def planned(self, changes):
        return [Run(f"one.seed={seed}", seed, data=self.data) for seed in range(3)]


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


def test_runs_are_trained_once(work, capsys):
    assert work().through() == 0
    assert "3 runs done, 0 failed, 0 left" in capsys.readouterr().out
    again = work()
    assert again.through() == 0
    assert "0 runs to train" in capsys.readouterr().out
    assert Work.command(again, Run("one", 0)) == [sys.executable, str(ROOT / "scripts" / "study.py"), "--run", "one"]
    assert left(again) == ["one.seed=0", "one.seed=1", "one.seed=2"]


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
    monkeypatch.setattr(Toy, "data", "cats")
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
    ]:
        with pytest.raises(InputError, match=says):
            main(["replication", *arguments])


def test_training_needs_neither_pandas_nor_scipy():
    """Machines with a GPU may lack them."""
    code = "import sys; from studies.runner import *; [load(name) for name in studies()]; print(*sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT / "scripts", text=True)
    assert {"pandas", "scipy", "jinja2"}.isdisjoint(output.split())


# Pages.

PAGE = "# Page\n\n<!-- begin: table -->\nold\n<!-- end: table -->\n\nOver <!-- begin: n -->3<!-- end: n --> runs.\n"


def test_a_page_shows_its_tables_which_are_csv_files_too(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    table = frame([{"a": "**1.5 ± 0.2**", "`b`": 2}, {"a": 0.25}])
    texts = rendered({page: {"table": [table, "A sentence.", table], "n": "12"}})
    shown = "| a | `b` |\n| --- | --- |\n| **1.5 ± 0.2** | 2 |\n| 0.250 | - |\n\n"
    assert texts.pop(page) == (
        f"# Page\n\n<!-- begin: table -->\n\n{shown}A sentence.\n\n{shown}<!-- end: table -->\n\n"
        "Over <!-- begin: n -->12<!-- end: n --> runs.\n"
    )
    assert {f"{path.parent.name}/{path.name}" for path in texts} == {"page/table.csv", "page/table.2.csv"}
    assert set(texts.values()) == {"a,b\n1.5 ± 0.2,2\n0.250,-\n"}
    assert [path.parent.name for path in rendered({tmp_path / "no page": {"table": table}})] == ["no page"]


@pytest.mark.parametrize(
    ("page", "contents", "message"),
    [
        (PAGE, {"table": "x", "n": "1", "more": "2"}, "page.md: there is no region for more"),
        ("<!-- begin: a -->\n", {"a": "x"}, "begin: a --> has no partner"),
        ("<!-- begin: a --><!-- end: b -->", {"a": "x", "b": "x"}, "begin: a --> has no partner"),
        (PAGE + PAGE, {"table": "x", "n": "1"}, "the region table occurs twice"),
    ],
)
def test_fill_refuses_markers_and_contents_that_differ(page, contents, message):
    with pytest.raises(InputError, match=message):
        fill(page, contents, "page.md")


@pytest.mark.parametrize("name", studies())
def test_pages_and_figures_are_those_of_the_records(name):
    """`python scripts/study.py --table --plot` writes them again."""
    study = load(name)
    records = study.records(study.results)
    texts = rendered(study.regions(records))
    assert [path.name for path, text in texts.items() if path.read_text(encoding="utf-8") != text] == []
    for figure, anew in study.figures(records).items():
        assert drawn(RESULTS / "plots" / f"{figure}.png") == plotted(anew)


def test_sample_is_the_best_mode_under_blur():
    """But for ResNet101 and glass blur; under changed contrast, but for CIFAR-100 with groups of two."""
    from studies.shift import STUDY, by_corruption

    best = {}
    for row in by_corruption(STUDY.records(STUDY.results)):
        modes = {name: float(value) for name, value in row.items() if name in MODES}
        best[row["network"], row["corruption"]] = max(modes, key=modes.__getitem__)
    blurs = [f"{kind}_blur" for kind in ("defocus", "glass", "motion", "zoom")]
    networks = {network for network, _ in best}
    assert len(networks) == 7
    for network in networks:
        others = [blur for blur in blurs if best[network, blur] != "sample"]
        assert others == ["glass_blur"] * network.startswith("resnet101")
        assert (best[network, "contrast"] == "sample") == (network != "inception_cifar_bkn.cifar100")


def test_sentences_on_standardized_weights_follow_from_records():
    from studies.replication import newer
    from studies.replication_cells import cell

    plan, records = newer()
    found = {name: cell(arm, records) for name, arm in plan.arms.items()}
    text = " ".join((ROOT / "docs" / "results.md").read_text().split())
    options = "initial_gain=0.1,lr={},standardized_weights=True"
    (of_32,) = found[f"cifar100.bkn.128-32.{options.format(0.4)}"].records
    assert "with groups of 32 (15 epochs, one seed) only three of 18." in text
    assert (len(of_32["gain"]), sum(gain < 0.05 for gain in of_32["gain"].values())) == (18, 3)
    assert "0.5 (two images, one seed) are within a point of 0.1 with `sample`, and at most 1.3 lower with" in text
    name = "cifar100_small.bkn.2-2.initial_gain={},lr=0.01,standardized_weights=True"
    for mode, lower, higher in (("sample", 1, 1), ("expected", 1.3, 0)):
        tops = [mean(found[name.format(gain)].top1(mode)) for gain in (0.1, 0.05, 0.2, 0.5)]
        assert tops[0] - lower < min(tops)
        assert max(tops) <= tops[0] + higher


@pytest.mark.parametrize(("norm", "layer"), [("evonorm", EvoNorm2dS0), ("frn", FilterResponseNormTlu2d)])
def test_rivals_are_the_layers_of_timm(norm, layer):
    """They activate by themselves."""
    import studies.rivals  # noqa: F401, registers norms, which other tests must not see

    rival = bkn_zoo.create_model(f"inception_cifar_{norm}", 10).conv.norm
    x = torch.randn(2, len(rival.layer.weight), 4, 4)
    assert type(rival.layer) is layer
    assert torch.equal(rival(x, relu=True)[0], rival.layer(x))


def test_control_only_scales_and_shifts_before_the_pooling():
    from studies.rivals import ScaleAndShift

    network = bkn_zoo.create_model("inception_cifar_bnplain", 10)
    plain = {name: module for name, module in network.named_modules() if isinstance(module, ScaleAndShift)}
    assert list(plain) == [f"inception_c.branches.{branch}.norm" for branch in ("0.0", "1.1", "2.1", "3.1")]
    # They are the last before the pooling: without them, nothing of an image is left there.
    for module in plain.values():
        torch.nn.init.zeros_(module.weight)
    assert network.forward_features(torch.randn(2, 3, 32, 32)).count_nonzero() == 0
