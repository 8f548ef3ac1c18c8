"""The Hub, played by a fake of the functions of huggingface_hub that are used: publish, load, and failures."""

import contextlib
import errno
import hashlib
import inspect
import io
import json
import pickle
import re
import sys
import traceback
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from huggingface_hub import HfApi, errors, snapshot_download
from huggingface_hub.utils import validate_repo_id
from image_trees import write_noise
from shallow import shallow

import bkn_zoo
import bkn_zoo.cli
from bkn_zoo import from_pretrained
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.checkpoints import hub, locate
from bkn_zoo.checkpoints.card import checkpoint_card
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.errors import BknZooError, InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.models import registry

NAME, ZOO_NAME = "shallow_bkn.test", "inception_cifar_bkn.cifar10"
REPOSITORY, SECRET = f"owner/{NAME}", "hf_aVerySecretTokenOfTheTests"
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


def http_error(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", f"https://huggingface.co/?token={SECRET}"))
    return kind(f"refused {SECRET}", response=response)


class FakeHub:
    """Repositories as commits, each with its files; `error` is raised by the next request."""

    def __init__(self, cache):
        self.cache, self.commits, self.tags, self.private = cache, {}, {}, {}
        self.asked, self.error = [], None

    def request(self, name, **options):
        self.asked.append((name, options))
        error, self.error = self.error, None
        if error is not None:
            raise error

    def head(self, repository):
        return list(self.commits[repository])[-1]

    def add(self, repository, files, remove=()):
        """A new commit, unless it has the files of the last one."""
        commits = self.commits.setdefault(repository, {})
        before = list(commits.values())[-1] if commits else {}
        files = {name: data for name, data in before.items() if name not in remove} | files
        if files != before:
            commits[hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()] = files
        return self.head(repository)

    def snapshot_download(self, repository, revision, token, cache_dir, allow_patterns, **_):
        self.request("download", token=token)
        if repository not in self.commits:
            raise http_error(errors.RepositoryNotFoundError, 404)
        commit = self.tags.get(revision, revision) or self.head(repository)
        if commit not in self.commits[repository]:
            raise http_error(errors.RevisionNotFoundError, 404)
        folder = (cache_dir or self.cache) / repository / commit
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.commits[repository][commit].items():
            if any(fnmatch(name, pattern) for pattern in allow_patterns) and not (folder / name).exists():
                (folder / name).write_bytes(data)
        return str(folder)

    def repo_info(self, repository, timeout):
        self.request("info")

    def create_repo(self, repository, private, exist_ok):
        self.private.setdefault(repository, private)

    def upload_folder(self, repo_id, folder_path, allow_patterns, delete_patterns, commit_message):
        self.request("upload")
        there = self.commits.get(repo_id, {None: {}})
        old = [name for name in list(there.values())[-1] if any(fnmatch(name, each) for each in delete_patterns)]
        files = {name: (folder_path / name).read_bytes() for name in allow_patterns}
        commit = self.add(repo_id, files, set(old) - files.keys())
        return SimpleNamespace(oid=commit, commit_url=f"https://huggingface.co/{repo_id}/commit/{commit}")


METHODS = ("repo_info", "create_repo", "upload_folder")


def with_signature_of(real, fake, bound=True):
    """The fake of a function, which refuses arguments that the real one does not have."""

    def call(*args, **options):
        inspect.signature(real).bind(*([None] if bound else []), *args, **options)
        return fake(*args, **options)

    return call


@pytest.fixture
def server(folder, tmp_path, monkeypatch):
    """The Hub with one checkpoint, for a client with an empty cache."""
    fake = FakeHub(tmp_path / "cache")
    fake.tags["v1"] = fake.add(REPOSITORY, {path.name: path.read_bytes() for path in folder.iterdir()})
    methods = {name: with_signature_of(getattr(HfApi, name), getattr(fake, name)) for name in METHODS}
    api = with_signature_of(HfApi.__init__, lambda *_, **__: SimpleNamespace(**methods))
    downloaded = with_signature_of(snapshot_download, fake.snapshot_download, bound=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    monkeypatch.setattr("huggingface_hub.HfApi", api)
    monkeypatch.setenv("BKN_ZOO_NAMESPACE", "somebody")
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def assert_loads(server, folder):
    """Load a checkpoint, which has the expected outputs, bit for bit, and is of a certain commit."""
    expected = from_pretrained(folder)

    def check(name, revision=None, **options):
        model = from_pretrained(name, **options)
        with torch.inference_mode():
            assert torch.equal(model(IMAGES), expected(IMAGES))
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
    assert SECRET not in trace


@pytest.fixture
def command(capfd, monkeypatch):
    """The exit code of `bkn-zoo`, and everything that it prints."""

    def run(*arguments):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["bkn-zoo", *map(str, arguments)])  # which model cards quote
        code = bkn_zoo.cli.main()
        return code, "".join(capfd.readouterr())

    return run


def test_publishing_is_one_commit(server, command, folder):
    arguments = ("publish", folder, "--namespace", "new")
    code, printed = command(*arguments, "--dry-run")
    assert (code, server.asked) == (0, [])
    for path in folder.iterdir():
        assert f"new/{NAME}: {path.name} ({path.stat().st_size:,} bytes)" in printed
    code, printed = command(*arguments)
    assert (code, f"published as {server.head(f'new/{NAME}')}" in printed) == (0, True)
    (files,) = server.commits[f"new/{NAME}"].values()
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_network_is_published_by_its_method(server, command):
    model = bkn_zoo.create_model("timm:test_resnet", 4).eval()
    published = model.push_to_hub("owner/converted", private=True, label_names=list("abcd"))
    theirs = from_pretrained("owner/converted")
    assert (theirs.name, theirs.revision) == ("timm:test_resnet", published.commit)
    assert theirs.config.label_names == tuple("abcd")
    assert server.private["owner/converted"]
    with pytest.raises(InputError, match="use owner/repo"):
        model.push_to_hub("no_owner")


def test_other_files_replace_the_old_ones(server, folder, assert_loads):
    """The same network in one file, over the one in shards."""
    first, extra = server.head(REPOSITORY), "model_fp16/weights.safetensors"
    from_pretrained(folder).save_pretrained("whole")
    server.add(REPOSITORY, {extra: b"not ours, and not replaced"})
    second = hub.push_to_hub("whole", REPOSITORY).commit
    there = server.commits[REPOSITORY][second].keys()
    assert WEIGHTS.isdisjoint(there)
    assert {"model.safetensors", extra, "LICENSE"} <= there  # LICENSE is only on the Hub
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
    assert server.private["owner/photos"]
    card = server.commits["owner/photos"][first]["README.md"].decode()
    for words in ("# photos", "--publish owner", 'from_pretrained("owner/photos")', "serve --models owner/photos"):
        assert words in card
    local = Path("runs/photos/photos/README.md").read_text()
    assert local == card.replace('"owner/photos"', '"./runs/photos/photos"').replace("ls owner/", "ls ./runs/photos/")


def test_failed_publication_can_be_repeated(server, command, folder, monkeypatch, tmp_path):
    tree = write_noise(tmp_path / "photos", dark=12, light=12)
    options = ("--model", "shallow_bkn", "--size", "8", "--epochs", "1", "--gradient_batch", "8", "--device", "cpu")
    monkeypatch.setattr("bkn_zoo.cli.train.check_reachable", lambda repository: None)
    server.error = http_error(errors.HfHubHTTPError, 403)
    code, printed = command("train", "--data", tree, *options, "--publish", "owner", "--private", "--name", "photos")
    assert (code, "saved to runs/photos/photos" in printed) == (1, True)
    assert "published as" in command("publish", "runs/photos/photos", "--namespace", "owner")[1]


@pytest.mark.parametrize("name", ["A_b.c-1", "_a", "a" * 96, "a" * 97, "a=b", "\u00e9t\u00e9", "-a", "a--b", "a.git"])
def test_name_is_refused_where_the_client_would_refuse_it(name):
    try:
        validate_repo_id(f"me/{name}")
    except errors.HFValidationError:
        with pytest.raises(InputError, match="in a shell, --name sets the name"):
            hub.check_repository(f"me/{name}")
    else:
        hub.check_repository(f"me/{name}")


def test_a_checkpoint_loads_by_id_tag_commit_and_short_name(server, tmp_path, monkeypatch, assert_loads):
    assert_loads(REPOSITORY, token=SECRET, cache_dir="elsewhere")
    assert server.asked == [("download", {"token": SECRET})] * 2
    (commit,) = Path("elsewhere", REPOSITORY).iterdir()
    assert {path.name for path in commit.iterdir()} == WEIGHTS | {"config.json"}
    assert_loads(f"{REPOSITORY}@v1")
    assert_loads(f"{REPOSITORY}@{server.head(REPOSITORY)}")
    monkeypatch.setenv("BKN_ZOO_NAMESPACE", "owner")
    assert from_pretrained(NAME, revision="v1").revision == server.head(REPOSITORY)


def not_in_the_cache(cause):
    error = errors.LocalEntryNotFoundError("not in the cache")
    error.__cause__ = cause
    return error


FAILURES = [
    (http_error(errors.GatedRepoError, 403), "HubAccessError", ["approved users", "ask for access"]),
    (http_error(errors.RepositoryNotFoundError, 404), "HubNotFoundError", [REPOSITORY, "correct the name"]),
    (http_error(errors.RevisionNotFoundError, 404), "HubNotFoundError", ["correct the revision"]),
    (http_error(errors.HfHubHTTPError, 401), "HubAccessError", ["401", "HF_TOKEN"]),
    (not_in_the_cache(http_error(errors.HfHubHTTPError, 403)), "HubAccessError", ["403", "HF_TOKEN"]),
    (UnicodeEncodeError("ascii", SECRET, 0, 1, "no"), "HubAccessError", ["valid token"]),
    (not_in_the_cache(http_error(errors.HfHubHTTPError, 429)), "HubUnavailableError", ["429", "try again later"]),
    (not_in_the_cache(errors.OfflineModeIsEnabled(SECRET)), "HubUnavailableError", ["HF_HUB_OFFLINE"]),
    (errors.HTTPError(SECRET), "HubUnavailableError", ["check the connection"]),
    (OSError(errno.ENOSPC, "No space left on device"), "HubError", ["No space left", "HF_HOME"]),
]


@pytest.mark.parametrize(("error", "kind", "words"), FAILURES)
def test_every_refusal_of_the_hub_is_one_sentence(server, error, kind, words):
    server.error = error
    assert_refused(kind, words, from_pretrained, REPOSITORY)
    server.error = error
    assert_refused("UnknownNameError", ["unknown checkpoint 'none'", "on the Hub: "], from_pretrained, "none")


def test_a_flipped_byte_is_refused_and_not_kept(server, assert_loads):
    shard = "model-00002-of-00003.safetensors"
    files = server.commits[REPOSITORY][server.head(REPOSITORY)]
    whole = files[shard]
    files[shard] = whole[:-1] + bytes([whole[-1] ^ 1])
    assert_refused("DamagedFileError", [f"{shard} of {REPOSITORY}"], from_pretrained, REPOSITORY)
    files[shard] = whole
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
    assert strange.keys().isdisjoint(path.name for path in tmp_path.rglob("*"))
    assert not (tmp_path / "ran").exists()
    server.add(REPOSITORY, {}, remove=["config.json"])
    assert_refused("CheckpointError", [f"{REPOSITORY} has no config.json"], from_pretrained, REPOSITORY)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format_version", 2, ["format_version is 2", "upgrade bkn_zoo"]),
        ("architecture", "future_bkn", [f"{REPOSITORY} is a future_bkn", "upgrade bkn_zoo"]),
    ],
)
def test_unusable_config_is_refused_before_the_weights(server, folder, field, value, words):
    config = json.loads((folder / "config.json").read_text()) | {field: value}
    commit = server.add(REPOSITORY, {"config.json": json.dumps(config).encode()})
    assert_refused("CheckpointError", words, from_pretrained, REPOSITORY)
    assert [path.name for path in (server.cache / REPOSITORY / commit).iterdir()] == ["config.json"]


def test_the_examples_of_the_documents_run_as_written(server, folder):
    """Those that are marked as run here, in order and in one namespace per document."""
    marked = re.compile(r"^```python\n(# not run by the tests: test_hub\.py .*?)^```$", re.MULTILINE | re.DOTALL)
    server.tags["v1"] = hub.push_to_hub(folder, "your-name/my_network").commit
    model = from_pretrained(folder)
    model.save_pretrained("my_network")  # as the guide has by then
    for document in ("guide.md", "hub.md"):
        blocks = marked.findall((Path(__file__).parent.parent / "docs" / document).read_text())
        assert blocks, document
        namespace = {"bkn_zoo": bkn_zoo, "model": model}
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(block, namespace)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere/at/all", "a/b/c", "../a/b", "-a/b"])
def test_paths_are_never_looked_up_on_the_hub(name, folder, server):
    with pytest.raises(bkn_zoo.CheckpointError, match="there is no folder"):
        bkn_zoo.from_pretrained(name)
    Path("owner").mkdir()
    Path("owner", "repo").symlink_to(folder)
    assert bkn_zoo.from_pretrained("owner/repo").revision is None
    assert server.asked == []


def test_ids_are_split_at_the_first_at_sign(monkeypatch):
    monkeypatch.setenv("BKN_ZOO_NAMESPACE", "")
    monkeypatch.setattr(locate, "download", lambda *asked: asked[:2])
    assert locate.locate("owner/repo")[1:] == ("owner/repo", None)
    assert locate.locate("owner/repo@refs/pr/1")[1:] == ("owner/repo", "refs/pr/1")
    assert locate.locate("some_network@v1")[1:] == (f"{locate.NAMESPACE}/some_network", "v1")
    assert locate.locate(ZOO_NAME, revision="v1")[1:] == (f"{locate.NAMESPACE}/{ZOO_NAME}", "v1")  # not the local one
    with pytest.raises(InputError, match="are two different revisions"):
        locate.locate("owner/repo@v1", revision="v2")
    with pytest.raises(InputError, match="is a folder and has no revision"):
        locate.locate("./folder", revision="v2")
    with pytest.raises(bkn_zoo.UnknownNameError, match="unknown checkpoint 'not a name'"):
        locate.locate("not a name")
