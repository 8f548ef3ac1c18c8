"""The Hub, through its unmodified client, over HTTP to a server on this machine: publish, load, and all that can fail.

One subprocess (hub_cases.py) does everything that needs the client online, and then what must work offline; the tests
read what came out.
"""

import errno
import io
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from huggingface_hub.errors import HFValidationError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from PIL import Image
from service_process import DIRECT, ServiceProcess
from shallow import shallow

import bkn_zoo
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.checkpoints import hub, locate
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.hub_client import ask
from bkn_zoo.errors import HubError, InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.models import registry
from bkn_zoo.publishing.publish import card_of

TOKEN = "hf_aVerySecretTokenOfTheTests"
NAME = "shallow_bkn.test"
ZOO_NAME = "inception_cifar_bkn.cifar10"
Result = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._networks, "shallow", shallow)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """A bundled checkpoint of three shards, with its card; of few layers, since it is loaded very often."""
    torch.manual_seed(0)
    model = bkn_zoo.create_model("shallow_bkn", num_classes=10).train()
    model.statistics_batch_size = 2
    model(torch.randn(4, 3, 32, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MAX_FILE_SIZE", 200_000)
        about = {"preprocessing": Preprocessing(32, (0.5,) * 3, (0.2,) * 3), "default_statistics": "expected"}
        bkn_zoo.save_pretrained(model.eval(), root / "bundled" / NAME, **about)
    (root / "bundled" / "results" / "runs").mkdir(parents=True)
    text = card_of(Config.read(root / "bundled" / NAME / "config.json"), NAME, root / "bundled" / "results")
    (root / "bundled" / NAME / "README.md").write_text(text)
    return root / "bundled" / NAME


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[HubServer]:
    (root / "server").mkdir()
    server = HubServer(root / "server", TOKEN, part_size=100_000)  # so that some shards are sent in parts, some whole
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def online(folder: Path, server: HubServer) -> Result:
    home = folder.parent.parent
    output = home / "found.json"
    environment = {
        k: v for k, v in os.environ.items() if k == "BKN_ZOO_CACHE" or not k.startswith(("HF_", "HUGGING", "BKN_"))
    }
    environment |= {
        "HF_ENDPOINT": server.endpoint, "HF_HOME": str(home / "home"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1", "BKN_ZOO_NAMESPACE": "somebody", "NO_PROXY": "*", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).parent / "hub_cases.py"), str(folder), str(output)]
    result = subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(output.read_text()) | {"printed": result.stdout + result.stderr}


@pytest.fixture(scope="module")
def offline(online: Result) -> Result:
    return online["offline"]


def assert_loaded(result: Result) -> None:
    """The bundled checkpoint's outputs, bit for bit, from a commit."""
    assert "error" not in result, result
    assert result["same"]
    assert not result["training"]
    assert len(result["revision"]) == 40


def assert_refused(result: Result, kind: str, *words: str) -> None:
    """One sentence of the expected kind that holds the words, and nothing of the client's behind it."""
    assert result.get("error") == kind, result
    for word in words:
        assert word in result["message"], result["message"]
    assert result["message"].endswith(".")
    assert "\n" not in result["message"]
    assert "huggingface_hub" not in result["traceback"]


def asked(result: Result, start: str) -> list[str]:
    return [request for request in result["requests"] if request.startswith(start)]


# Publish and load.


def test_a_dry_run_shows_what_would_change_and_changes_nothing(online: Result, folder: Path) -> None:
    dry = online["publishing"]["dry"]
    assert dry["exit"] == 0
    for path in folder.iterdir():
        assert f"owner/{NAME}: added {path.name} ({path.stat().st_size:,} bytes)" in dry["output"]
    assert [request for request in dry["requests"] if not request.startswith(("GET", "HEAD"))] == []


def test_publishing_is_one_commit_with_a_tag_if_asked_verified_by_downloading(
    online: Result, server: HubServer, folder: Path
) -> None:
    first = online["publishing"]["first"]
    assert first["exit"] == 0
    assert len(asked(first, f"POST /api/models/owner/{NAME}/commit/main")) == 1
    commit = server.repositories[f"owner/{NAME}"].tags[f"v{bkn_zoo.__version__}"]
    assert f"v{bkn_zoo.__version__} is {commit}, verified" in first["output"]
    repository = server.repositories[f"owner/{NAME}"]
    assert set(repository.commits[commit]) == {".gitattributes", *(path.name for path in folder.iterdir())}
    assert asked(first, "PUT /part/")  # large shards go in parts,
    assert asked(first, "PUT /upload/")  # small ones whole
    assert asked(first, "GET /storage/")


def test_a_folder_of_save_pretrained_is_published_with_its_short_card(online: Result, server: HubServer) -> None:
    assert online["publishing"]["plain"]["exit"] == 0, online["publishing"]["plain"]
    repository = server.repositories["owner/saved"]
    assert f"owner/saved: main is {repository.branches['main']}, verified" in online["publishing"]["plain"]["output"]
    assert repository.tags == {}


def test_publishing_twice_changes_nothing(online: Result, server: HubServer) -> None:
    second = online["publishing"]["second"]
    assert second["exit"] == 0
    assert "nothing to change" in second["output"]
    assert not asked(second, "PUT")
    assert not asked(second, f"POST /api/models/owner/{NAME}/")
    assert len(server.repositories[f"owner/{NAME}"].commits) == 2  # the Hub's own first one, and ours


def test_a_checkpoint_is_loaded_by_id_tag_commit_and_short_name_bit_for_bit(
    online: Result, server: HubServer, folder: Path
) -> None:
    loading = online["loading"]
    for way in ("id", "tag", "commit", "short", "revision"):
        assert_loaded(loading[way])
        assert loading[way]["revision"] == server.repositories[f"owner/{NAME}"].branches["main"]
    assert loading["local"]["revision"] is None


def test_a_trained_checkpoint_answers_from_the_hub_as_from_this_tree(online: Result) -> None:
    result = online["of_the_zoo"]
    assert result.get("exit") == 0, result
    assert "verified by downloading it" in result["output"]
    assert result["same"]
    local, commit = result["revisions"]
    assert local is None
    assert len(commit) == 40


def test_a_converted_network_goes_to_the_hub_and_back(online: Result) -> None:
    pytest.importorskip("timm")
    result = online["converted"]
    assert "error" not in result, result
    assert result["same"]
    assert result["architecture"] == "timm:test_resnet"
    downloaded, pushed = result["revisions"]
    assert downloaded == pushed


def test_only_config_and_weights_are_downloaded_and_only_once(online: Result, folder: Path) -> None:
    needed = {path.name for path in folder.glob("model*")} | {"config.json"}
    assert set(online["loading"]["files"]) == needed
    assert len(asked(online["loading"]["id"], "GET /storage/")) == len(needed) - 2  # without config and index
    assert not asked(online["loading"]["tag"], "GET /storage/")
    assert asked(online["loading"]["commit"], "") == []  # a commit cannot change: nothing is asked


def test_a_cached_checkpoint_loads_offline_and_what_is_not_cached_says_so(offline: Result) -> None:
    assert_loaded(offline["main"])
    assert_loaded(offline["tag"])
    assert_refused(offline["unknown"], "HubUnavailableError", "owner/never-asked", "HF_HUB_OFFLINE", "unset it")
    assert offline["unknown"]["waits"] == []


def test_without_a_connection_the_cache_serves_and_all_else_is_refused_at_once(online: Result) -> None:
    gone = online["server_gone"]
    assert_loaded(gone["cached"])
    assert_refused(gone["not cached"], "HubUnavailableError", "owner/never-asked", "check the connection")
    assert_refused(gone["misspelt"], "UnknownNameError", "'inception_cifar_bnk'", "check the connection")
    assert "UnknownNameError" not in gone["misspelt"]["message"]


def test_strangers_files_in_folders_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def list_repo_tree(self, repository: str, recursive: bool = False) -> list[RepoFile]:
            names = ["model-old.safetensors", "notes.txt"] + ["model_fp16/weights.safetensors"] * recursive
            return [RepoFile(path=name, size=1, oid="0" * 40) for name in names]

    monkeypatch.setattr(hub, "_api", Api)
    found = hub.changes(folder, "owner/name")
    assert [change.file for change in found if change.kind == "removed"] == ["model-old.safetensors"]


def test_publishing_in_other_files_removes_the_old_ones_in_the_same_commit(online: Result, folder: Path) -> None:
    replacing = online["replacing"]
    kinds = replacing["changes"]
    assert kinds["model.safetensors"] == "added"
    assert kinds["config.json"] == "changed"
    assert {file for file, kind in kinds.items() if kind == "removed"} == {path.name for path in folder.glob("model*")}
    assert_loaded(replacing["now"])
    assert_loaded(replacing["old"])
    assert (replacing["now"]["revision"], replacing["old"]["revision"]) == (replacing["second"], replacing["first"])


@pytest.mark.parametrize(
    "name", ["a", "A_b.c-1", "_a", "net.photos-lr_0.02", "a" * 96, "a" * 97, "a=b", "a b", "\u00e9t\u00e9", "-a", "a-",
    "a.", "a--b", "a..b", "a.git", ""],
)  # fmt: skip
def test_a_repository_s_name_is_refused_before_the_training_where_the_hub_s_client_would_after(name: str) -> None:
    try:
        validate_repo_id(f"me/{name}")
    except HFValidationError:
        with pytest.raises(InputError, match="the name in a command by --name"):
            hub.check_repository(f"me/{name}")
    else:
        hub.check_repository(f"me/{name}")


def test_training_ends_on_the_hub_if_asked_and_refuses_an_impossible_name_before_it_starts(
    online: Result, server: HubServer
) -> None:
    training = online["training"]
    assert training["refused"]["exit"] == 2
    assert "'owner/not=a-repository' cannot be a repository" in online["printed"]
    assert training["done"]["exit"] == 0, training["done"]
    repository = server.repositories["owner/photos"]
    first = training["revision"]["is"]
    card = (server.root / repository.commits[first]["README.md"].etag).read_text()
    assert repository.private
    assert "# photos" in card
    assert "--publish owner" in card


def test_a_second_training_under_a_name_is_published_too_by_the_command_that_it_prints_where_the_hub_refuses(
    online: Result, server: HubServer
) -> None:
    training, repository = online["training"], server.repositories["owner/photos"]
    assert training["failed"]["exit"] == 1
    assert "--results elsewhere --private" in training["said"]
    assert training["remedy"]["exit"] == 0, training
    assert f"owner/photos: main is {repository.branches['main']}, verified" in training["remedy"]["output"]
    assert (len(repository.commits), repository.tags) == (3, {})  # the Hub's own first one, and two of ours
    assert repository.branches["main"] != training["revision"]["is"]


def test_a_run_is_published_under_another_name_with_its_own_card(online: Result, server: HubServer) -> None:
    assert online["training"]["other"]["exit"] == 0, online["training"]["other"]
    repository = server.repositories["owner/pictures"]
    first = server.repositories["owner/photos"].commits[online["training"]["revision"]["is"]]
    assert repository.commits[repository.branches["main"]]["README.md"] == first["README.md"]


def test_a_tag_stays_where_it_is(online: Result, server: HubServer) -> None:
    replacing = online["replacing"]
    assert_refused(replacing["taken"], "HubError", "tag v1", "choose another")
    assert server.repositories["owner/replaced"].tags == {"v1": replacing["first"], "v2": replacing["second"]}
    assert_refused(replacing["both"], "InputError", "pull request cannot be tagged")


def test_a_pull_request_leaves_the_main_branch_alone(online: Result) -> None:
    replacing = online["replacing"]
    assert replacing["request"].endswith("/owner/replaced/discussions/1")
    assert replacing["untouched"]["revision"] == replacing["first"]
    assert_loaded(replacing["proposed"])


def test_what_arrives_otherwise_than_it_was_sent_is_noticed(online: Result) -> None:
    assert_refused(online["replacing"]["unverified"], "DamagedFileError", "is not what was sent")


def test_the_documents_examples_for_the_hub_run_as_written(online: Result) -> None:
    assert "error" not in online["documents"], online["documents"]
    assert online["documents"]["counts"] == {"docs/guide.md": 1, "docs/hub.md": 2}


# Faults.


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ("401", "HubAccessError", ["401", "HF_TOKEN"]),
        ("403", "HubAccessError", ["403", "ask the repository's owner"]),
        ("404", "HubNotFoundError", ["owner/status-404", "correct the name"]),
        ("429", "HubUnavailableError", ["429", "try again in some minutes"]),
        ("500", "HubUnavailableError", ["500", "try again later"]),
        ("429 for an hour", "HubUnavailableError", ["try again in 3600 seconds"]),
        ("gated", "HubAccessError", ["approved users", "ask for access"]),
        ("no repository", "HubNotFoundError", ["owner/nothing-here", "correct the name"]),
        ("no revision", "HubNotFoundError", [f"owner/{NAME}@nowhere", "correct the revision"]),
        ("short", "UnknownNameError", ["unknown checkpoint 'nothing-here'", "somebody/nothing-here"]),
    ],
)
def test_every_refusal_of_the_hub_is_one_sentence_with_the_remedy(
    online: Result, status: str, kind: str, words: list[str]
) -> None:
    assert_refused(online["statuses"][status], kind, *words)


def test_busy_and_failing_hubs_are_asked_again_with_back_off_and_others_are_not(online: Result) -> None:
    statuses = online["statuses"]
    assert statuses["429"]["waits"] == statuses["500"]["waits"] == [1, 2]
    assert statuses["401"]["waits"] == statuses["403"]["waits"] == statuses["404"]["waits"] == []
    assert statuses["429 for an hour"]["waits"] == []
    assert_loaded(statuses["429 once"])
    assert statuses["429 once"]["waits"] == [7]  # as Retry-After asks
    assert_loaded(statuses["503 twice"])
    assert statuses["503 twice"]["waits"] == [1, 2]


def test_a_shard_that_is_cut_off_is_resumed(online: Result) -> None:
    once = online["connection_cut"]["once"]
    assert_loaded(once)
    assert [request for request in once["requests"] if request.endswith("bytes=1000-")]


def test_a_half_downloaded_checkpoint_is_never_loaded(online: Result, offline: Result, folder: Path) -> None:
    cut = online["connection_cut"]
    assert_refused(cut["always"], "HubUnavailableError", "owner/half", "stopped half-way", "try again")
    assert "config.json" in cut["half"]
    assert len(cut["half"]) < len(list(folder.glob("model*"))) + 1
    assert_refused(offline["half"], "HubUnavailableError", "owner/half", "not all of it")


@pytest.mark.parametrize("part", ["header", "tensor"])
def test_a_flipped_byte_is_refused_with_the_files_name_and_not_kept(online: Result, part: str) -> None:
    flipped = online["flipped_byte"][part]
    assert_refused(flipped["refused"], "DamagedFileError", f"model-00002-of-00003.safetensors of owner/flip-{part}")
    assert_loaded(flipped["again"])


def test_all_files_are_of_one_commit_even_if_the_revision_moves(online: Result) -> None:
    moving = online["moving_revision"]
    first, second, third = moving["commits"]
    assert len({first, second, third}) == 3
    for result, commit in (("moved", second), ("pinned", second), ("now", third)):
        assert_loaded(moving[result])
        assert moving[result]["revision"] == commit


def test_an_unknown_network_or_a_newer_format_is_refused_before_its_weights_are_downloaded(online: Result) -> None:
    odd = online["odd_repositories"]
    assert_refused(odd["unknown"], "CheckpointError", "config.json", "no network 'vgg_bkn'")
    assert_refused(odd["newer"], "CheckpointError", "config.json", "format_version is 99", "upgrade bkn_zoo")
    assert_refused(odd["bare"], "CheckpointError", "owner/bare holds no config.json")
    assert odd["unknown"]["files"] == odd["newer"]["files"] == ["config.json"]


def test_a_full_disk_is_named_and_leaves_nothing_broken(online: Result, root: Path) -> None:
    assert_refused(online["full_disk"]["full"], "HubError", "no room for owner/large", str(root / "home"), "HF_HOME")
    assert online["full_disk"]["full"]["waits"] == []
    assert_loaded(online["full_disk"]["again"])


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no room"), (errno.EDQUOT, "no room"), (errno.EACCES, "cannot be stored")]
)
def test_what_the_disk_refuses_is_told_from_what_the_hub_refuses(number: int, words: str) -> None:
    def full() -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(HubError, match=f"{words}.*HF_HOME"):
        ask("owner/repo", full)


def test_two_processes_can_download_at_once(online: Result) -> None:
    assert online["two_at_once"]["exits"] == [0, 0]


def test_a_killed_upload_is_invisible_and_repeating_it_sends_only_the_rest(online: Result, folder: Path) -> None:
    uploads = online["interrupted_uploads"]
    assert uploads["signal"] == 9
    assert_refused(uploads["visible"], "CheckpointError", "holds no config.json")
    files = len(list(folder.iterdir()))
    assert uploads["repeated"]["changes"] == files
    sent = {request.split("/")[2].split()[0] for request in asked(uploads["repeated"], "PUT")}
    assert len(sent) < len(list(folder.glob("*.safetensors")))
    assert_loaded(uploads["loaded"])


def test_an_upload_that_fails_or_is_cut_off_can_be_repeated(online: Result) -> None:
    uploads = online["interrupted_uploads"]
    assert_refused(uploads["failed"], "HubUnavailableError", "500", "owner/failing", "try again")
    assert_refused(uploads["conflict"], "HubError", "changed by someone else", "412")
    assert "error" not in uploads["cut"]
    assert_loaded(uploads["after"])


# Security.


def test_nothing_of_a_repository_is_executed_or_unpickled(online: Result) -> None:
    odd = online["odd_repositories"]
    assert_refused(odd["pickles"], "CheckpointError", "owner/pickles", "pytorch_model.bin, a pickle", "never loaded")
    assert_loaded(odd["code"])
    for name in ("pickles", "code"):
        assert not {"pytorch_model.bin", "modeling.py", "hubconf.py"} & set(odd[name]["files"])
    assert odd["ran"] is False


def test_file_names_of_a_repository_cannot_leave_the_folder(online: Result) -> None:
    odd = online["odd_repositories"]
    assert_refused(odd["escape"], "CheckpointError", "'../../../outside.safetensors'", "not a file of weights")
    assert_refused(odd["path"], "HubError", "owner/path", "'..'")
    assert odd["outside"] == []


def test_a_token_opens_private_repositories_and_a_bad_one_is_named_without_showing_it(online: Result) -> None:
    tokens = online["tokens"]
    assert tokens["who"] == {"name": "owner"}
    assert_loaded(tokens["right"])
    assert_loaded(tokens["passed"])
    assert tokens["elsewhere"] == ["models--owner--secret"]
    assert_refused(tokens["passed wrong"], "HubAccessError", "valid token")
    assert_refused(tokens["withheld"], "HubNotFoundError", "owner/secret")
    assert_refused(tokens["wrong"], "HubAccessError", "valid token", "HF_TOKEN")
    assert_refused(tokens["illegal"], "HubAccessError", "valid token", "HF_TOKEN")
    assert_refused(tokens["foreign"], "HubAccessError", "characters", "HF_TOKEN")
    assert_refused(tokens["none"], "HubNotFoundError", "owner/secret", "HF_TOKEN")
    assert_refused(tokens["push without"], "HubAccessError", "owner/other", "HF_TOKEN")


def test_a_token_never_appears_in_errors_or_logs_and_never_leaves_the_hub(online: Result, server: HubServer) -> None:
    """Though the client logs every request in full here (HF_DEBUG)."""
    assert any(request.endswith("+token") for request in server.log)
    assert "/resolve/" in online["printed"]
    everything = json.dumps(online)
    for secret in (TOKEN, "hf_wrongwrongwrong", "hf_illegal", "fünf", "f\\u00fcnf", "not-like-a-token"):
        assert secret not in everything
    storage = [request for request in server.log if request.split()[1].startswith(("/storage", "/upload", "/part"))]
    assert storage
    assert not [request for request in storage if "+token" in request]


# Names.


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere/at/all", "a/b/c", "../a/b", "-a/b"])
def test_what_looks_like_a_path_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "download", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(bkn_zoo.CheckpointError, match="there is no folder"):
        bkn_zoo.from_pretrained(name)


def test_an_existing_folder_goes_before_an_id_on_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "repo").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert bkn_zoo.from_pretrained("owner/repo").revision is None


def test_ids_are_split_at_the_first_at_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKN_ZOO_NAMESPACE", "")
    monkeypatch.setattr(locate, "download", lambda *asked: asked[:2])
    assert locate.locate("owner/repo")[1:] == ("owner/repo", None)
    assert locate.locate("owner/repo@refs/pr/1")[1:] == ("owner/repo", "refs/pr/1")
    assert locate.locate("some_network@v1")[1:] == (f"{locate.NAMESPACE}/some_network", "v1")
    assert locate.locate("owner/repo@v1", revision="v1")[1:] == ("owner/repo", "v1")
    assert locate.locate(ZOO_NAME, revision="v1")[1:] == (f"{locate.NAMESPACE}/{ZOO_NAME}", "v1")  # not the local one
    with pytest.raises(InputError, match="name two revisions"):
        locate.locate("owner/repo@v1", revision="v2")
    with pytest.raises(InputError, match="is a folder, which has no revision"):
        locate.locate("./folder", revision="v2")
    with pytest.raises(bkn_zoo.UnknownNameError, match="unknown checkpoint 'not a name'"):
        locate.locate("not a name")
    with pytest.raises(bkn_zoo.InputError, match="as in owner/repo"):
        hub.push_to_hub("folder", "no_owner")


def test_importing_the_package_does_not_import_the_client(online: Result) -> None:
    assert online["client_was_imported"] is False


# The classifier and the service.


def test_the_service_answers_from_a_repository_as_from_the_folder_and_then_offline(tmp_path: Path) -> None:
    """Bit for bit, of a trained checkpoint: scores travel as JSON, which keeps every digit of a float."""
    folder = Path(__file__).parent.parent / "checkpoints" / ZOO_NAME
    photo = io.BytesIO()
    Image.radial_gradient("L").save(photo, "PNG")
    (tmp_path / "server").mkdir()
    server = HubServer(tmp_path / "server", TOKEN)
    server.create(f"owner/{ZOO_NAME}")
    commit = server.add(f"owner/{ZOO_NAME}", {path.name: path.read_bytes() for path in folder.iterdir()})
    server.repositories[f"owner/{ZOO_NAME}"].tags["v1"] = commit
    name = f"owner/{ZOO_NAME}@v1"
    wanted = bkn_zoo.Classifier.from_pretrained(folder, engine="torch")(photo.getvalue(), top_k=10)
    flags = ("--models", name, "--engine", "torch")
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "NO_PROXY": "*"}
    for more in ({"HF_ENDPOINT": server.endpoint}, {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}):
        with ServiceProcess(tmp_path, *flags, environment=variables | more, ready_within=180) as process:
            request = urllib.request.Request(f"{process.url}/v1/classify?top_k=10", photo.getvalue())
            with DIRECT.open(request, timeout=60) as response:
                answer = json.load(response)
            assert TOKEN not in process.log()
        server.shutdown()
        assert (answer["model"], answer["revision"]) == (name, commit)
        assert answer["predictions"] == [{"label": p.label, "score": p.score} for p in wanted.predictions]
