"""`bkn-zoo classify`: classifies images and folders. Results for a file are JSON Lines until all are there."""

import argparse
import csv
import glob
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from bkn_zoo.checkpoints.files import lock, replace_file
from bkn_zoo.checkpoints.locate import default_checkpoint, locate
from bkn_zoo.cli.options import announce, check_checkpoint
from bkn_zoo.errors import ImageError, InputError, counted
from bkn_zoo.terminal import printable

FAILED = 1
COLUMNS = ["file", "rank", "label", "score", "uncertain", "model", "revision", "weights", "statistics", "engine"]
STDIN = "-"

# The result of one image: `Classification.to_dict`, the file, and the SHA-256 of the weights
Result = dict[str, Any]


def load_classifier(args: argparse.Namespace, one_mode: bool = False) -> Any:
    """The classifier for the options. PyTorch is imported last, and not at all for one mode with a stored graph."""
    name, how = args.checkpoint or default_checkpoint(), (args.device, args.engine, args.precision)
    check_checkpoint(name)
    announce(f"loading {name}")
    from bkn_zoo.inference.answers import stored_classifier

    location = locate(name)
    file, found = stored_classifier(location, args.statistics, *how) if one_mode else (None, None)
    if found is not None:
        return found
    from bkn_zoo.checkpoints.folder import load_checkpoint
    from bkn_zoo.cores import keep_to_quota
    from bkn_zoo.inference.classifier import Classifier

    keep_to_quota()
    classifier = Classifier(load_checkpoint(location), name, *how)
    classifier.engine.stored = file
    return classifier


def classify(args: argparse.Namespace) -> int:
    """Print the results of all readable images, and list the others at the end. Returns the exit code."""
    args.format = args.format or (args.output and args.output.suffix.lower().removeprefix(".")) or "table"
    if args.output and args.format not in ("jsonl", "json", "csv"):
        raise InputError("--output needs a name that ends in .jsonl, .json or .csv, or one of these as --format.")
    if args.output and args.format != "jsonl" and args.output.exists():
        raise InputError(f"{args.output} exists, and only .jsonl files can be extended: delete it, or choose another.")
    failures: dict[str, str] = {}
    args.paths = [path if "://" in path else str(Path(path)) for path in args.paths]
    files = list(find_images(args.paths, failures))
    done = 0
    if files:
        classifier = load_classifier(args, one_mode=True)
        if args.output:
            done = _to_file(classifier, list(dict.fromkeys(files)), args, failures)
        else:
            for text in _texts(args.format, _results(classifier, files, args, failures)):
                shown = "\n".join(map(printable, text.split("\n"))) if sys.stdout.isatty() else text
                print(shown, end="", flush=True)
            done = sum(name not in failures for name in files)
    for failure in failures.values():
        print(f"bkn-zoo: {printable(failure)}", file=sys.stderr)
    return FAILED if failures and not (done and failures.keys().isdisjoint(args.paths)) else 0


def find_images(paths: Iterable[str], failures: dict[str, str]) -> Iterator[str]:
    """The names of all images. Path objects would need several times the memory for hundreds of thousands of them."""
    from bkn_zoo.images import image_files, passed_over

    for path in paths:
        if os.path.isdir(path):
            others: Counter[str] = Counter()
            found = image_files(path, others)
            if others:
                announce(passed_over(path, others))
            if not found:
                failures[path] = f"{path} contains no images: choose another folder."
            for name in found:
                yield name.removeprefix(f".{os.sep}")
        elif path == STDIN or os.path.exists(path):
            yield path
        elif "://" in path:
            failures[path] = f"{path} is a URL, and nothing is downloaded: save the image to a file first."
        elif matches := sorted({*glob.glob(path, recursive=True)} - {path}):  # a pattern in quotes
            yield from find_images(matches, failures)
        else:
            failures[path] = f"there is no file {path}: correct the path."


def _results(classifier: Any, files: list[str], args: argparse.Namespace, failures: dict[str, str]) -> Iterator[Result]:
    """Yield the results of readable images, and add the errors of the others to the failures."""
    from bkn_zoo.progress import bar

    sources = (sys.stdin.buffer.read() if name == STDIN else name for name in files)
    found = classifier.each(sources, args.statistics, args.top_k)
    weights = weights_id(classifier)
    # In a terminal, the results themselves show the progress.
    silent = len(files) < 2 or (sys.stdout.isatty() and not args.output)
    with bar(len(files), None if silent else "classifying", "image", lines=True) as done:
        for name, result in zip(files, found, strict=True):
            if isinstance(result, ImageError):
                failures[name] = str(result)
            else:
                yield {"file": name, **result.to_dict(), "weights": weights}
            done(1)


def _to_file(classifier: Any, files: list[str], args: argparse.Namespace, failures: dict[str, str]) -> int:
    """Write the missing results to the file. Returns the number of images in it."""
    output: Path = args.output
    lines = output if args.format == "jsonl" else output.with_name(f"{output.name}.partial")
    try:
        with open(lines, "a+b") as file:
            lock(file, f"another process is writing {lines}: wait until it ends, or choose another file.")
            file.seek(0)
            done, end = _resume(file, lines, classifier, args)
            count = done.total()
            if count:
                announce(f"already in {lines}: {counted(count, 'image')}")
            file.truncate(end)
            # Lines can be extended by another piped image; other formats have the results of one command.
            todo = [name for name in files if name not in done or (name == STDIN and lines == output)]
            for result in _results(classifier, todo, args, failures):
                file.write(_valid(_json_line(result)).encode())
                file.flush()  # so that an image is complete or missing, unless the process is killed during this call
                count += 1
            if lines != output:
                file.seek(0)
                replace_file(output, _valid("".join(_texts(args.format, map(json.loads, file)))))
    except OSError as error:
        first = "create the folder" if isinstance(error, FileNotFoundError) else "free space there"
        remedy = f"{first}, or choose another file, then repeat the command to continue"
        raise InputError(f"{lines} cannot be written ({error.strerror}): {remedy}.") from None
    if lines != output:
        lines.unlink()  # after it is closed, as Windows needs it
    bad = f"; {len(failures):,} could not be used" if failures else ""
    announce(f"{counted(count, 'image')} in {output}{bad}")
    return count


def weights_id(classifier: Any) -> str | None:
    """The SHA-256 of the weights, or of the hashes of several files."""
    hashes = sorted(classifier.config.sha256.values())
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if len(hashes) > 1 else next(iter(hashes), None)


def _resume(file: IO[bytes], path: Path, classifier: Any, args: argparse.Namespace) -> tuple[Counter[str], int]:
    """The images in an existing file, and the end of the last one; an error if the file was made with other options."""
    top_k = min(args.top_k, classifier.config.num_classes)
    ours = {"--checkpoint": classifier.name, "--statistics": classifier.choose(args.statistics), "--top-k": top_k}
    ours["the weights"] = weights_id(classifier)
    done, end = Counter[str](), 0
    for line in file:
        if not line.endswith(b"\n") and line.startswith(b'{"file": "'[: len(line)]):
            break  # the last line, written by a process that was killed
        try:
            row = json.loads(line)
            theirs = (row["model"], row["statistics"], len(row["predictions"]), row["weights"])
            done[row["file"]] += 1
        except (ValueError, KeyError, TypeError):
            told = f"{path} has no result of this command after byte {end}"
            raise InputError(f"{told}: truncate it there, or choose another file.") from None
        for value, (option, own) in zip(theirs, ours.items(), strict=True):
            if value != own:
                raise InputError(f"{path} was made with {option} {value}, not {own}: use these, or another file.")
        end += len(line)
    return done, end


def _valid(text: str) -> str:
    """Text that UTF-8 can encode, since file names need not be valid text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _texts(form: str, results: Iterable[Result]) -> Iterator[str]:
    """The output in a format, in parts."""
    if form == "json":
        yield "[\n" + ",\n".join(_json_line(result).rstrip("\n") for result in results) + "\n]\n"
        return
    if form == "csv":
        yield ",".join(COLUMNS) + "\n"
    yield from map({"table": _table, "csv": _csv_rows, "jsonl": _json_line}[form], results)


def _json_line(result: Result) -> str:
    return json.dumps(result, ensure_ascii=False) + "\n"


def _table(result: Result) -> str:
    lines = [result["file"], *(f"  {p['score']:.4f}  {p['label']}" for p in result["predictions"])]
    if result["uncertain"]:
        lines.append("  uncertain: the image may show none of the classes that this model knows")
    return "".join(f"{printable(line)}\n" for line in lines)


def _csv_rows(result: Result) -> str:
    text, uncertain = io.StringIO(), str(result["uncertain"]).lower()
    for rank, best in enumerate(result["predictions"], start=1):
        row = result | {"rank": rank, "label": best["label"], "score": f"{best['score']:.6f}", "uncertain": uncertain}
        csv.writer(text).writerow([row[name] for name in COLUMNS])
    return text.getvalue().replace("\r\n", "\n")
