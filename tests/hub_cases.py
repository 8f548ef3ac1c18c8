"""All that test_hub.py does with the Hub's client, in one process, since importing PyTorch takes seconds.

    python hub_cases.py FOLDER OUTPUT.json     # cases against the server of HF_ENDPOINT, then one without

Each case is a function; what it returns goes to the output under its name. The one without a server is in a process
that is forked before the client is imported, which reads then whether it is to be offline.
"""

import base64
import contextlib
import io
import json
import os
import pickle
import re
import resource
import shlex
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from shallow import shallow

import bkn_zoo
import bkn_zoo.cli
from bkn_zoo.checkpoints import hub
from bkn_zoo.checkpoints.files import sha256
from bkn_zoo.checkpoints.folder import from_pretrained, load_folder
from bkn_zoo.models.registry import register
from bkn_zoo.modes import MODES

CLIENT_WAS_IMPORTED = "httpx2" in sys.modules  # by bkn_zoo alone; it takes a while
ENDPOINT, OWNER = os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"]
ROOT = Path(__file__).parent.parent
FOLDER = Path(sys.argv[1])
REPOSITORY = f"owner/{FOLDER.name}"
SECOND_SHARD = sorted(FOLDER.glob("model-*.safetensors"))[1].name
ZOO_NAME = "inception_cifar_bkn.cifar10"
PHOTO = Image.radial_gradient("L").convert("RGB")
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))  # small, since every case runs them
REAL_SLEEP = time.sleep
Result = dict[str, Any]
waits: list[float] = []
register(num_classes=10)(shallow)
bundled = load_folder(FOLDER)
with torch.inference_mode():
    EXPECTED = {mode: bundled(IMAGES, mode) for mode in MODES}


def tell(path: str, message: Any = None) -> Any:
    data = None if message is None else json.dumps(message).encode()
    with urllib.request.urlopen(f"{ENDPOINT}/-/{path}", data) as answer:
        return json.loads(answer.read() or b"null")


def order(**fault: Any) -> None:
    tell("faults", [fault] if fault else [])


def copy(name: str, files: dict[str, bytes] | None = None, remove: tuple[str, ...] = ()) -> str:
    """A repository like the published one, under a name that no cache knows; returns its commit."""
    encoded = {path: base64.b64encode(data).decode() for path, data in (files or {}).items()}
    return tell("copy", {"from": REPOSITORY, "to": f"owner/{name}", "files": encoded, "remove": remove})["commit"]


def load(name: str, **options: Any) -> Result:
    """Whether loading gives the bundled checkpoint's outputs bit for bit, or the error."""
    waits.clear()
    online = "HF_HUB_OFFLINE" not in os.environ
    seen = len(tell("log")) if online else 0
    result = guarded(lambda: compared(from_pretrained(name, **options)))
    requests = tell("log")[seen:] if online else []
    return result | {"waits": list(waits), "requests": requests}


def compared(model: bkn_zoo.Network) -> Result:
    with torch.inference_mode():
        same = all(torch.equal(model(IMAGES, mode), logits) for mode, logits in EXPECTED.items())
    return {"same": same, "revision": model.revision, "training": model.training}


def guarded(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}


def snapshot(name: str) -> list[str]:
    folders = Path(os.environ["HF_HOME"]).glob(f"hub/models--owner--{name}/snapshots/*")
    return sorted(path.name for folder in folders for path in folder.iterdir())


def command(*arguments: str) -> Result:
    """What `bkn-zoo` prints, and what it exits with."""
    output, seen = io.StringIO(), len(tell("log"))
    with contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", ["bkn-zoo", *arguments]):
        code = bkn_zoo.cli.main()
    return {"output": output.getvalue(), "exit": code, "requests": tell("log")[seen:]}


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# Cases against the server.


def publishing() -> Result:
    arguments = (str(FOLDER), "--namespace", "owner", "--results", str(FOLDER.parent / "results"))
    tag = ("--tag", f"v{bkn_zoo.__version__}")
    bkn_zoo.save_pretrained(bundled, "plain/saved")
    return {
        "dry": command("publish", *arguments, "--dry-run"),
        "first": command("publish", *arguments, *tag),
        "second": command("publish", *arguments, *tag),
        "plain": command("publish", "plain/saved", "--namespace", "owner"),
    }


def loading() -> Result:
    by_id = load(REPOSITORY)
    with environment(BKN_ZOO_NAMESPACE="owner"):
        short = load(FOLDER.name)
    tagged = load(f"{REPOSITORY}@v{bkn_zoo.__version__}")
    commit = load(f"{REPOSITORY}@{by_id['revision']}")
    asked_for = load(REPOSITORY, revision=f"v{bkn_zoo.__version__}")
    local = compared(bkn_zoo.from_pretrained(FOLDER))
    files = snapshot(FOLDER.name)
    return {"id": by_id, "short": short, "tag": tagged, "commit": commit, "local": local, "files": files} | {
        "revision": asked_for
    }


def of_the_zoo() -> Result:
    """A trained checkpoint of this tree: published, loaded from an empty cache, and asked about a photograph."""
    published = command("publish", ZOO_NAME, "--namespace", "zoo")
    ours, theirs = (
        bkn_zoo.Classifier.from_pretrained(name, engine="torch")(PHOTO, top_k=10)
        for name in (ZOO_NAME, f"zoo/{ZOO_NAME}")
    )
    return published | {"same": ours.predictions == theirs.predictions, "revisions": [ours.revision, theirs.revision]}


def converted() -> Result:
    """A network of timm's with BKN: saved, pushed, and loaded from there."""
    model = bkn_zoo.create_model("timm:test_resnet", 4)
    model.statistics_batch_size = 2
    model.train()(torch.randn(4, 3, 64, 64))
    bkn_zoo.save_pretrained(model.eval(), FOLDER.parent / "converted")
    commit = hub.push_to_hub(FOLDER.parent / "converted", "owner/converted").commit
    ours, theirs = (bkn_zoo.from_pretrained(name) for name in (FOLDER.parent / "converted", "owner/converted"))
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        same = all(torch.equal(ours(images, mode), theirs(images, mode)) for mode in MODES)
    return {"same": same, "architecture": theirs.name, "revisions": [theirs.revision, commit]}


def statuses() -> Result:
    results = {}
    for status in (401, 403, 404, 429, 500):
        copy(f"status-{status}")
        order(pattern=f"GET /api/models/owner/status-{status}/", times=99, status=status)
        results[str(status)] = load(f"owner/status-{status}")
    order(pattern="GET /api/models/owner/status-429/", times=99, status=429, headers={"Retry-After": "3600"})
    results["429 for an hour"] = load("owner/status-429")
    order(pattern="GET /api/models/owner/status-429/", times=1, status=429, headers={"Retry-After": "7"})
    results["429 once"] = load("owner/status-429")
    order(pattern="GET /api/models/owner/status-500/", times=2, status=503)
    results["503 twice"] = load("owner/status-500")
    order(pattern="GET /api/models/owner/status-403/", status=403, headers={"X-Error-Code": "GatedRepo"})
    results["gated"] = load("owner/status-403")
    order()
    results["no repository"] = load("owner/nothing-here")
    results["no revision"] = load(f"{REPOSITORY}@nowhere")
    results["short"] = load("nothing-here")
    return results


def tokens() -> Result:
    results = {"who": guarded(lambda: {"name": hub._api().whoami()["name"]})}
    private = guarded(lambda: {"commit": hub.push_to_hub(FOLDER, "owner/secret", private=True).commit})
    results["push"] = private
    for kind, token in {"wrong": "hf_wrongwrongwrong", "illegal": "hf_illegal\x07token", "foreign": "hf_fünf"}.items():
        with environment(HF_TOKEN=token):
            results[kind] = load("owner/secret")
    with environment(HF_TOKEN=""):
        results["none"] = load("owner/secret")
        results["push without"] = guarded(lambda: {"done": hub.push_to_hub(FOLDER, "owner/other")})
        results["passed"] = load("owner/secret", token=OWNER, cache_dir="elsewhere")
        results["passed wrong"] = load("owner/secret", token="not-like-a-token", cache_dir="other")
    results["withheld"] = load("owner/secret", token=False, cache_dir="other")
    results["elsewhere"] = [path.name for path in Path("elsewhere").glob("models--*")]
    results["right"] = load("owner/secret")
    return results


def connection_cut() -> Result:
    from huggingface_hub import constants

    copy("cut")
    constants.DOWNLOAD_CHUNK_SIZE, usual = 500, constants.DOWNLOAD_CHUNK_SIZE  # as if shards had more than 10 MB
    order(pattern="GET /storage/", after=1, times=1, cut=1000)
    once = load("owner/cut")
    constants.DOWNLOAD_CHUNK_SIZE = usual
    copy("half")
    order(pattern="GET /storage/", after=1, times=999, cut=0)
    always = load("owner/half")
    order()
    return {"once": once, "always": always, "half": snapshot("half")}


def flipped_byte() -> Result:
    second = sha256(FOLDER / SECOND_SHARD)
    results = {}
    for part, place in (("header", 9), ("tensor", -1)):
        copy(f"flip-{part}")
        order(pattern=f"GET /storage/{second}", flip=place)
        results[part] = {"refused": load(f"owner/flip-{part}"), "again": load(f"owner/flip-{part}")}
    return results


def odd_repositories() -> Result:
    config = json.loads((FOLDER / "config.json").read_text())
    weights = tuple(path.name for path in FOLDER.glob("model*"))
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../../../outside.safetensors")
    ran = Path(os.environ["HF_HOME"]) / "ran"

    class Exploit:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (ran,))

    exploit = pickle.dumps({"fc.weight": Exploit()})
    code = f"open({str(ran)!r}, 'w')".encode()
    copy("unknown", {"config.json": json.dumps(config | {"architecture": "vgg_bkn"}).encode()})
    copy("newer", {"config.json": json.dumps(config | {"format_version": 99}).encode()})
    copy("pickles", {"pytorch_model.bin": exploit, "modeling.py": code}, remove=weights)
    copy("escape", {"model.safetensors.index.json": json.dumps(index).encode()})
    copy("path", {"model-/../../../../../outside.safetensors": b"x"})
    copy("bare", remove=("config.json",))
    copy("code", {"hubconf.py": code, "modeling.py": code, "pytorch_model.bin": exploit})
    names = ("unknown", "newer", "pickles", "escape", "path", "bare", "code")
    results: Result = {name: load(f"owner/{name}") | {"files": snapshot(name)} for name in names}
    outside = list(Path(os.environ["HF_HOME"]).parent.rglob("outside.safetensors"))
    return results | {"ran": ran.exists(), "outside": list(map(str, outside))}


def moving_revision() -> Result:
    first = copy("moving")
    second = copy("moving", {"notes.txt": b"a further commit"})
    order(pattern="GET /api/models/owner/moving/revision/main", move="owner/moving")
    while_loading = load("owner/moving")
    order()
    third = copy("moving", {"notes.txt": b"one more", "config.json": (FOLDER / "config.json").read_bytes()})
    pinned = load(f"owner/moving@{second}")
    return {"commits": [first, second, third], "moved": while_loading, "pinned": pinned, "now": load("owner/moving")}


def full_disk() -> Result:
    copy("large")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write beyond it fails as on a full disk
    try:
        full = load("owner/large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return {"full": full, "again": load("owner/large")}


def two_at_once() -> Result:
    copy("shared")
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            time.sleep = REAL_SLEEP
            os._exit(0 if guarded(lambda: compared(from_pretrained("owner/shared"))).get("same") else 1)
        children.append(child)
    return {"exits": [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]}


def interrupted_uploads() -> Result:
    def push(name: str) -> Result:
        seen = len(tell("log"))
        result = guarded(lambda: {"changes": len(hub.push_to_hub(FOLDER, f"owner/{name}").changes)})
        return result | {"requests": tell("log")[seen:]}

    # The files of all these repositories are in the server's storage already, unless their content is new.
    tell("forget", [sha256(path) for path in FOLDER.glob("*.safetensors")])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        guarded(lambda: {"done": hub.push_to_hub(FOLDER, "owner/killed")})
        os._exit(0)
    order(pattern="POST /owner/killed.git/info/lfs/verify", kill=child)  # when one file at least has arrived
    os.write(writer, b"x")
    status = os.waitpid(child, 0)[1]
    order()
    visible = load("owner/killed")
    repeated = push("killed")
    loaded = load("owner/killed")
    order(pattern="POST /api/models/owner/failing/commit", times=99, status=500)
    failed = push("failing")
    order(pattern="POST /api/models/owner/failing/commit", status=412)
    conflict = push("failing")
    order()
    tell("forget", [sha256(FOLDER / SECOND_SHARD)])
    order(pattern="PUT ", cut=1000)
    cut = push("failing")
    order()
    return {
        "signal": os.WTERMSIG(status), "visible": visible, "repeated": repeated, "loaded": loaded, "failed": failed,
        "conflict": conflict,
        "cut": cut, "after": load("owner/failing"),
    }  # fmt: skip


def replacing() -> Result:
    """The same network in one file, over the one in shards; then tags and pull requests."""
    whole = FOLDER.parent / "whole" / FOLDER.name
    bkn_zoo.save_pretrained(bundled, whole)
    first = hub.push_to_hub(FOLDER, "owner/replaced", tag="v1")
    taken = guarded(lambda: {"done": str(hub.push_to_hub(whole, "owner/replaced", tag="v1"))})
    request = hub.push_to_hub(whole, "owner/replaced", create_pr=True)
    untouched = load("owner/replaced")
    second = hub.push_to_hub(whole, "owner/replaced", tag="v2")
    both = guarded(lambda: {"done": str(hub.push_to_hub(whole, "owner/replaced", tag="v3", create_pr=True))})
    order(pattern="GET /storage/", flip=-1)
    unverified = guarded(lambda: {"done": hub.verify_published(whole, "owner/replaced", second.commit)})
    order()
    return {
        "first": first.commit, "taken": taken, "request": request.pull_request, "untouched": untouched, "both": both,
        "second": second.commit, "changes": {c.file: c.kind for c in second.changes}, "unverified": unverified,
        "now": load("owner/replaced"), "old": load("owner/replaced@v1"),
        "proposed": load("owner/replaced@refs/pr/1"),
    }  # fmt: skip


def training() -> Result:
    """A network of two classes of small images, from files to the Hub."""
    tree = FOLDER.parent / "photos"
    for label, value in (("dark", 60), ("light", 200)):
        (tree / label).mkdir(parents=True)
        for k in range(12):
            Image.new("RGB", (8, 8), (value + k,) * 3).save(tree / label / f"{k}.png")
    options = ("--model", "shallow_bkn", "--size", "8", "--epochs", "1", "--gradient_batch", "8")
    options += ("--validation", "0.3", "--device", "cpu", "--publish", "owner", "--private")
    refused = command("train", "--data", str(tree), *options, "--name", "not=a-repository")
    done = command("train", "--data", str(tree), *options, "--name", "photos")
    revision = guarded(lambda: {"is": revision_of("owner/photos")})
    # The same name again, with results elsewhere, and a Hub that refuses at the end.
    order(pattern="POST /api/models/owner/photos/commit", status=403)
    again = ("--name", "photos", "--seed", "1", "--output", "again", "--results", "elsewhere/runs")
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        failed = command("train", "--data", str(tree), *options, *again)
    order()
    advised = printed.getvalue().partition("publish it with bkn-zoo publish ")[2].strip()
    remedy = command("publish", *shlex.split(advised))
    other = command("publish", "runs/photos/photos", "--namespace", "owner", "--name", "pictures")
    return {
        "refused": refused, "done": done, "revision": revision, "failed": failed, "said": printed.getvalue(),
        "remedy": remedy, "other": other,
    }  # fmt: skip


def revision_of(name: str) -> str | None:
    return from_pretrained(name).revision


def documents() -> Result:
    """The examples that are marked as run here, in order and in one namespace per document, as written."""
    marked = re.compile(r"^```python\n(# not run by the tests: test_hub\.py .*?)^```$", re.MULTILINE | re.DOTALL)
    counts = {}
    hub.push_to_hub(FOLDER, "your-name/my_network", tag="v1")
    bkn_zoo.save_pretrained(bundled, "my_network")  # as the guide has by then
    for document in ("docs/guide.md", "docs/hub.md"):
        blocks = marked.findall((ROOT / document).read_text())
        namespace: dict[str, Any] = {"bkn_zoo": bkn_zoo, "model": bundled}
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(block, namespace)
        counts[document] = len(blocks)
    return {"counts": counts}


def server_gone() -> Result:
    tell("stop", {})
    return {
        "cached": guarded(lambda: compared(from_pretrained(REPOSITORY))),
        "not cached": guarded(lambda: compared(from_pretrained("owner/never-asked"))),
        "misspelt": guarded(lambda: compared(from_pretrained("inception_cifar_bnk"))),
    }


ONLINE = [
    publishing, loading, of_the_zoo, converted, statuses, tokens, connection_cut, flipped_byte, odd_repositories,
    moving_revision, full_disk, two_at_once, interrupted_uploads, replacing, training, documents, server_gone,
]  # fmt: skip


# Cases without a server.


def offline() -> Result:
    version = f"v{bkn_zoo.__version__}"
    names = {"main": REPOSITORY, "tag": f"{REPOSITORY}@{version}", "unknown": "owner/never-asked", "half": "owner/half"}
    return {key: load(name) for key, name in names.items()}


def run(cases: list[Callable[[], Result]]) -> Result:
    results: Result = {}
    for case in cases:
        started = time.monotonic()
        results[case.__name__] = guarded(case) | {"seconds": time.monotonic() - started}
    return results


def main() -> None:
    time.sleep = waits.append  # type: ignore[assignment]  # waiting is recorded, not done
    output = Path(sys.argv[2])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the other has filled the cache
        os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
        output.with_suffix(".offline").write_text(json.dumps(run([offline])))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    results = {"client_was_imported": CLIENT_WAS_IMPORTED} | run(ONLINE)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    results |= json.loads(output.with_suffix(".offline").read_text())
    output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
