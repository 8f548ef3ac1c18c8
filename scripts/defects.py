"""Puts twenty defects into a copy of the tree, one at a time, and says which test catches each.

python scripts/defects.py                          # of this tree; what results/defects.json knows already is kept
python scripts/defects.py --again fold-bias        # one defect, again
python scripts/defects.py --root OLD --state before  # another state of the repository, for comparison

A defect is a line of the product that is replaced by a wrong one. Its tests run until the first failure; that they pass
without the defect is checked at the end, in one run of all tests that caught something. Every result is written to
results/defects.json as soon as it is there, so that a run can be interrupted.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bkn_zoo.checkpoints.provenance import environment

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "results" / "defects.json"
SECONDS = 220  # for the tests of one defect
TOO_LONG = f"no failure in {SECONDS} s"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]
FAILED = re.compile(r"^FAILED (\S+?::\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass
class Defect:
    """A wrong line.

    Attributes:
        places: files that may hold the line, the first that does counts: they differ between states of the repository.
        right, wrong: the line, or a part of it, and what takes its place.
        tests: pytest's arguments that select the tests that may catch it, with files that exist in one state only.
    """

    name: str
    places: list[str]
    right: str
    wrong: str
    tests: list[str]


NORMS, KERNELS, SERVICE = "bkn_zoo/norms", "bkn_zoo/kernels", "service"
DEFECTS = [
    Defect(
        "update-sign", [f"{NORMS}/kalman.py"], "+ p * q * innovation.square()", "- p * q * innovation.square()",
        ["tests/test_kalman.py"],
    ),
    Defect(
        "kernel-gradient-sign", [f"{KERNELS}/norm_jit.py"], "dvar = -0.5 * a * rstd", "dvar = 0.5 * a * rstd",
        ["tests/test_kernels.py"],
    ),
    Defect(
        "eps-missing", [f"{NORMS}/statistics.py"], "torch.rsqrt(belief.var + eps)", "torch.rsqrt(belief.var)",
        ["tests/test_norms.py", "tests/test_layer.py", "-k", "batch_norm or sample or residual or deviation"],
    ),
    Defect(
        "groups-off-by-one", [f"{NORMS}/statistics.py"],
        "rows = rows.unsqueeze(1)", "rows = rows.roll(1, 0).unsqueeze(1)",
        ["tests/test_norms.py", "tests/test_kalman.py"],
    ),
    Defect(
        "bessel-missing", [f"{NORMS}/running.py"], "observed.var / max(count - 1, 1)", "observed.var / count",
        ["tests/test_running.py", "-k", "belief or 1568"],
    ),
    Defect(
        "expected-spread", [f"{NORMS}/running.py"], "+ others**2 * spread", "+ others * spread",
        ["tests/test_running.py", "-k", "expected"],
    ),
    Defect(
        "belief-order", ["bkn_zoo/models/inception.py"],
        "belief for _, belief in outputs", "belief for _, belief in outputs[::-1]",
        ["tests/test_models.py", "-k", "inception_block"],
    ),
    Defect(
        "depthwise-order", ["bkn_zoo/conversion/plan.py"],
        "through(origin, name) for origin in origins for _ in range(",
        "through(origin, name) for origin in origins[::-1] for _ in range(",
        ["tests/test_conversion.py", "-k", "transition or channel or path"],
    ),
    Defect(
        "fold-bias", ["bkn_zoo/inference/folding.py"], "if conv.bias is None else conv.bias * scale", "",
        ["tests/test_engines.py", "-k", "folding_keeps"],
    ),
    Defect(
        "label-order", ["bkn_zoo/inference/classifier.py"], "row[order].tolist()", "row[order[::-1]].tolist()",
        ["tests/test_classifier.py", "-k", "torch"],
    ),
    Defect(
        "crop-not-centered", ["bkn_zoo/images/reading.py", "bkn_zoo/images/transforms.py", "bkn_zoo/images.py"],
        "left, top = (image.width - side) / 2, (image.height - side) / 2",
        "left, top = 0, (image.height - side) / 2",
        ["tests/test_images.py", "-k", "square or evaluation"],
    ),
    Defect(
        "pixels-unlimited", ["bkn_zoo/images/reading.py", "bkn_zoo/images.py"],
        "if width * height > max_pixels:", "if width > max_pixels:",
        ["tests/test_images.py", "-k", "bomb or pixels"],
    ),
    Defect(
        "path-traversal", ["bkn_zoo/checkpoints/files.py"], """ or "/" in file or "\\\\" in file""", "",
        ["tests/test_checkpoints.py", "-k", "index or indices"],
    ),
    Defect(
        "hash-unchecked", ["bkn_zoo/checkpoints/files.py"], "if sha256(file, done) != hashes.get(file.name):",
        "if file.name not in hashes:",
        ["tests/test_checkpoints.py", "-k", "damaged or flipped"],
    ),
    Defect(
        "optimizer-forgotten", ["bkn_zoo/training/state.py"],
        'training.optimizer.load_state_dict(state["optimizer"])', "pass",
        ["tests/test_fit.py", "-k", "resum or interrupt"],
    ),
    Defect(
        "exit-code", ["bkn_zoo/cli/command.py"],
        "isinstance(error, ImageError | CheckpointError", "isinstance(error, ImageError",
        ["tests/test_cli.py", "-k", "checkpoint or line or damaged"],
    ),
    Defect(
        "header-lost", [f"{SERVICE}/errors.py"], 'headers = {"Retry-After": str(retry_after)}', "headers = {}",
        ["tests/test_service.py", "tests/test_service_settings.py", "-k", "start"],
    ),
    Defect(
        "upload-unlimited", [f"{SERVICE}/uploads.py"], "if upload.size > self.most:", "if False:",
        ["tests/test_service.py", "tests/test_service_bad_input.py", "-k", "refusal or chunk or bad_requests"],
    ),
    Defect(
        "log-unescaped", [f"{SERVICE}/logs.py"],
        "json.JSONEncoder(default=str)", "json.JSONEncoder(default=str, ensure_ascii=False)",
        ["tests/test_service.py", "-k", "log"],
    ),
    Defect(
        "any-key", [f"{SERVICE}/app.py"], "hmac.compare_digest(digest, key) for key", "bool(key) for key",
        ["tests/test_service.py", "tests/test_service_settings.py", "-k", "api_keys"],
    ),
]  # fmt: skip


def copy_of(root: Path, folder: Path) -> Path:
    """The tree without what was built; weights are linked."""
    tree = folder / "tree"
    skipped = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(
        root,
        tree,
        ignore=lambda path, names: {*skipped(path, names), *({"checkpoints"} & {*names} if path == str(root) else ())},
    )
    (tree / "checkpoints").symlink_to(root / "checkpoints")
    return tree


def run_tests(tree: Path, selected: list[str], seconds: float = SECONDS) -> tuple[list[str], str]:
    """The tests that failed, and the last line that pytest printed."""
    here = [each for each in selected if not each.startswith("tests/") or (tree / each.partition("::")[0]).exists()]
    surroundings = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "scripts")]),
        "OMP_NUM_THREADS": "1",
    }
    try:
        ended = subprocess.run(
            [*PYTEST, *here], cwd=tree, env=surroundings, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return [], TOO_LONG
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines() or ["nothing was printed"]
    return FAILED.findall(ended.stdout), lines[-1].strip("= ")


def try_defect(tree: Path, defect: Defect, seconds: float) -> dict[str, object]:
    """Put it in, run its tests, take it out."""
    for place in defect.places:
        path = tree / place
        if path.is_file() and defect.right in path.read_text():
            break
    else:
        return {"caught_by": None, "said": f"no file of {', '.join(defect.places)} has this line"}
    text = path.read_text()
    try:
        path.write_text(text.replace(defect.right, defect.wrong, 1))
        failed, said = run_tests(tree, ["-x", *defect.tests], seconds)
    finally:
        path.write_text(text)
    return {"file": place, "caught_by": failed[0] if failed else None, "said": said}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="a tree of the repository (this one)")
    parser.add_argument("--state", default="after", help="the name under which results are kept (after)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--again", nargs="*", default=[], metavar="NAME", help="defects to apply again")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which a run ends, to be resumed later")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    results = json.loads(options.output.read_text()) if options.output.exists() else {"states": {}}
    found = results["states"].setdefault(options.state, {"defects": {}})["defects"]
    missing = [defect for defect in DEFECTS if defect.name not in found or defect.name in options.again]

    def write() -> None:
        results["defects"] = {each.name: {"right": each.right, "wrong": each.wrong} for each in DEFECTS}
        results["states"][options.state] |= environment()
        options.output.write_text(json.dumps(results, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of(options.root.resolve(), Path(folder))
        for defect in missing:
            left = end - time.monotonic()
            result = try_defect(tree, defect, min(left, SECONDS)) if left > 0 else {"said": TOO_LONG}
            if left < SECONDS and result["said"] == TOO_LONG:
                return 2  # it may need all of the next run's time
            found[defect.name] = result
            print(f"{defect.name}: {found[defect.name]['caught_by'] or found[defect.name]['said']}", flush=True)
            write()
        unsure = {name: each for name, each in found.items() if each["caught_by"] and "passes_without" not in each}
        if unsure:
            failed, said = run_tests(tree, [each["caught_by"] for each in unsure.values()], end - time.monotonic())
            print(f"without defects: {said}")
            if "passed" not in said:
                return 2
            for each in unsure.values():
                each["passes_without"] = each["caught_by"] not in failed
            write()
    return 0 if all(each["caught_by"] and each.get("passes_without") for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
