"""The Hub, through its unmodified client, over HTTP to a server on this machine: publish, load, and failures."""

import contextlib
import io
import pickle
import re
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from hub_server import Fault, HubServer
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import close_session, validate_repo_id
from image_trees import write_noise
from shallow import shallow

import bkn_zoo
import bkn_zoo.cli
from bkn_zoo import from_pretrained
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.checkpoints import hub, locate
from bkn_zoo.checkpoints.card import checkpoint_card
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import sha256
from bkn_zoo.errors import BknZooError, InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.models import registry
from bkn_zoo.modes import MODES

TOKEN = "hf_aVerySecretTokenOfTheTests"
SECRETS = (TOKEN, "hf_wrongwrongwrong", "fünf", "not-like-a-token")
NAME, ZOO_NAME = "shallow_bkn.test", "inception_cifar_bkn.cifar10"
REPOSITORY, TAG = f"owner/{NAME}", "v1"
NOWHERE = "http://127.0.0.1:9"
WEIGHTS = {f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)} | {"model.safetensors.index.json"}
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))  # small, because every test runs them


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._networks, "shallow", shallow)
        patch.setitem(registry._default_classes, "shallow", 10)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of few layers in three shards, with its card and a license."""
    root = tmp_path_factory.mktemp("bundled")
    torch.manual_seed(0)
    model = bkn_zoo.create_model("shallow_bkn").train()
    model.statistics_batch_size = 2
    model(torch.randn(4, 3, 32, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MAX_FILE_SIZE", 200_000)
        about = {"preprocessing": Preprocessing(32, (0.5,) * 3, (0.2,) * 3), "default_statistics": "expected"}
        model.eval().save_pretrained(root / NAME, **about, license_text="Apache License\n")
    (root / NAME / "README.md").write_text(checkpoint_card(Config.read(root / NAME / "config.json"), NAME))
    return root / NAME


@pytest.fixture(scope="module")
def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(folder):
    """The outputs of the checkpoint."""
    model = from_pretrained(folder)
    with torch.inference_mode():
        return {mode: model(IMAGES, mode) for mode in MODES}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    server = HubServer(tmp_path_factory.mktemp("server"), TOKEN)
    yield server
    server.shutdown()


@pytest.fixture
def server(started, files, tmp_path, monkeypatch):
    """The Hub with one checkpoint, for a client with an empty cache. Waiting takes no time."""
    template = started.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    address = {"ENDPOINT": started.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    home = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "token")}
    for name, value in (address | home | {"HF_HUB_DISABLE_XET": True}).items():
        monkeypatch.setattr(constants, name, value)
    for name, value in {"HF_TOKEN": TOKEN, "NO_PROXY": "*", "BKN_ZOO_NAMESPACE": "somebody"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    close_session()
    started.repositories, started.faults, started.log = {}, [], []
    started.add(REPOSITORY, files)
    started.repositories[REPOSITORY].tags[TAG] = started.head(REPOSITORY)
    yield started
    assert not [request for request in started.log if "/storage/" in request and "+token" in request], "a token left"


@pytest.fixture
def assert_loads(server, expected):
    """Load a checkpoint, which has the expected outputs, bit for bit, and is of a certain commit."""

    def check(name, revision=None, **options):
        model = from_pretrained(name, **options)
        with torch.inference_mode():
            assert all(torch.equal(model(IMAGES, mode), logits) for mode, logits in expected.items())
        assert not model.training
        assert model.revision == (revision or server.head(name.partition("@")[0]))

    return check


def assert_refused(kind, words, call, *arguments, **options):
    """One sentence of the expected kind that contains the words, and neither a secret nor errors of the client."""
    with pytest.raises(BknZooError) as caught:
        call(*arguments, **options)
    message, trace = str(caught.value), "".join(traceback.format_exception(caught.value))
    assert type(caught.value).__name__ == kind, trace
    assert [word for word in words if word not in message] == [], message
    assert message.endswith(".")
    assert "\n" not in message
    assert "huggingface_hub" not in trace
    assert [secret for secret in SECRETS if secret in trace] == []


@pytest.fixture
def command(capfd, monkeypatch):
    """The exit code of `bkn-zoo`, and everything that it prints."""

    def run(*arguments):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["bkn-zoo", *map(str, arguments)])  # which model cards quote
        code = bkn_zoo.cli.main()
        return code, "".join(capfd.readouterr())

    return run


def cached(tmp_path, name):
    return {path.name for path in tmp_path.glob(f"cache/models--owner--{name}/snapshots/*/*")}


# Publish.


def test_publishing_is_one_commit(server, command, folder, files):
    arguments = ("publish", folder, "--namespace", "new")
    code, printed = command(*arguments, "--dry-run")
    assert (code, server.log) == (0, [])
    for name, data in files.items():
        assert f"new/{NAME}: {name} ({len(data):,} bytes)" in printed
    for _ in range(2):  # the second time changes nothing
        code, printed = command(*arguments)
        assert code == 0, printed
        assert f"published as {server.head(f'new/{NAME}')}" in printed
        assert "%|" not in printed  # no bars without a terminal
        commits = server.repositories[f"new/{NAME}"].commits
        assert len(commits) == 2  # the Hub's own first one, and ours
    assert commits[server.head(f"new/{NAME}")].keys() == {".gitattributes", *files}


def test_a_network_is_published_by_its_method(server, command):
    model = bkn_zoo.create_model("timm:test_resnet", 4).eval()
    images = torch.randn(2, 3, 64, 64)
    published = model.push_to_hub("owner/converted", private=True, label_names=list("abcd"))
    theirs = from_pretrained("owner/converted")
    model.save_pretrained("saved")
    with torch.inference_mode():
        assert torch.equal(from_pretrained("./saved")(images), theirs(images))
    assert (theirs.name, theirs.revision) == ("timm:test_resnet", published.commit)
    assert theirs.config.label_names == tuple("abcd")
    assert server.repositories["owner/converted"].private
    with pytest.raises(InputError, match="use owner/repo"):
        model.push_to_hub("no_owner")
    code, printed = command("publish", "saved", "--namespace", "owner")  # with its default card
    assert (code, f"owner/saved: published as {server.head('owner/saved')}" in printed) == (0, True)


def test_other_files_replace_the_old_ones(server, folder, assert_loads):
    """The same network in one file, over the one in shards."""
    first = server.head(REPOSITORY)
    from_pretrained(folder).save_pretrained("whole")
    server.faults = [Fault(f"POST /api/models/{REPOSITORY}/commit", times=99, status=500)]
    assert_refused("HubUnavailableError", [REPOSITORY, "500", "try again"], hub.push_to_hub, "whole", REPOSITORY)
    server.faults = []
    server.add(REPOSITORY, {"model_fp16/weights.safetensors": b"not ours, and not replaced"})
    second = hub.push_to_hub("whole", REPOSITORY).commit
    there = server.repositories[REPOSITORY].commits[second].keys()
    assert WEIGHTS.isdisjoint(there)
    assert {"model.safetensors", "model_fp16/weights.safetensors", "LICENSE"} <= there  # LICENSE is only on the Hub
    for name, commit in ((REPOSITORY, second), (f"{REPOSITORY}@v1", first)):
        assert_loads(name, commit)


def test_training_ends_on_the_hub_if_asked(server, command, tmp_path):
    """A network of two classes of small images, from files to the Hub."""
    tree = write_noise(tmp_path / "photos", dark=12, light=12)
    options = ("train", "--data", tree, "--model", "shallow_bkn", "--size", "8", "--epochs", "1")
    options += ("--gradient_batch", "8", "--validation", "0.3", "--device", "cpu", "--publish", "owner", "--private")
    code, printed = command(*options, "--name", "not=a-repository")
    assert (code, "'owner/not=a-repository' cannot be a repository" in printed) == (2, True)
    code, printed = command(*options, "--name", "photos")
    assert code == 0, printed
    first = from_pretrained("owner/photos").revision
    assert server.repositories["owner/photos"].private
    card = server.read("owner/photos", "README.md").decode()
    for words in ("# photos", "--publish owner", 'from_pretrained("owner/photos")', "serve --models owner/photos"):
        assert words in card
    local = Path("runs/photos/photos/README.md").read_text()
    assert local == card.replace('"owner/photos"', '"./runs/photos/photos"').replace("ls owner/", "ls ./runs/photos/")

    # The same name again, and a Hub that refuses at the end.
    server.faults = [Fault("POST /api/models/owner/photos/commit", status=403)]
    code, printed = command(*options, "--name", "photos", "--seed", "1", "--output", "again")
    assert (code, "saved to again/photos" in printed) == (1, True)
    assert "published as" in command("publish", "again/photos", "--namespace", "owner")[1]
    assert from_pretrained("owner/photos").revision != first


@pytest.mark.parametrize(
    "name", ["A_b.c-1", "_a", "a" * 96, "a" * 97, "a=b", "a b", "\u00e9t\u00e9", "-a", "a.", "a--b", "a.git", ""]
)
def test_name_is_refused_where_the_client_would_refuse_it(name):
    try:
        validate_repo_id(f"me/{name}")
    except HFValidationError:
        with pytest.raises(InputError, match="in a shell, --name sets the name"):
            hub.check_repository(f"me/{name}")
    else:
        hub.check_repository(f"me/{name}")


# Load.


def test_a_checkpoint_loads_by_id_tag_commit_and_short_name(server, tmp_path, monkeypatch, assert_loads):
    assert_loads(REPOSITORY)
    assert cached(tmp_path, NAME) == WEIGHTS | {"config.json"}
    server.log.clear()
    assert_loads(f"{REPOSITORY}@{TAG}")
    assert not [request for request in server.log if "/storage/" in request]
    server.log.clear()
    assert_loads(f"{REPOSITORY}@{server.head(REPOSITORY)}")
    assert server.log == []  # a commit cannot change
    monkeypatch.setenv("BKN_ZOO_NAMESPACE", "owner")
    assert from_pretrained(NAME, revision=TAG).revision == server.head(REPOSITORY)


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "", "HubAccessError", ["403", "HF_TOKEN"]),
        (403, "GatedRepo", "HubAccessError", ["approved users", "ask for access"]),
        (404, "RepoNotFound", "HubNotFoundError", [REPOSITORY, "correct the name"]),
        (404, "RevisionNotFound", "HubNotFoundError", ["correct the revision"]),
        (429, "", "HubUnavailableError", ["429", "try again later"]),
    ],
)
def test_every_refusal_of_the_hub_is_one_sentence(server, status, code, kind, words):
    server.faults = [Fault("/api/models/", times=99, status=status, headers={"X-Error-Code": code})]
    assert_refused(kind, words, from_pretrained, REPOSITORY)


def test_token_opens_private_repositories_bad_one_is_named(server, monkeypatch, assert_loads):
    server.repositories[REPOSITORY].private = True
    for token in ("hf_wrongwrongwrong", "hf_fünf"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert_refused("HubAccessError", ["valid token", "HF_TOKEN"], from_pretrained, REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", "")
    assert_refused("HubNotFoundError", [REPOSITORY, "HF_TOKEN"], from_pretrained, REPOSITORY)
    assert_refused("HubAccessError", ["valid token"], from_pretrained, REPOSITORY, token="not-like-a-token")
    assert_loads(REPOSITORY, token=TOKEN, cache_dir="elsewhere")
    assert [path.name for path in Path("elsewhere").glob("models--*")] == [f"models--owner--{NAME}"]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_refused("HubNotFoundError", [REPOSITORY], from_pretrained, REPOSITORY, token=False, cache_dir="other")
    assert_loads(REPOSITORY)


def test_without_the_hub_only_a_complete_cache_serves(server, tmp_path, monkeypatch, assert_loads):
    commit = server.head(REPOSITORY)
    server.faults = [Fault("GET /storage/", times=999, status=500)]
    assert_refused("HubUnavailableError", [REPOSITORY, "try again"], from_pretrained, REPOSITORY)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert_refused("HubUnavailableError", [REPOSITORY, "HF_HUB_OFFLINE"], from_pretrained, REPOSITORY)
    server.faults = []
    assert_loads(REPOSITORY)
    assert_loads(f"{REPOSITORY}@{TAG}")
    for lost in ({"HF_HUB_OFFLINE": True}, {"ENDPOINT": NOWHERE}):
        with monkeypatch.context() as patch:
            for name, value in lost.items():
                patch.setattr(constants, name, value)
            assert_loads(REPOSITORY, commit)
            assert_loads(f"{REPOSITORY}@{TAG}", commit)
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    words = ["owner/never-asked", "check the connection"]
    assert_refused("HubUnavailableError", words, from_pretrained, "owner/never-asked")
    words = ["'inception_cifar_bnk'", "check the connection"]
    assert_refused("UnknownNameError", words, from_pretrained, "inception_cifar_bnk")


def test_a_flipped_byte_is_refused_and_not_kept(server, folder, assert_loads):
    shard = "model-00002-of-00003.safetensors"
    server.faults = [Fault(f"GET /storage/{sha256(folder / shard)}", flip=9)]
    assert_refused("DamagedFileError", [f"{shard} of {REPOSITORY}"], from_pretrained, REPOSITORY)
    assert_loads(REPOSITORY)


def test_nothing_of_a_repository_is_executed(server, tmp_path, assert_loads):
    class Exploit:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    strange = {"pytorch_model.bin": pickle.dumps({"fc.weight": Exploit()})}
    strange |= dict.fromkeys(("hubconf.py", "modeling.py"), f"open({str(tmp_path / 'ran')!r}, 'w')".encode())
    server.add(REPOSITORY, strange)
    assert_loads(REPOSITORY)
    server.add(REPOSITORY, {}, remove=WEIGHTS)
    assert_refused("CheckpointError", ["no model.safetensors", "never loaded"], from_pretrained, REPOSITORY)
    assert strange.keys().isdisjoint(cached(tmp_path, NAME))
    assert not (tmp_path / "ran").exists()
    server.add(REPOSITORY, {}, remove=["config.json"])
    assert_refused("CheckpointError", [f"{REPOSITORY} has no config.json"], from_pretrained, REPOSITORY)


def test_the_examples_of_the_documents_run_as_written(server, folder):
    """Those that are marked as run here, in order and in one namespace per document."""
    marked = re.compile(r"^```python\n(# not run by the tests: test_hub\.py .*?)^```$", re.MULTILINE | re.DOTALL)
    hub.push_to_hub(folder, "your-name/my_network")
    server.repositories["your-name/my_network"].tags["v1"] = server.head("your-name/my_network")
    model = from_pretrained(folder)
    model.save_pretrained("my_network")  # as the guide has by then
    for document in ("guide.md", "hub.md"):
        blocks = marked.findall((Path(__file__).parent.parent / "docs" / document).read_text())
        assert blocks, document
        namespace = {"bkn_zoo": bkn_zoo, "model": model}
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(block, namespace)


# Names.


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere/at/all", "a/b/c", "../a/b", "-a/b"])
def test_paths_are_never_looked_up_on_the_hub(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "download", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(bkn_zoo.CheckpointError, match="there is no folder"):
        bkn_zoo.from_pretrained(name)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "repo").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert bkn_zoo.from_pretrained("owner/repo").revision is None


def test_ids_are_split_at_the_first_at_sign(monkeypatch):
    monkeypatch.setenv("BKN_ZOO_NAMESPACE", "")
    monkeypatch.setattr(locate, "download", lambda *asked: asked[:2])
    assert locate.locate("owner/repo")[1:] == ("owner/repo", None)
    assert locate.locate("owner/repo@refs/pr/1")[1:] == ("owner/repo", "refs/pr/1")
    assert locate.locate("some_network@v1")[1:] == (f"{locate.NAMESPACE}/some_network", "v1")
    assert locate.locate("owner/repo@v1", revision="v1")[1:] == ("owner/repo", "v1")
    assert locate.locate(ZOO_NAME, revision="v1")[1:] == (f"{locate.NAMESPACE}/{ZOO_NAME}", "v1")  # not the local one
    with pytest.raises(InputError, match="are two different revisions"):
        locate.locate("owner/repo@v1", revision="v2")
    with pytest.raises(InputError, match="is a folder and has no revision"):
        locate.locate("./folder", revision="v2")
    with pytest.raises(bkn_zoo.UnknownNameError, match="unknown checkpoint 'not a name'"):
        locate.locate("not a name")
