"""The cases of test_hub.py, in one process, since importing PyTorch takes seconds.

    python hub_cases.py FOLDER OUTPUT.json     # cases against the server of HF_ENDPOINT, then some without

Each case is a function that asserts; the output says of each which traceback it ended in, if any. Those without a
server are in a process that is forked before the client is imported, which reads then whether it is to be offline.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from image_trees import write_noise
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
FOLDER, HOME = Path(sys.argv[1]), Path(os.environ["HF_HOME"])
FILES = {path.name: path for path in FOLDER.iterdir()}
REPOSITORY, TAG = f"owner/{FOLDER.name}", f"v{bkn_zoo.__version__}"
SHARDS = sorted(name for name in FILES if name.startswith("model-"))
WEIGHTS = {name for name in FILES if name.startswith("model")}
ZOO_NAME = "inception_cifar_bkn.cifar10"
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))  # small, since every case runs them
REAL_SLEEP = time.sleep
waits = []
messages = []
register(num_classes=10)(shallow)
bundled = load_folder(FOLDER)
with torch.inference_mode():
    EXPECTED = {mode: bundled(IMAGES, mode) for mode in MODES}

Case = Callable[[], None]
ONLINE = []
OFFLINE = []


def online(case):
    ONLINE.append(case)
    return case


def offline(case):
    OFFLINE.append(case)
    return case


# Orders to the server, and what came of a call.


def tell(path, message=None):
    data = None if message is None else json.dumps(message).encode()
    with urllib.request.urlopen(f"{ENDPOINT}/-/{path}", data) as answer:
        return json.loads(answer.read() or b"null")


def order(**fault):
    tell("faults", [fault] if fault else [])


def copy(name, files=None, remove=()):
    """A repository like the published one, under a name that no cache knows; returns its commit."""
    encoded = {path: base64.b64encode(data).decode() for path, data in (files or {}).items()}
    return tell("copy", {"from": REPOSITORY, "to": f"owner/{name}", "files": encoded, "remove": [*remove]})["commit"]


@dataclass
class Outcome:
    """What a call gave or raised, how long it would have waited, and what it asked the server."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""
    waits: list[float] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def asked(self, start):
        return [request for request in self.requests if request.startswith(start)]


def attempt(call, *arguments, log=True, **options):
    waits.clear()
    seen = len(tell("log")) if log else 0
    outcome = Outcome()
    try:
        outcome.value = call(*arguments, **options)
    except Exception as error:
        outcome.error, outcome.trace = error, traceback.format_exc()
        messages.append(outcome.trace)
    outcome.waits, outcome.requests = list(waits), tell("log")[seen:] if log else []
    return outcome


def load(name, **options):
    return attempt(from_pretrained, name, log="HF_HUB_OFFLINE" not in os.environ, **options)


def push(name, **options):
    return attempt(hub.push_to_hub, options.pop("folder", FOLDER), f"owner/{name}", **options)


def command(*arguments):
    """What `bkn-zoo` prints, as `value`; it ends well, or `error` is what it exits with."""
    output, seen = io.StringIO(), len(tell("log"))
    argv = mock.patch.object(sys, "argv", ["bkn-zoo", *arguments])
    with argv, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = bkn_zoo.cli.main()
    messages.append(output.getvalue())
    return Outcome(output.getvalue(), Exception(code) if code else None, output.getvalue(), [], tell("log")[seen:])


def assert_loaded(outcome, revision=None):
    """The bundled checkpoint's outputs, bit for bit, from a commit."""
    assert outcome.error is None, outcome.trace
    model = outcome.value
    with torch.inference_mode():
        assert all(torch.equal(model(IMAGES, mode), logits) for mode, logits in EXPECTED.items())
    assert not model.training
    assert len(model.revision) == 40
    assert revision in (None, model.revision), (revision, model.revision)


def assert_refused(outcome, kind, *words):
    """One sentence of the expected kind that holds the words, and nothing of the client's behind it."""
    message = str(outcome.error)
    assert type(outcome.error).__name__ == kind, outcome.trace
    assert [word for word in words if word not in message] == [], message
    assert message.endswith("."), message
    assert "\n" not in message, message
    assert "huggingface_hub" not in outcome.trace, outcome.trace


def snapshot(name):
    return {path.name for path in HOME.glob(f"hub/models--owner--{name}/snapshots/*/*")}


@contextlib.contextmanager
def environment(**variables):
    with mock.patch.dict(os.environ, variables):
        yield


# Cases against the server.


@online
def the_client_is_not_imported_with_the_package():
    assert not CLIENT_WAS_IMPORTED


@online
def publishing_is_one_verified_commit():
    arguments = ("publish", str(FOLDER), "--namespace", "owner", "--results", str(FOLDER.parent / "results"))
    dry = command(*arguments, "--dry-run")
    for name, path in FILES.items():
        assert f"{REPOSITORY}: added {name} ({path.stat().st_size:,} bytes)" in dry.value
    assert [request for request in dry.requests if not request.startswith(("GET", "HEAD"))] == []

    first = command(*arguments, "--tag", TAG)
    repository = tell(f"repositories/{REPOSITORY}")
    assert first.error is None, first.trace
    assert len(first.asked(f"POST /api/models/{REPOSITORY}/commit/main")) == 1
    commit = repository["tags"][TAG]
    assert f"{TAG} is {commit}, verified" in first.value
    assert repository["commits"][commit].keys() == {".gitattributes", *FILES}
    assert first.asked("PUT /upload/")
    assert first.asked("GET /storage/")

    second = command(*arguments, "--tag", TAG)
    assert second.error is None, second.trace
    assert "nothing to change" in second.value
    assert not second.asked("PUT")
    assert not second.asked(f"POST /api/models/{REPOSITORY}/")
    assert len(tell(f"repositories/{REPOSITORY}")["commits"]) == 2  # the Hub's own first one, and ours


@online
def a_folder_of_save_pretrained_has_its_short_card():
    bkn_zoo.save_pretrained(bundled, "plain/saved")
    plain = command("publish", "plain/saved", "--namespace", "owner")
    repository = tell("repositories/owner/saved")
    assert plain.error is None, plain.trace
    assert f"owner/saved: main is {repository['branches']['main']}, verified" in plain.value
    assert repository["tags"] == {}


@online
def a_checkpoint_loads_by_id_tag_commit_and_short_name():
    commit = tell(f"repositories/{REPOSITORY}")["branches"]["main"]
    by_id = load(REPOSITORY)
    assert_loaded(by_id, commit)
    needed = WEIGHTS | {"config.json"}
    assert snapshot(FOLDER.name) == needed
    assert len(by_id.asked("GET /storage/")) == len(needed) - 2  # without config and index
    tagged = load(f"{REPOSITORY}@{TAG}")
    assert_loaded(tagged, commit)
    assert not tagged.asked("GET /storage/")
    pinned = load(f"{REPOSITORY}@{commit}")
    assert_loaded(pinned, commit)
    assert pinned.requests == []  # a commit cannot change: nothing is asked
    with environment(BKN_ZOO_NAMESPACE="owner"):
        assert_loaded(load(FOLDER.name), commit)
    assert_loaded(load(REPOSITORY, revision=TAG), commit)
    assert from_pretrained(FOLDER).revision is None


@online
def a_converted_network_goes_to_the_hub_and_back():
    model = bkn_zoo.create_model("timm:test_resnet", 4)
    model.statistics_batch_size = 2
    model.train()(torch.randn(4, 3, 64, 64))
    folder, images = FOLDER.parent / "converted", torch.randn(2, 3, 64, 64)
    bkn_zoo.save_pretrained(model.eval(), folder)
    commit = hub.push_to_hub(folder, "owner/converted").commit
    ours, theirs = (from_pretrained(name) for name in (folder, "owner/converted"))
    with torch.inference_mode():
        assert all(torch.equal(ours(images, mode), theirs(images, mode)) for mode in MODES)
    assert (theirs.name, theirs.revision) == ("timm:test_resnet", commit)


@online
def every_refusal_is_one_sentence_and_only_busy_hubs_are_asked_again():
    for status, kind, words, waited in (
        (401, "HubAccessError", ["401", "HF_TOKEN"], []),
        (403, "HubAccessError", ["403", "ask the owner"], []),
        (404, "HubNotFoundError", ["owner/status-404", "correct the name"], []),
        (429, "HubUnavailableError", ["429", "try again in some minutes"], [1, 2]),
        (500, "HubUnavailableError", ["500", "try again later"], [1, 2]),
    ):
        copy(f"status-{status}")
        order(pattern=f"GET /api/models/owner/status-{status}/", times=99, status=status)
        found = load(f"owner/status-{status}")
        assert_refused(found, kind, *words)
        assert found.waits == waited, status
    order(pattern="GET /api/models/owner/status-429/", times=99, status=429, headers={"Retry-After": "3600"})
    busy = load("owner/status-429")
    assert_refused(busy, "HubUnavailableError", "try again in 3,600 seconds")
    assert busy.waits == []
    order(pattern="GET /api/models/owner/status-429/", times=1, status=429, headers={"Retry-After": "7"})
    once = load("owner/status-429")
    assert_loaded(once)
    assert once.waits == [7]  # as Retry-After asks
    order(pattern="GET /api/models/owner/status-500/", times=2, status=503)
    twice = load("owner/status-500")
    assert_loaded(twice)
    assert twice.waits == [1, 2]
    order(pattern="GET /api/models/owner/status-403/", status=403, headers={"X-Error-Code": "GatedRepo"})
    assert_refused(load("owner/status-403"), "HubAccessError", "approved users", "ask for access")
    order()
    assert_refused(load("owner/nothing-here"), "HubNotFoundError", "owner/nothing-here", "correct the name")
    assert_refused(load(f"{REPOSITORY}@nowhere"), "HubNotFoundError", f"{REPOSITORY}@nowhere", "correct the revision")
    words = ("unknown checkpoint 'nothing-here'", "somebody/nothing-here")
    assert_refused(load("nothing-here"), "UnknownNameError", *words)


@online
def a_token_opens_private_repositories_and_a_bad_one_is_named():
    assert push("secret", private=True).error is None
    for token, words in (
        ("hf_wrongwrongwrong", "valid token"), ("hf_illegal\x07token", "valid token"), ("hf_fünf", "characters"),
    ):  # fmt: skip
        with environment(HF_TOKEN=token):
            assert_refused(load("owner/secret"), "HubAccessError", words, "HF_TOKEN")
    with environment(HF_TOKEN=""):
        assert_refused(load("owner/secret"), "HubNotFoundError", "owner/secret", "HF_TOKEN")
        assert_refused(push("other"), "HubAccessError", "owner/other", "HF_TOKEN")
        assert_loaded(load("owner/secret", token=OWNER, cache_dir="elsewhere"))
        refused = load("owner/secret", token="not-like-a-token", cache_dir="other")
        assert_refused(refused, "HubAccessError", "valid token")
    assert [path.name for path in Path("elsewhere").glob("models--*")] == ["models--owner--secret"]
    assert_refused(load("owner/secret", token=False, cache_dir="other"), "HubNotFoundError", "owner/secret")
    assert_loaded(load("owner/secret"))


@online
def a_shard_that_is_cut_off_is_resumed_or_refused():
    from huggingface_hub import constants

    copy("cut")
    with mock.patch.object(constants, "DOWNLOAD_CHUNK_SIZE", 500):  # as if shards had more than 10 MB
        order(pattern="GET /storage/", after=1, times=1, cut=1000)
        once = load("owner/cut")
    assert_loaded(once)
    assert [request for request in once.requests if request.endswith("bytes=1000-")]
    copy("half")
    order(pattern="GET /storage/", after=1, times=999, cut=0)
    assert_refused(load("owner/half"), "HubUnavailableError", "owner/half", "transfer stopped", "try again")
    order()
    assert "config.json" in snapshot("half")
    assert len(snapshot("half")) < len(WEIGHTS) + 1


@online
def a_flipped_byte_is_refused_and_not_kept():
    for part, place in (("header", 9), ("tensor", -1)):
        copy(f"flip-{part}")
        order(pattern=f"GET /storage/{sha256(FOLDER / SHARDS[1])}", flip=place)
        assert_refused(load(f"owner/flip-{part}"), "DamagedFileError", f"{SHARDS[1]} of owner/flip-{part}")
        assert_loaded(load(f"owner/flip-{part}"))


@online
def odd_repositories_are_refused_and_nothing_of_them_is_run():
    config = json.loads((FOLDER / "config.json").read_text())
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../../../outside.safetensors")
    ran = HOME / "ran"

    class Exploit:
        def __reduce__(self):
            return (Path.touch, (ran,))

    strange = {"pytorch_model.bin": pickle.dumps({"fc.weight": Exploit()})}
    strange |= dict.fromkeys(("hubconf.py", "modeling.py"), f"open({str(ran)!r}, 'w')".encode())

    # Before weights are downloaded: an unknown network and a newer format.
    for name, change, word in (
        ("unknown", {"architecture": "vgg_bkn"}, "no network 'vgg_bkn'"),
        ("newer", {"format_version": 99}, "format_version is 99, but this bkn_zoo reads up to 1: upgrade bkn_zoo"),
    ):
        copy(name, {"config.json": json.dumps(config | change).encode()})
        assert_refused(load(f"owner/{name}"), "CheckpointError", "config.json", word)
        assert snapshot(name) == {"config.json"}
    copy("bare", remove=["config.json"])
    assert_refused(load("owner/bare"), "CheckpointError", "owner/bare has no config.json")

    copy("pickles", strange, remove=WEIGHTS)
    words = ("owner/pickles", "pytorch_model.bin instead of", "never loaded")
    assert_refused(load("owner/pickles"), "CheckpointError", *words)
    copy("code", strange)
    assert_loaded(load("owner/code"))
    assert strange.keys().isdisjoint(snapshot("pickles") | snapshot("code"))
    assert not ran.exists()

    copy("escape", {"model.safetensors.index.json": json.dumps(index).encode()})
    words = ("'../../../outside.safetensors'", "not a file of weights")
    assert_refused(load("owner/escape"), "CheckpointError", *words)
    copy("path", {"model-/../../../../../outside.safetensors": b"x"})
    assert_refused(load("owner/path"), "HubError", "owner/path", "'..'")
    assert list(HOME.parent.rglob("outside.safetensors")) == []


@online
def all_files_are_of_one_commit_even_if_the_revision_moves():
    first = copy("moving")
    second = copy("moving", {"notes.txt": b"a further commit"})
    order(pattern="GET /api/models/owner/moving/revision/main", move="owner/moving")
    assert_loaded(load("owner/moving"), second)
    order()
    third = copy("moving", {"notes.txt": b"one more", "config.json": (FOLDER / "config.json").read_bytes()})
    assert_loaded(load(f"owner/moving@{second}"), second)
    assert_loaded(load("owner/moving"), third)
    assert len({first, second, third}) == 3


@online
def a_full_disk_is_named_and_leaves_nothing_broken():
    copy("large")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write beyond it fails as on a full disk
    try:
        full = load("owner/large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(full, "HubError", "no space for owner/large", str(HOME), "HF_HOME")
    assert full.waits == []
    assert_loaded(load("owner/large"))


@online
def an_upload_that_fails_or_is_cut_off_can_be_repeated():
    order(pattern="POST /api/models/owner/failing/commit", times=99, status=500)
    assert_refused(push("failing"), "HubUnavailableError", "500", "owner/failing", "try again")
    order(pattern="POST /api/models/owner/failing/commit", status=412)
    assert_refused(push("failing"), "HubError", "changed by someone else", "412")
    order()
    tell("forget", [sha256(FOLDER / SHARDS[1])])
    order(pattern="PUT ", cut=1000)
    assert push("failing").error is None
    order()
    assert_loaded(load("owner/failing"))


@online
def other_files_of_a_network_replace_the_old_ones_and_tags_stay():
    """The same network in one file, over the one in shards; then tags and pull requests."""
    whole = FOLDER.parent / "whole" / FOLDER.name
    bkn_zoo.save_pretrained(bundled, whole)
    first = push("replaced", tag="v1").value.commit
    assert_refused(push("replaced", folder=whole, tag="v1"), "HubError", "tag v1", "choose another")
    request = push("replaced", folder=whole, create_pr=True).value.pull_request
    assert request.endswith("/owner/replaced/discussions/1")
    assert_loaded(load("owner/replaced"), first)
    copy("replaced", {"model_fp16/weights.safetensors": b"of a stranger, and not replaced"})
    second = push("replaced", folder=whole, tag="v2").value
    kinds = {change.file: change.kind for change in second.changes}
    assert (kinds["model.safetensors"], kinds["config.json"]) == ("added", "changed")
    assert {file for file, kind in kinds.items() if kind == "removed"} == WEIGHTS  # not LICENSE, which only the Hub has
    assert "LICENSE" in tell("repositories/owner/replaced")["commits"][second.commit]
    both = push("replaced", folder=whole, tag="v3", create_pr=True)
    assert_refused(both, "InputError", "pull request cannot be tagged")
    order(pattern="GET /storage/", flip=-1)
    unverified = attempt(hub.verify_published, whole, "owner/replaced", second.commit)
    assert_refused(unverified, "DamagedFileError", "differs from the local file")
    order()
    assert_loaded(load("owner/replaced"), second.commit)
    assert_loaded(load("owner/replaced@v1"), first)
    assert_loaded(load("owner/replaced@refs/pr/1"))
    assert tell("repositories/owner/replaced")["tags"] == {"v1": first, "v2": second.commit}


@online
def training_ends_on_the_hub_if_asked():
    """A network of two classes of small images, from files to the Hub."""
    tree = write_noise(FOLDER.parent / "photos", dark=12, light=12)
    options = ("train", "--data", str(tree), "--model", "shallow_bkn", "--size", "8", "--epochs", "1")
    options += ("--gradient_batch", "8", "--validation", "0.3", "--device", "cpu", "--publish", "owner", "--private")
    refused = command(*options, "--name", "not=a-repository")
    assert str(refused.error) == "2"
    assert "'owner/not=a-repository' cannot be a repository" in refused.value
    done = command(*options, "--name", "photos")
    assert done.error is None, done.trace
    first = from_pretrained("owner/photos").revision
    repository = tell("repositories/owner/photos")
    assert repository["private"]
    card = (HOME.parent / "server" / repository["commits"][first]["README.md"]).read_text()
    assert "# photos" in card
    assert "--publish owner" in card
    assert 'from_pretrained("owner/photos")' in card
    assert "bkn-zoo serve --models owner/photos" in card
    local = Path("runs/photos/photos/README.md").read_text()
    assert local == card.replace('"owner/photos"', '"./runs/photos/photos"').replace("ls owner/", "ls ./runs/photos/")

    # The same name again, with results elsewhere, and a Hub that refuses at the end.
    order(pattern="POST /api/models/owner/photos/commit", status=403)
    failed = command(*options, "--name", "photos", "--seed", "1", "--output", "again", "--results", "elsewhere/runs")
    order()
    assert str(failed.error) == "1"
    assert "--results elsewhere --private" in failed.value
    advised = failed.value.partition("publish it with bkn-zoo publish ")[2].strip()
    assert "verified" in command("publish", *shlex.split(advised)).value
    assert from_pretrained("owner/photos").revision != first


@online
def the_documents_examples_run_as_written():
    """Those that are marked as run here, in order and in one namespace per document."""
    marked = re.compile(r"^```python\n(# not run by the tests: test_hub\.py .*?)^```$", re.MULTILINE | re.DOTALL)
    hub.push_to_hub(FOLDER, "your-name/my_network", tag="v1")
    bkn_zoo.save_pretrained(bundled, "my_network")  # as the guide has by then
    for document in ("guide.md", "hub.md"):
        blocks = marked.findall((Path(__file__).parent.parent / "docs" / document).read_text())
        assert blocks, document
        namespace = {"bkn_zoo": bkn_zoo, "model": bundled}
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(block, namespace)


@online
def without_a_connection_the_cache_serves():
    tell("stop", {})
    assert_loaded(attempt(from_pretrained, REPOSITORY, log=False))
    refused = attempt(from_pretrained, "owner/never-asked", log=False)
    assert_refused(refused, "HubUnavailableError", "owner/never-asked", "check the connection")
    misspelt = attempt(from_pretrained, "inception_cifar_bnk", log=False)
    assert_refused(misspelt, "UnknownNameError", "'inception_cifar_bnk'", "check the connection")
    assert "UnknownNameError" not in str(misspelt.error)


# Cases without a server.


@offline
def a_cached_checkpoint_loads_offline():
    assert_loaded(load(REPOSITORY))
    assert_loaded(load(f"{REPOSITORY}@{TAG}"))
    unknown = load("owner/never-asked")
    assert_refused(unknown, "HubUnavailableError", "owner/never-asked", "HF_HUB_OFFLINE", "unset it")
    assert unknown.waits == []


@offline
def a_half_downloaded_checkpoint_is_never_loaded():
    assert_refused(load("owner/half"), "HubUnavailableError", "owner/half", "not completely in the cache")


def run(cases):
    results = {}
    for case in cases:
        try:
            results[case.__name__] = case()
        except Exception:
            results[case.__name__] = traceback.format_exc()
    return results | {"messages": messages}


def main():
    time.sleep = waits.append  # waiting is recorded, not done
    output = Path(sys.argv[2])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the other has filled the cache
        os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
        output.with_suffix(".offline").write_text(json.dumps(run(OFFLINE)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    import huggingface_hub.utils.logging  # noqa: F401, which logs to what is standard error now

    results = run(ONLINE)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    alone = json.loads(output.with_suffix(".offline").read_text())
    output.write_text(json.dumps(results | alone | {"messages": results["messages"] + alone["messages"]}, indent=1))


if __name__ == "__main__":
    main()
