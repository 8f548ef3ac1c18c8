"""Fills the tables and numbers of the documents from the JSON files under results/ and the checkpoints' configs.

python scripts/report.py                # docs/performance.md and its plot, docs/runs.md, MODEL_CARD.md, the cards of
                                        # checkpoints/, and tables of README.md, docs/imagenet.md, docs/service.md and
                                        # docs/conversion.md; those of studies: scripts/study.py --table
python scripts/report.py --sample 25    # prints 25 random sentences with numbers, and where these come from
"""

import argparse
import json
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.card_sections import zoo_checkpoint_card
from studies.figures import save_figures
from studies.performance import Records, picture, read_benchmarks, summary, tables
from studies.render import NUMBER, Content, frame, pages, rendered, write
from studies.zoo_pages import runs_page, short_list, zoo_card

from bkn_zoo.checkpoints.config import Config

ROOT = Path(__file__).resolve().parent.parent
DOCS, CHECKPOINTS, RESULTS = (ROOT / name for name in ("docs", "checkpoints", "results"))


def checkpoints() -> dict[str, Config]:
    """The configs of all checkpoints, by name."""
    folders = sorted(path.parent for path in CHECKPOINTS.glob("*/config.json") if not path.parent.name.startswith("."))
    return {folder.name: Config.read(folder / "config.json") for folder in folders}


def regions() -> dict[Path, dict[str, Content]]:
    """The contents of the marked regions of each page."""
    benchmarks, configs = read_benchmarks(RESULTS), checkpoints()
    return {
        DOCS / "performance.md": summary(benchmarks),
        RESULTS / "tables" / "performance": tables(benchmarks, RESULTS, CHECKPOINTS),
        DOCS / "runs.md": runs_page(RESULTS, list(configs)),
        DOCS / "imagenet.md": {"cost": frame(imagenet(benchmarks))},
        DOCS / "service.md": {"attacks": attacks(json.loads((RESULTS / "attack.json").read_text()))},
        DOCS / "conversion.md": conversion(json.loads((RESULTS / "conversion.json").read_text())["rows"]),
        RESULTS / "tables" / "conversion": converted(RESULTS),
        ROOT / "MODEL_CARD.md": zoo_card(configs, RESULTS),
        ROOT / "README.md": {"checkpoints": frame(short_list(configs, RESULTS))},
    }


def cards() -> dict[Path, str]:
    """The cards of our own checkpoints."""
    return {
        CHECKPOINTS / name / "README.md": zoo_checkpoint_card(config, name, RESULTS)
        for name, config in checkpoints().items()
    }


def imagenet(benchmarks: Records) -> list[dict[str, Any]]:
    """The estimated cost of trainings on ImageNet, for docs/imagenet.md."""
    images = 90 * 1_268_355
    speeds = {
        (row["model"], row["statistics_batch"], row["launch"]): row["images_per_s"]
        for name in ("train", "train_inception")
        for row in benchmarks[name]["rows"]
        if (row["norm"], row["mode"], row["gradient_batch"]) == ("bkn", "eager", 256)
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
    return rows


def conversion(rows: list[dict[str, Any]]) -> dict[str, Content]:
    """Networks that convert, by library, how long it takes, and those that do not, for docs/conversion.md."""

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
    timed = sorted((row for row in rows if row.get("planning") is not None), key=lambda row: row["planning"])
    median, slowest = statistics.median(row["planning"] for row in timed), timed[-1]
    slow = [f"`{row['name']}`" for row in timed if row["planning"] > 15 and row["forward"] < 1]
    planning = (
        f"On one core, `convert` took {median:.1f} s in the median of {len(timed)} networks, and at most "
        f"{slowest['planning']:.1f} s (`{slowest['name']}`; a forward pass: {slowest['forward']:.1f} s). It took more "
        f"than 15 s, for a forward pass of less than 1 s, for {', '.join(slow) or 'none'}."
    )
    return {"libraries": frame(shares), "planning": planning, "unsupported": frame(failed)}


def converted(results: Path) -> dict[str, Content]:
    """The size of each converted network, and the losses of the recipes, for CSV files."""
    networks, recipes = (
        json.loads((results / name).read_text())["rows"] for name in ("conversion.json", "recipes.json")
    )
    sizes = [
        {
            "library": row["library"], "network": row["name"], "norms": row["norms"] + row["left"],
            "norms left": row["left"], "parameters": row["parameters"],
            "added (%)": f"{100 * row['added'] / row['parameters']:.1f}",
        }
        for row in networks
        if row["converts"]
    ]  # fmt: skip
    losses = [
        {"library": row["library"], "norms": norms}
        | {name: f"{found[name]:.3f}" for name in ("first_loss", "last_loss")}
        for row in recipes
        for norms, found in (("BKN", row), ("BN", row.get("not_converted")))
        if found
    ]
    return {"networks": frame(sizes), "recipes": frame(losses)}


def attacks(records: dict[str, Any]) -> Content:
    """What attackers cost a healthy client, for docs/service.md."""
    found, chaos, healthy = records["rows"], records["chaos"], records["throughput"]
    services = list(dict.fromkeys(row["service"] for row in found["table"]))
    columns = {
        "classify_p99": ("classify, p99", "{:.2f} s"), "photograph_p99": ("photograph, p99", "{:.2f} s"),
        "live_max": ("/health/live, max", "{:.2f} s"), "megabytes": ("memory", "{:+.0f} MB"),
        "pause_max": ("pause of the loop, max", "{:.3f} s"),
    }  # fmt: skip
    rows: dict[str, dict[str, str]] = {}
    for row in found["table"]:
        row_cells = rows.setdefault(row["row"], {"attack": row["row"]})
        for key, (name, form) in columns.items():
            if key in row:
                row_cells[name] = " / ".join(filter(None, (row_cells.get(name), form.format(row[key]))))
    where, runs = found["hardware"], max(row["runs"] for row in found["table"])
    fractions = ", ".join(
        f"{fraction:.2f} times to {count} clients" if count != "0" else f"{fraction:.2f} times for empty requests"
        for count, fraction in healthy["fraction_of_before"].items()
    )
    said = (
        f"Each cell: {' / '.join(services)}. Measured by `{found['command']}`: up "
        f"to {runs} windows of {found['seconds']:g} s per cell, {found['clients']} attackers, "
        f"{where['cores']} cores ({where['processor']}) for the service and all clients together. "
        f"{sum(chaos['asked']):,} healthy requests of {chaos['seconds'] / 60:g} minutes of chaos "
        f"(`{chaos['command']}`): {len(chaos['lost'])} lost, {chaos['retried']} answered at the second try, "
        f"{sum(chaos['workers'].values())} workers killed or stopped. Without attackers the service answers, compared "
        f"with before: {fractions} (`{healthy['command']}`)."
    )
    return [frame(list(rows.values())), said]


def figures() -> dict[str, Any]:
    """The figures of docs/, by name."""
    return {"performance": picture(read_benchmarks(RESULTS))}


REGION = re.compile(r"```.*?```|<!-- begin: [\w.-]+ -->\n.*?<!-- end: [\w.-]+ -->", re.DOTALL)
MEASURED = re.compile(r"\d(\.\d+)?( to [\d.]+)? ?(%|points?|ms|MB|GB|GiB|times|seconds|minutes|hours)|\d\.\d")


def sampled(count: int, seed: int) -> Iterator[str]:
    """Random sentences with measured numbers, outside code and tables, each with the cells that they come from."""
    found = []
    for path in pages():
        lines = REGION.sub("", path.read_text(encoding="utf-8")).splitlines()
        prose = "\n".join(line for line in lines if not line.startswith(("|", "#", "!", "    ")))
        # A marker may contain a colon, which does not end a sentence.
        whole = NUMBER.sub(lambda marker: marker[0].replace(" ", "\N{NO-BREAK SPACE}"), prose)
        for sentence in re.split(r"(?<=[.:;])[ \n]+|\n\n", whole):
            shown = re.sub(r"<!--.*?-->", "", " ".join(sentence.split()))
            if MEASURED.search(re.sub(r"\([^)]*\)|`[^`]*`", "", shown)):
                found.append((path.name, shown, NUMBER.findall(sentence)))
    for number, (page, shown, markers) in enumerate(random.Random(seed).sample(found, count), 1):
        yield f"{number}. {page}: {shown}"
        for marker, *_, value in markers:
            yield f"   {value} = {marker[5:-3]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="only print N random sentences with their records")
    parser.add_argument("--seed", type=int, default=0, help="of the sentences (default: 0)")
    args = parser.parse_args()
    if args.sample:
        print(*sampled(args.sample, args.seed), sep="\n")
    else:
        write(rendered(regions()) | cards())
        save_figures(figures(), DOCS)
