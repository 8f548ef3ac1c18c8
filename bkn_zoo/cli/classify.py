"""`bkn-zoo classify`: classifies images and folders. An output file can be resumed after an interruption."""

import argparse
import csv
import dataclasses
import hashlib
import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from bkn_zoo.checkpoints.files import lock
from bkn_zoo.checkpoints.preferred import default_checkpoint
from bkn_zoo.cli.parser import announce, check_checkpoint
from bkn_zoo.errors import ImageError, InputError, counted
from bkn_zoo.terminal import printable

if TYPE_CHECKING:  # slow imports happen in the commands that need them
    from bkn_zoo.inference.classifier import Classification, Classifier

FAILED = 1
EVERY = 30.0  # seconds between lines of progress without a terminal
MAX_RECORD = 100_000  # bytes; a path has at most a few thousand
COLUMNS = ["file", "rank", "label", "score", "model", "revision", "statistics", "engine"]


class Made(NamedTuple):
    """Settings that all rows of a file share. The revision of a local checkpoint is the SHA-256 of its weights."""

    model: str
    revision: str | None
    statistics: str
    top_k: int


class Row(NamedTuple):
    """The result of one image in a file, and its end."""

    end: int
    file: str
    made: Made


class Format(NamedTuple):
    """A file format: the text before, between and after the results of images, and how to read them back.

    `read` yields the rows of a file, given the number of labels per image. An incomplete last image, written by a
    process that was killed, is left out.
    """

    write: "Callable[[str, Classification], str]"
    before: str = ""
    between: str = ""
    after: str = ""
    read: Callable[[IO[bytes], int], Iterator[Row]] | None = None


def load(args: argparse.Namespace) -> "Classifier":
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
    form = FORMATS[args.format]
    if args.output and form.read is None:
        raise InputError("--output needs --format csv or --format json: add one of them.")
    failures: dict[str, str] = {}
    files = list(_image_files(args.paths, failures))
    done = 0
    if files:
        classifier = load(args)
        if args.output:
            done = _to_file(form, classifier, list(dict.fromkeys(files)), args, failures)
        else:
            for text in _texts(form, _results(classifier, files, args, failures)):
                done += 1
                print(_for_terminal(text), end="")
            print(form.after if done else form.before + form.after.lstrip(), end="")
    for failure in failures.values():
        print(f"bkn-zoo: {printable(failure)}", file=sys.stderr)
    asked_for = args.strict or not done or not failures.keys().isdisjoint(map(str, args.paths))
    return FAILED if failures and asked_for else 0


def _for_terminal(text: str) -> str:
    """Escape terminal control characters, except in CSV and JSON that is not shown in a terminal."""
    return "\n".join(map(printable, text.split("\n"))) if sys.stdout.isatty() else text


def _image_files(paths: list[Path], failures: dict[str, str]) -> Iterator[str]:
    """The names of all images. Path objects would need several times the memory for hundreds of thousands of them."""
    from bkn_zoo.images import image_files, passed_over

    for path in paths:
        if not path.exists():
            failures[str(path)] = f"there is no file {path}: correct the path."
            continue
        if not path.is_dir():
            yield str(path)
            continue
        others: Counter[str] = Counter()
        found = image_files(path, others)
        if others:
            print(f"bkn-zoo: {printable(passed_over(path, others))}", file=sys.stderr)
        if not found:
            failures[str(path)] = f"{path} contains no images: choose another folder."
        for name in found:
            yield name.removeprefix(f".{os.sep}")


def _results(
    classifier: "Classifier", files: list[str], args: argparse.Namespace, failures: dict[str, str], before: int = 0
) -> "Iterator[tuple[str, Classification]]":
    """Yield the results of readable images, and add the errors of the others to the failures.

    Args:
        before: number of images that were done before, for the progress.
    """
    from tqdm import tqdm

    terminal, total = sys.stderr.isatty(), before + len(files)
    # Clear the bar before printing.
    aside = nullcontext if args.output else tqdm.external_write_mode
    begun = told = time.monotonic()
    revision = _revision(classifier)
    results = _spread(classifier, files, args) if args.ray else classifier.each(files, args.statistics, args.top_k)
    with tqdm(total=total, initial=before, unit="image", disable=total < 2 or not terminal) as bar:
        for count, (name, result) in enumerate(zip(files, results, strict=True), start=1):
            with aside():
                if isinstance(result, ImageError):
                    failures[name] = str(result)
                else:
                    yield name, dataclasses.replace(result, revision=revision)
            bar.update()
            if not terminal and time.monotonic() >= told + EVERY:
                told = time.monotonic()
                rate = count / (told - begun)
                left = tqdm.format_interval((len(files) - count) / rate)
                print(f"bkn-zoo: {before + count:,} of {total:,} images, {left} to go", file=sys.stderr, flush=True)


def _spread(
    classifier: "Classifier", files: list[str], args: argparse.Namespace
) -> "Iterator[Classification | ImageError]":
    from bkn_zoo.inference.spread import each

    return each(files, args.statistics, args.top_k, classifier.name, args.device, args.engine, args.precision)


def _texts(form: Format, results: "Iterable[tuple[str, Classification]]", begun: bool = False) -> Iterator[str]:
    """The text of each result, without the text after the last one."""
    for name, result in results:
        yield (form.between if begun else form.before) + form.write(name, result)
        begun = True


def _to_file(
    form: Format, classifier: "Classifier", files: list[str], args: argparse.Namespace, failures: dict[str, str]
) -> int:
    """Write the missing results to the file. Returns the number of images in it."""
    statistics = classifier.choose(args.statistics)
    top_k = min(args.top_k, classifier.model.num_classes)
    made = Made(classifier.name, _revision(classifier), statistics, top_k)
    with _alone(args.output) as file:
        done, end = _read(form, file, args, made)
        todo = [name for name in files if _text(name) not in done]
        if done:
            print(f"bkn-zoo: {_are(len(done))} already in {args.output}", file=sys.stderr)
        count = len(done)
        try:
            file.truncate(end)
            results = _results(classifier, todo, args, failures, len(files) - len(todo))
            for text in _texts(form, results, bool(done)):
                file.write(_bytes(text))
                file.flush()  # so that an image is complete or missing, unless the process is killed during this call
                count += 1
            file.write(_bytes(form.after if count else form.before + form.after.lstrip()))
            file.flush()
        except KeyboardInterrupt:
            print(f"bkn-zoo: {_are(count)} in {args.output}: repeat the command to continue", file=sys.stderr)
            raise
    bad = f"; {len(failures):,} could not be used" if failures else ""
    print(f"bkn-zoo: {_are(count)} in {args.output}{bad}", file=sys.stderr)
    return count


def _are(count: int) -> str:
    return f"{counted(count, 'image')} {'is' if count == 1 else 'are'}"


def _revision(classifier: "Classifier") -> str | None:
    """An identifier of the weights."""
    hashes = sorted(classifier.model.config.sha256.values())
    if classifier.revision is not None or len(hashes) < 2:
        return classifier.revision or next(iter(hashes), None)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


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


def _read(form: Format, file: IO[bytes], args: argparse.Namespace, made: Made) -> tuple[set[str], int]:
    """The images in an existing file, and the end of the last one; an error if the file was made with other options."""
    assert form.read is not None
    start = _bytes(form.before)
    found = file.read(len(start))
    if found != start and not (start.startswith(found) and not file.read(1)):
        raise InputError(f"{args.output} was not made with --format {args.format}: choose another file.")
    done, end = set(), 0
    try:
        for row in form.read(file, made.top_k):
            for name, (theirs, ours) in zip(Made._fields, zip(row.made, made, strict=True), strict=True):
                if theirs != ours:
                    if name == "revision":
                        raise InputError(
                            f"{args.output} was made with other weights of {made.model} (revision {theirs}, not "
                            f"{ours}): choose another file."
                        )
                    option = f"--{'checkpoint' if name == 'model' else name.replace('_', '-')} {theirs}"
                    raise InputError(
                        f"{args.output} was made with {option}, not {ours}: use that option, or choose another file."
                    )
            done.add(row.file)
            end = row.end
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{args.output} is damaged after byte {end}: truncate it there, or delete it.") from None
    return done, end


def _text(name: str) -> str:
    """A file name in a form that can be read back, even if it is not valid text."""
    return _bytes(name).decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _write_table(name: str, result: "Classification") -> str:
    lines = [name, *(f"  {p.score:.4f}  {p.label}" for p in result.predictions)]
    if result.uncertain:
        lines.append("  uncertain: the image may show none of the classes that this model knows")
    return "".join(f"{printable(line)}\n" for line in lines)


def _write_json(name: str, result: "Classification") -> str:
    return json.dumps({"file": name, **result.to_dict()}, ensure_ascii=False)


def _read_json(file: IO[bytes], top_k: int) -> Iterator[Row]:
    end = file.tell()
    for line in file:
        text = line.rstrip(b"\n").removesuffix(b",")
        if text == b"]":
            return
        try:
            row = json.loads(text)
        except ValueError:
            if not file.read(1):  # the last line, which is incomplete
                return
            raise
        made = Made(row["model"], row["revision"], row["statistics"], len(row["predictions"]))
        yield Row(end + len(text), _text(row["file"]), made)
        end += len(line)


def _write_csv(name: str, result: "Classification") -> str:
    about = [result.model, result.revision, result.statistics, result.engine]
    rows = enumerate(result.predictions, start=1)
    return "".join(_line([name, rank, p.label, f"{p.score:.6f}", *about]) for rank, p in rows)


def _line(fields: list[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(fields)  # so that names with either character are quoted
    return text.getvalue().removesuffix("\r\n") + "\n"


def _read_csv(file: IO[bytes], top_k: int) -> Iterator[Row]:
    whole: Row | None = None
    for end, fields in _records(file):
        name, rank, _, _, model, revision, statistics, _ = fields
        if rank == "1" and whole is not None:
            yield whole
        whole = Row(end, name, Made(model, revision or None, statistics, int(rank)))
    if whole is not None and whole.made.top_k >= top_k:
        yield whole


def _records(file: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """The complete records of a CSV file, with their ends. Names and labels may contain line breaks in quotes."""
    end, record = file.tell(), b""
    for line in file:
        record += line
        if len(record) > MAX_RECORD:
            raise ValueError("an unclosed quote")
        if record.endswith(b"\n") and record.count(b'"') % 2 == 0:
            end += len(record)
            yield end, next(csv.reader(io.StringIO(record.decode(), newline="")))
            record = b""


FORMATS = {
    "table": Format(_write_table),
    "json": Format(_write_json, "[\n", ",\n", "\n]\n", _read_json),
    "csv": Format(_write_csv, ",".join(COLUMNS) + "\n", read=_read_csv),
}
