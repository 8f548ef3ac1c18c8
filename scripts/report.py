"""Writes the documents that show measurements, from the JSON files under results/ and the checkpoints' configs.

python scripts/report.py      # docs/performance.md, docs/runs.md, MODEL_CARD.md, checkpoints/*/README.md,
                              # docs/full_length.png, and tables of README.md, docs/imagenet.md, docs/conversion.md
                              # and docs/finetuning.md
"""

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.norms import MODES
from bkn_zoo.publishing.cards import (
    DATASETS,
    Run,
    batches,
    gained,
    read_evaluations,
    read_runs,
    read_speeds,
    read_twins,
)
from bkn_zoo.publishing.finetuning import read_study, study_table
from bkn_zoo.publishing.full_length import FullLength, draw_full_length, full_length_table, full_lengths
from bkn_zoo.publishing.publish import card_from_results
from bkn_zoo.publishing.replication import counted, measured
from bkn_zoo.publishing.results import table
from bkn_zoo.publishing.zoo_card import zoo_card
from bkn_zoo.training.recipes import Recipe, read_recipe

ROOT = Path(__file__).resolve().parent.parent
PERFORMANCE, RUNS, IMAGENET, CONVERSION = (
    ROOT / "docs" / name for name in ("performance.md", "runs.md", "imagenet.md", "conversion.md")
)
FINETUNING = ROOT / "docs" / "finetuning.md"
MODEL_CARD, README, PICTURE = ROOT / "MODEL_CARD.md", ROOT / "README.md", ROOT / "docs" / "full_length.png"
CHECKPOINTS, RESULTS = ROOT / "checkpoints", ROOT / "results"
TRAIN_GPU = ("train", "train_inception", "train_16")
"""The files with training steps on a GPU, a network's own first."""

INTRODUCTION = """\
# How fast it is

This page is written by `python scripts/report.py` from the files under `results/`; a test fails when the two disagree.
Contestants take turns within one run. Times are medians over the rounds, a spread is the slowest round less the
fastest, and every ratio is the median of the ratios within a round.
"""

LOOP = """\
## Training on a GPU: an ordinary loop

One optimizer step on random images of 224 px, bfloat16 autocast, channels_last, a fused optimizer. BN is torchvision's
own network where it has one, and normalizes whole batches; BKN runs on the fused kernels of `bkn_zoo/kernels`, by
groups of *statistics_batch*. `ratio_to_bn` is to BN run in the same way, `ratio_to_fastest_bn` to the fastest BN of the
table. `peak_gib` includes `transition_gib`, A and its momentum, which BN does not have.

*launch* says whether Python launches the kernels one by one or replays them from a CUDA graph. Where Python launches
them (*eager*), a step at a micro-batch is as long as Python takes, on this processor several times what the GPU needs,
and BKN pays for three more parameters and its own launches in each layer. Compiled with *reduce-overhead* the forward
and the backward pass are graphs; gradients and optimizer are Python's still, for BKN's parameters too. A captured step
([training.md](training.md)) has no Python in it. *forward_launch_ms*, *backward_launch_ms* and *optimizer_launch_ms*
are what Python takes to launch these parts of a step, taken apart from the race, with Python's garbage collector at
work: they may add up to more than a step, and their shares are what counts.
"""

TRAIN = """\
## Training on a GPU: 256 images

Statistics and beliefs are float32; their products with A are tf32 where the features are half precision, as here, and
as exact as float32 otherwise. The tables were measured one after another, and a row is to be compared with those of its
own table. Where what Python takes to launch a step adds up to more than the same step takes as a graph, the GPU waits
for Python: of ResNet101 this is so for BKN, and compiled for both, which is why a ratio there says more of the
processor than of the kernels.
"""

ROOFLINE = """\
The norm layers alone: bytes that must move (each input read once, each output written once, forward and backward)
against the time spent in the kernels, and against the speed of a plain copy. Statistics are needed before the first
value can be normalized, so that features too large for the cache are read twice: 0.625 of the copy's speed would be the
most for layers without a residual, 0.73 with one.
"""

CPU = """\
## Training on a CPU

The PyTorch version of BKN against BN, the small network, float32.
"""

INFER_CUDA = """\
## Inference on a GPU

One image at a time, and 32. *eager* is the network as it was trained, launched from Python; *torch* is the PyTorch
engine, which replays CUDA graphs. Columns are as on a CPU, below.
"""

INFER = """\
## Inference on a CPU

The network as it was trained (*eager*), and prepared by each engine (`bkn_zoo/inference/engines.py`). Time per image;
the ratios are to `population` on the same engine, to the BN twin folded by the same engine, and to the PyTorch engine
in the same mode. `max_difference` is that of the logits from the eager network's, whose weights are untrained here. A
norm that takes an image's own statistics costs small operations and products with A, whose size does not depend on the
image's: their share grows as images, networks or numbers (f16) get smaller. A file for each kind of processor, with
the precision that it is fastest in beside f32.
"""

PRECISION = """\
## Precision on a CPU

What each checkpoint gives and takes by OpenVINO in f32 and in less: top-1 on all test images (`results/evaluate/`), how
far that is above f32's, and, for each kind of processor, milliseconds per image and their ratio to `population` in the
same precision, from the tables above. A dash: not measured, or a precision that this processor is not fastest in.
"""

FRONTEND = """\
## Inference on a CPU: two ways into OpenVINO

For the zoo's own networks the engine writes OpenVINO's graph while the network's code runs on a stand-in for an image
(`bkn_zoo/inference/openvino_graph.py`). A converted network, and every exported file, goes through `torch.export` and
OpenVINO's own frontend. Both begin with the prepared network, and the graphs' times are within a tenth of each other;
but the frontend takes many times as long to build one (`build_s`), which is why the stand-in stays. On one thread, in
seconds and milliseconds of the processor, on a machine that others used, so that a few percent say nothing. `build_s`
includes the first image; `max_difference` is relative to the largest logit of the eager network.
"""

START = """\
## The service's start

From the command to the first answer in the checkpoint's own statistics mode, by the clock (`first_answer_s`) and in
seconds of the processor (`cpu_s`), which others on the machine disturb less; the MiB that are resident then
(`resident_mb`), and after an answer in each mode (`all_modes_resident_mb`). A file for each kind of processor; *auto*
is the precision that it has. The *first* start compiles its graph and keeps it, *later* ones read it
([service.md](service.md#how-it-behaves)); where neither is named, there was no difference yet.
"""

SERVE = """\
## The service

Clients ask the service without a pause, each on one connection, for the whole time of a turn; *engine* is the same
engine called in a loop on an image that is ready, with no HTTP and no decoding: one after another on all cores, as in
the service unless it has streams. LitServe runs the same classifier. All take turns; those whose turn it is not are
stopped. The clients run on the same cores. `first_answer_s` is from the start of the process, with files in the disk's
cache; `resident_mb` is in MiB, and counts pages that processes share for each of them; `cpu_ms_per_image` is the
processor time that the server takes. A dash: not measured.
"""

REST = """\
What lies between engine and service weighs more the smaller the network is. For `{model}` at {input} px, an
image is {bare:.1f} ms of the {cores} cores together when the engine runs alone, and {served:.1f} ms in the service,
asked by {clients} at a time, whose process takes {busy:.1f} ms of these. HTTP and decoding within the service are thus
{inside:.1f} ms, or more by as much as the engine alone lets a core wait. The other {outside:.1f} ms are the clients',
which run on the same cores, and time in which a core waits.
"""

TRAINED = """\
# What was trained, and what it gave

This page is written by `python scripts/report.py` from the records of `scripts/train.py` under `results/runs/`, one for
each run; a test fails when they disagree. Those of `scripts/reproduce.py`, with seeds and controls, are in
[results.md](results.md). Runs in bold are the published checkpoints. Top-1 in percent, as population / sample /
expected statistics; *batches* are gradient and statistics batch. Choices are made on the validation images, which are
left out of the training. The test images are those of the data set, and say how good a choice was, not which to make;
they are seen in float32 by the weights as stored, the validation images in the precision of the training. Runs may have
shared their GPU, so that *minutes* bound from above what a run needs. Longer training than this was not tried.
"""

AIM, NEAR = 66.5, 0.5
"""The aim on Tiny ImageNet: top-1 of BN with groups of 32, and how far below it BKN with groups of 4 may be."""

ANEW = """\
The published weights are averages over steps, and their running averages lag behind. A training asks by now whether
those taken anew, by the final weights, are better on the validation images; these networks are older, and were asked
later (`scripts/recalibrate.py`, `results/recalibrated/`). Top-1 there in the best mode, of which `sample` uses no
running averages, as stored and anew:"""

WORTH = 0.5
"""Points on the validation images that are worth another version of a checkpoint, which stays in the repository."""

TRIALS = """\
## Tried, and not published

Runs by earlier versions of a recipe; *before* is what else the recipe said then.
"""


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / name).read_text())


def source(name: str, result: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    return f"`results/{name}`: `{result['command']}`, {result['hardware']}, {versions}.\n"


def columns(rows: list[dict[str, Any]], leave_out: tuple[str, ...] = ()) -> list[str]:
    """All that the rows say, in their order, but for what is the same in all of them."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in leave_out))
    return [name for name in names if len({str(row.get(name)) for row in rows}) > 1]


def steps_of(rows: list[dict[str, Any]], batch: int | None) -> list[dict[str, Any]]:
    """Those with gradient batches of this size; all, where none is given."""
    return [row for row in rows if batch in (None, row.get("gradient_batch"))]


def rest(result: dict[str, Any]) -> str:
    """What is between the engine and the service, where that is most, in time of the cores."""
    rows = result["rows"]
    service = min((row for row in rows if row["server"] == "service"), key=lambda row: row["fraction_of_engine"])
    same = {name: service[name] for name in ("model", "input", "clients")}
    engine = next(row for row in rows if row["server"] == "engine" and same.items() <= row.items())
    cores = int(result["hardware"].split()[-2])  # "a name, 2 cores"
    bare, served = (1e3 * cores / row["images_per_s"] for row in (engine, service))
    busy = service["cpu_ms_per_image"]
    shares = {"bare": bare, "served": served, "busy": busy, "inside": busy - bare, "outside": served - busy}
    return REST.format(cores=cores, **same, **shares)


def performance() -> str:
    parts = [INTRODUCTION]
    starts, infers = (
        sorted(path.stem.removeprefix("benchmark_") for path in RESULTS.glob(f"benchmark_{name}.*.json"))
        for name in ("start", "infer")
    )
    for title, names, batch, leave_out in [
        (LOOP, TRAIN_GPU, 16, ("images_per_s",)),
        (TRAIN, TRAIN_GPU, 256, ("images_per_s",)),
        (CPU, ("train_cpu",), None, ("images_per_s",)),
        (INFER_CUDA, ("infer_cuda",), None, ()),
        (INFER, infers, None, ()),
        (FRONTEND, ("frontend",), None, ()),
        (SERVE, ("serve",), None, ("image",)),
        (START, starts, None, ()),
    ]:
        results = {f"benchmark_{name}.json": read(f"benchmark_{name}.json") for name in names}
        parts.append(title)
        for name, result in results.items():
            rows = steps_of(result["rows"], batch)
            parts += [source(name, result), table(rows, columns(rows, leave_out)) + "\n"] if rows else []
        rooflines = [row for result in results.values() for row in steps_of(result.get("rooflines", []), batch)]
        if rooflines and title == TRAIN:
            parts += [ROOFLINE, table(rooflines, columns(rooflines)) + "\n"]
        if title == SERVE:
            parts.append(rest(results["benchmark_serve.json"]))
        if title == INFER:
            rows = precisions()
            parts += [PRECISION, table(rows, list(rows[0])) + "\n"]
    return "\n".join(parts)


def precisions() -> list[dict[str, Any]]:
    """Of each checkpoint, in each precision and mode that it was evaluated in: accuracy, and time by processor."""
    rows = []
    for folder in sorted(path.parent for path in CHECKPOINTS.glob("*/config.json")):
        config = Config.read(folder / "config.json")
        size = config.preprocessing.size if config.preprocessing else None
        evaluations = read_evaluations(RESULTS / "evaluate", folder.name, ["cpu"])
        exact = {row["statistics"]: row["top1"] for found in evaluations[:1] for row in found["rows"]}
        for found in evaluations:
            precision = found.get("precision") or "f32"
            for row in found["rows"]:
                mode, top1 = row["statistics"], row["top1"]
                line = {"checkpoint": folder.name, "precision": precision, "statistics": mode, "top1": f"{top1:.2f}"}
                line["more than in f32"] = gained(top1, exact[mode]) if precision != "f32" else None
                for kind, speed in read_speeds(RESULTS).items():
                    ran = (*config.architecture.rsplit("_", 1), "openvino", precision, mode, size)
                    fields = ("model", "norm", "engine", "precision", "statistics", "size")
                    time = next((r for r in speed["rows"] if tuple(r[field] for field in fields) == ran), {})
                    line[f"ms, {kind}"] = time.get("ms_per_image")
                    line[f"to population, {kind}"] = time.get("ratio_to_population")
                rows.append(line)
    return rows


def imagenet() -> str:
    """docs/imagenet.md, with the table of what its trainings would cost."""
    images = 90 * 1_268_355
    speeds = {
        (row["model"], row["statistics_batch"], row["launch"]): row["images_per_s"]
        for name in TRAIN_GPU[:2]
        for row in steps_of(read(f"benchmark_{name}.json")["rows"], 256)
        if (row["norm"], row["mode"]) == ("bkn", "eager")
    }
    rows = []
    for network in ("inception_v2", "resnet101"):
        for group in (32, 4, 1):
            graph, python = (speeds[network, group, launch] for launch in ("graph", "python"))
            hours = images / python / 3600
            rows.append({
                "network": f"`{network}_bkn`", "sizes": f"(256,{group})", "images/s, graph": round(graph),
                "images/s, Python": round(python), "one GPU, graph": f"{images / graph / 3600:.1f} h",
                "8 GPUs, 32 images each": f"{hours:.1f} h ({8 * hours:.0f} GPU-hours)",
                "8 GPUs, 256 images each": f"{hours / 8:.1f} h ({hours:.0f} GPU-hours)",
            })  # fmt: skip
    return re.sub(r"^\| network \|.*?(?=\n\n)", table(rows, list(rows[0])), IMAGENET.read_text(), flags=re.M | re.S)


def conversion() -> str:
    """docs/conversion.md, with the tables of what converts and what does not."""
    rows = read("conversion.json")["rows"]

    def largest(rows: list[dict[str, Any]], *names: str) -> str:
        return f"{max(row[name] for row in rows for name in names if name in row):.0e}"

    shares = []
    for library in dict.fromkeys(row["library"] for row in rows):
        all_of = [row for row in rows if row["library"] == library]
        converted = [row for row in all_of if row["converts"]]
        checked = [row for row in converted if "round_trip" in row]
        shares.append({
            "library": library, "networks": len(all_of),
            "convert": f"{len(converted)} ({len(converted) / len(all_of):.0%})",
            "output, float32": largest(converted, "float32"), "output, float64": largest(converted, "output"),
            "step at gain 1": largest(converted, "loss", "gradients", "averages"),
            "every gradient": f"{sum(not row['no_gradient'] for row in checked)} of {len(checked)}",
            "round trip": f"{sum(row['round_trip'] == 0 for row in checked)} of {len(checked)}",
        })  # fmt: skip
    failed = [{"does not convert": f"`{row['name']}`", "why": row["reason"]} for row in rows if not row["converts"]]
    failed = failed or [{"does not convert": "none", "why": "all of them convert"}]
    text = CONVERSION.read_text()
    for first, part in (("library", shares), ("does not convert", failed)):
        text = re.sub(rf"^\| {first} \|.*?(?=\n\n)", lambda _, p=part: table(p, list(p[0])), text, flags=re.M | re.S)
    return text


def finetuning() -> str:
    """docs/finetuning.md, with the table of the study."""
    found = study_table(read_study(RESULTS / "finetune"))
    return re.sub(r"^\| arm \|.*?(?=\n\n)", lambda _: found, FINETUNING.read_text(), flags=re.M | re.S)


def shown() -> list[FullLength]:
    """What the README's picture and second table show."""
    return full_lengths(read_twins(RESULTS))


def readme() -> str:
    """README.md, with its second table; the first is scripts/reproduce.py's."""
    text = README.read_text()
    return re.sub(r"^\| data, network \|.*?(?=\n\n)", lambda _: full_length_table(shown()), text, flags=re.M | re.S)


def aim(rows: Sequence[FullLength]) -> str:
    """Whether one of the networks reached on Tiny ImageNet what was aimed at."""
    pairs = [(row, mean(row.bn_many), mean(row.bkn)) for row in rows]
    reached = any(bn >= AIM and bkn >= bn - NEAR for _, bn, bkn in pairs)
    ends = [
        f"`{row.network}` ends at {bn:.2f} with BN and groups of {row.many}, and at {bkn:.2f} with BKN and groups of "
        f"{row.few}, {gained(bkn, bn)} points ({counted(*row.seeds[1:])})"
        for row, bn, bkn in pairs
    ]
    aimed = f"The aim was {AIM:g} with BN and groups of 32, and at most {NEAR:g} points less with BKN and groups of 4"
    return textwrap.fill(f"{aimed}. It was {'reached' if reached else 'missed'}: {'; '.join(ends)}.", 120) + "\n"


def anew(records: Iterable[Mapping[str, Any]], names: Iterable[str]) -> str:
    """What running averages taken anew would be worth to the checkpoints of these names."""
    best = {
        record["checkpoint"]: [max(record["rows"], key=lambda row: row[which]) for which in ("stored", "anew")]
        for record in records
    }
    shown = [
        f"`{name}` {stored['stored']:.2f} ({stored['statistics']}) and {fresh['anew']:.2f} ({fresh['statistics']})"
        for name, (stored, fresh) in sorted(best.items())
    ]
    most = max(round(fresh["anew"] - stored["stored"], 2) for stored, fresh in best.values())
    so = "which is worth a new version" if most >= WORTH else "so that none was published anew"
    left = [f"`{name}`" for name in names if name not in best]
    said = f"{ANEW} {'; '.join(shown)}. The most that one gains is {most + 0:.2f} points, {so}."
    said += f" Not asked, for want of time: {', '.join(left)}." if left else ""
    return textwrap.fill(said, 120, break_on_hyphens=False) + "\n"


def trained() -> str:
    parts = [TRAINED]
    runs, trials = read_runs(RESULTS / "runs"), read_runs(RESULTS / "runs" / "trials")
    for dataset in sorted({run["dataset"] for run in runs}):
        about = DATASETS[dataset]
        parts += [f"## {about.shown}\n", *([f"{about.note}\n"] if about.note else [])]
        parts += [table_of(run for run in runs if run["dataset"] == dataset)]
        parts += [aim([row for row in shown() if row.data == about.shown])] if dataset == "tiny_imagenet" else []
    records = [json.loads(path.read_text()) for path in (RESULTS / "recalibrated").glob("*.json")]
    parts[1:1] = [anew(records, sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))]
    if trials:
        parts += [TRIALS, table_of(trials, named=True)]
    return "\n".join(parts)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Its fields by name, augmentation's with a dot."""
    fields = dataclasses.asdict(recipe)
    augmentation = fields.pop("augmentation")
    return fields | {f"augmentation.{name}": value for name, value in augmentation.items()}


def table_of(runs: Iterable[Run], named: bool = False) -> str:
    """A row for each run; `named` adds its data set, and what sets its recipe apart from that of the same name now."""

    def top1(measured: dict[str, dict[str, float]]) -> str:
        return " / ".join(f"{measured[mode]['top1']:.2f}" for mode in MODES)

    def differences(run: Run) -> str:
        now = flat(read_recipe(ROOT / "recipes" / f"{run['name'].partition('-')[0]}.toml"))
        then = flat(read_recipe(None, run["recipe"]))
        shown = ("model", "norm_options", "gradient_batch", "statistics_batch", "epochs", "lr", "seed", "validation")
        return ", ".join(f"{n} = {v}" for n, v in then.items() if v != now[n] and n.partition(".")[0] not in shown)

    rows = [
        ({"data": DATASETS[run["dataset"]].shown, "before": differences(run)} if named else {})
        | {
            "model": f"**{run['model']}**" if not named and (CHECKPOINTS / run["name"]).exists() else run["model"],
            "options": ", ".join(f"{name} = {value}" for name, value in run["recipe"]["norm_options"].items()),
            "batches": batches(run),
            "epochs": run["epochs"],
            "lr": run["recipe"]["lr"],
            "seed": run["seed"],
            "held out": f"{run['recipe']['validation']:.0%}",
            "validation": top1(measured(run, "validation")),
            "test": top1(run["test"]),
            "minutes": round(run["seconds"] / 60),
        }
        for run in runs
    ]
    return table(rows, list(rows[0])) + "\n"


def cards() -> dict[Path, str]:
    """The text of every model card."""
    folders = sorted(path.parent for path in CHECKPOINTS.glob("*/config.json") if not path.parent.name.startswith("."))
    configs = {folder.name: Config.read(folder / "config.json") for folder in folders}
    texts = {folder / "README.md": card_from_results(folder, folder.name, RESULTS) for folder in folders}
    runs = read_runs(RESULTS / "runs") + read_runs(RESULTS / "runs" / "trials")
    return {MODEL_CARD: zoo_card(configs, runs), **texts}


if __name__ == "__main__":
    PERFORMANCE.write_text(performance())
    RUNS.write_text(trained())
    IMAGENET.write_text(imagenet())
    CONVERSION.write_text(conversion())
    FINETUNING.write_text(finetuning())
    README.write_text(readme())
    draw_full_length(shown(), PICTURE)
    for path, text in cards().items():
        path.write_text(text)
