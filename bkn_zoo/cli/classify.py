"""`bkn-zoo classify`: classifies images and folders. A command that writes a file can be resumed.

Results are kept as JSON Lines, in FILE or, for other formats, in FILE.partial until all images are classified.
"""

import argparse
import csv
import glob
import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from bkn_zoo.checkpoints.files import lock
from bkn_zoo.checkpoints.locate import default_checkpoint
from bkn_zoo.cli.parser import announce, check_checkpoint
from bkn_zoo.errors import ImageError, InputError, counted
from bkn_zoo.terminal import printable

if TYPE_CHECKING:  # slow imports happen in the commands that need them
    from bkn_zoo.inference.classifier import Classifier

FAILED = 1
COLUMNS = ["file", "rank", "label", "score", "uncertain", "model", "revision", "weights", "statistics", "engine"]
STDIN = "-"
FIRST = b'{"file": "'  # the beginning of every line of JSON Lines

Result = dict[str, Any]
"""The result of one image: `Classification.to_dict`, the file, and the SHA-256 of the weights."""


class Format(NamedTuple):
    """An output format: the text of one result, and what is before, between and after the results."""

    write: Callable[[Result], str]
    before: str = ""
    between: str = ""
    after: str = ""


def load_classifier(args: argparse.Namespace) -> "Classifier":
    """The classifier for the options. The checkpoint's name is checked before PyTorch is imported."""
    name = args.checkpoint or default_checkpoint()
    check_checkpoint(name)
    announce(f"loading {name}")
    from bkn_zoo.cores import keep_to_quota
    from bkn_zoo.inference.classifier import Classifier

    keep_to_quota()
    return Classifier.from_pretrained(name, args.device, args.engine, args.precision)


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
        classifier = load_classifier(args)
        if args.output:
            done = _to_file(classifier, list(dict.fromkeys(files)), args, failures)
        else:
            for text in _texts(FORMATS[args.format], _results(classifier, files, args, failures)):
                print(_for_terminal(text), end="", flush=True)
            done = sum(name not in failures for name in files)
    for failure in failures.values():
        print(f"bkn-zoo: {printable(failure)}", file=sys.stderr)
    asked_for = args.strict or not done or not failures.keys().isdisjoint(args.paths)
    return FAILED if failures and asked_for else 0


def _for_terminal(text: str) -> str:
    """Escape terminal control characters, except in output that is not shown in a terminal."""
    return "\n".join(map(printable, text.split("\n"))) if sys.stdout.isatty() else text


def find_images(paths: Iterable[str], failures: dict[str, str]) -> Iterator[str]:
    """The names of all images. Path objects would need several times the memory for hundreds of thousands of them."""
    from bkn_zoo.images import image_files, passed_over

    for path in paths:
        if os.path.isdir(path):
            others: Counter[str] = Counter()
            found = image_files(path, others)
            if others:
                print(f"bkn-zoo: {printable(passed_over(path, others))}", file=sys.stderr)
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


def _results(
    classifier: "Classifier", files: list[str], args: argparse.Namespace, failures: dict[str, str], before: int = 0
) -> Iterator[Result]:
    """Yield the results of readable images, and add the errors of the others to the failures.

    Args:
        before: number of images that were done before, for the progress.
    """
    from bkn_zoo.progress import bar

    if args.ray:
        from bkn_zoo.inference.spread import spread

        found = spread(files, args.statistics, args.top_k, classifier.name, args.device, args.engine, args.precision)
    else:
        sources = (sys.stdin.buffer.read() if name == STDIN else name for name in files)
        found = classifier.each(sources, args.statistics, args.top_k)
    weights = weights_id(classifier)
    # In a terminal, the results themselves show the progress.
    silent = len(files) < 2 or (sys.stdout.isatty() and not args.output)
    with nullcontext() if silent else bar(before + len(files), "classifying", "image", lines=True) as done:
        if done is not None:
            done(before)
        for name, result in zip(files, found, strict=True):
            if isinstance(result, ImageError):
                failures[name] = str(result)
            else:
                yield {"file": name, **result.to_dict(), "weights": weights}
            if done is not None:
                done(1)


def _texts(form: Format, results: Iterable[Result]) -> Iterator[str]:
    """The output, in parts."""
    begun = False
    for result in results:
        yield (form.between if begun else form.before) + form.write(result)
        begun = True
    yield form.after if begun else form.before + form.after.lstrip()


def _to_file(classifier: "Classifier", files: list[str], args: argparse.Namespace, failures: dict[str, str]) -> int:
    """Write the missing results to the file. Returns the number of images in it."""
    output: Path = args.output
    lines = output if args.format == "jsonl" else output.with_name(f"{output.name}.partial")
    with _alone(lines) as file:
        done, end = _resume(file, lines, classifier, args)
        todo = [name for name in files if name not in done]
        if done:
            print(f"bkn-zoo: {_are(len(done))} already in {lines}", file=sys.stderr)
        count = len(done)
        try:
            file.truncate(end)
            for result in _results(classifier, todo, args, failures, len(files) - len(todo)):
                file.write(_bytes(_write_line(result)))
                file.flush()  # so that an image is complete or missing, unless the process is killed during this call
                count += 1
        except KeyboardInterrupt:
            print(f"bkn-zoo: {_are(count)} in {lines}: repeat the command to continue", file=sys.stderr)
            raise
        if lines != output:
            file.seek(0)
            scratch = output.with_name(f"{output.name}.tmp")
            with open(scratch, "wb") as whole:
                whole.writelines(map(_bytes, _texts(FORMATS[args.format], map(json.loads, file))))
            os.replace(scratch, output)
    if lines != output:
        lines.unlink()  # after it is closed, as Windows needs it
    bad = f"; {len(failures):,} could not be used" if failures else ""
    print(f"bkn-zoo: {_are(count)} in {output}{bad}", file=sys.stderr)
    return count


def _are(count: int) -> str:
    return f"{counted(count, 'image')} {'is' if count == 1 else 'are'}"


def weights_id(classifier: "Classifier") -> str | None:
    """The SHA-256 of the weights, or of the hashes of several files."""
    hashes = sorted(classifier.model.config.sha256.values())
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if len(hashes) > 1 else next(iter(hashes), None)


@contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading and appending, create it if needed, and lock it against other processes."""
    try:
        with open(path, "a+b") as file:
            lock(file, f"another process is writing {path}: wait until it ends, or choose another file.")
            file.seek(0)
            yield file
    except OSError as error:
        remedy = "free space there, or choose another file, then repeat the command to continue"
        raise InputError(f"{path} cannot be written ({error.strerror}): {remedy}.") from None


def _resume(file: IO[bytes], path: Path, classifier: "Classifier", args: argparse.Namespace) -> tuple[set[str], int]:
    """The images in an existing file, and the end of the last one; an error if the file was made with other options."""
    top_k = min(args.top_k, classifier.model.num_classes)
    ours = {"--checkpoint": classifier.name, "--statistics": classifier.choose(args.statistics), "--top-k": top_k}
    done, end, weights = set(), 0, weights_id(classifier)
    for line in file:
        if not line.endswith(b"\n") and line.startswith(FIRST[: len(line)]):
            break  # the last line, written by a process that was killed
        try:
            row = json.loads(line)
            theirs = dict(zip(ours, (row["model"], row["statistics"], len(row["predictions"])), strict=True))
            name, other = row["file"], row["weights"] != weights
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path} has no result of this command after byte {end}: truncate it there, or choose another file."
            ) from None
        for option, value in theirs.items():
            if value != ours[option]:
                raise InputError(
                    f"{path} was made with {option} {value}, not {ours[option]}: use that option, or choose another "
                    "file."
                )
        if other:
            raise InputError(f"{path} was made with other weights of {classifier.name}: choose another file.")
        done.add(name)
        end += len(line)
    return done, end


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # file names need not be valid text


def _write_table(result: Result) -> str:
    lines = [result["file"], *(f"  {p['score']:.4f}  {p['label']}" for p in result["predictions"])]
    if result["uncertain"]:
        lines.append("  uncertain: the image may show none of the classes that this model knows")
    return "".join(f"{printable(line)}\n" for line in lines)


def _write_json(result: Result) -> str:
    return json.dumps(result, ensure_ascii=False)


def _write_line(result: Result) -> str:
    return f"{_write_json(result)}\n"


def _write_csv(result: Result) -> str:
    uncertain = str(result["uncertain"]).lower()
    rows = [
        result | {"rank": rank, "label": best["label"], "score": f"{best['score']:.6f}", "uncertain": uncertain}
        for rank, best in enumerate(result["predictions"], start=1)
    ]
    return "".join(_csv_line([row[name] for name in COLUMNS]) for row in rows)


def _csv_line(fields: list[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(fields)  # so that names with either character are quoted
    return text.getvalue().removesuffix("\r\n") + "\n"


FORMATS = {
    "table": Format(_write_table),
    "json": Format(_write_json, "[\n", ",\n", "\n]\n"),
    "jsonl": Format(_write_line),
    "csv": Format(_write_csv, ",".join(COLUMNS) + "\n"),
}
