"""The Hub, through its unmodified client, over HTTP to a server on this machine: publish, load, and all that can fail.

One subprocess (hub_cases.py) does everything that needs the client online, and then what must work offline.
"""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from PIL import Image
from service_process import ServiceProcess
from shallow import shallow

import bkn_zoo
from bkn_zoo.checkpoints import folder as checkpoints
from bkn_zoo.checkpoints import hub, locate
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.errors import InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.models import registry
from bkn_zoo.publishing.publish import card_of

TOKEN = "hf_aVerySecretTokenOfTheTests"
NAME = "shallow_bkn.test"
ZOO_NAME = "inception_cifar_bkn.cifar10"
CASES = Path(__file__).parent / "hub_cases.py"


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._networks, "shallow", shallow)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def folder(root):
    """A bundled checkpoint of three shards, with its card; of few layers, since it is loaded very often."""
    torch.manual_seed(0)
    model = bkn_zoo.create_model("shallow_bkn", num_classes=10).train()
    model.statistics_batch_size = 2
    model(torch.randn(4, 3, 32, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "MAX_FILE_SIZE", 200_000)
        about = {"preprocessing": Preprocessing(32, (0.5,) * 3, (0.2,) * 3), "default_statistics": "expected"}
        bkn_zoo.save_pretrained(model.eval(), root / "bundled" / NAME, **about, license_text="Apache License\n")
    (root / "bundled" / "results" / "runs").mkdir(parents=True)
    text = card_of(Config.read(root / "bundled" / NAME / "config.json"), NAME, root / "bundled" / "results")
    (root / "bundled" / NAME / "README.md").write_text(text)
    return root / "bundled" / NAME


@pytest.fixture(scope="module")
def server(root):
    (root / "server").mkdir()
    server = HubServer(root / "server", TOKEN)
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def online(folder, server):
    """What hub_cases.py found."""
    home = folder.parent.parent
    output = home / "found.json"
    kept = {k: v for k, v in os.environ.items() if k == "BKN_ZOO_CACHE" or not k.startswith(("HF_", "HUGGING", "BKN_"))}
    environment = kept | {
        "HF_ENDPOINT": server.endpoint, "HF_HOME": str(home / "home"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
        "HF_DEBUG": "1", "BKN_ZOO_NAMESPACE": "somebody", "NO_PROXY": "*", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(CASES), str(folder), str(output)]
    result = subprocess.run(
        command, env=environment, cwd=home, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(output.read_text()) | {"printed": result.stdout + result.stderr}


@pytest.mark.parametrize("case", re.findall(r"^@(?:online|offline)\ndef (\w+)", CASES.read_text(), re.MULTILINE))
def test_hub(online, case):
    assert online[case] is None, online[case]


def test_a_token_is_not_shown_and_does_not_leave_the_hub(online, server):
    """Though the client logs every request in full here (HF_DEBUG)."""
    assert any(request.endswith("+token") for request in server.log)
    assert "/resolve/" in online["printed"]
    assert "Fetching" not in online["printed"]  # no bars without a terminal
    everything = json.dumps(online)
    for secret in (TOKEN, "hf_wrongwrongwrong", "hf_illegal", "fünf", "f\\u00fcnf", "not-like-a-token"):
        assert secret not in everything
    assert "valid token" in everything
    storage = [request for request in server.log if request.split()[1].startswith(("/storage", "/upload"))]
    assert storage
    assert not [request for request in storage if "+token" in request]


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
    with pytest.raises(bkn_zoo.InputError, match="use owner/repo"):
        hub.push_to_hub("folder", "no_owner")


def test_service_answers_from_a_repository_as_from_a_folder(tmp_path):
    """Bit for bit, of a trained checkpoint, and started again without the Hub: JSON keeps every digit of a float."""
    folder = Path(__file__).parent.parent / "checkpoints" / ZOO_NAME
    photo = io.BytesIO()
    Image.radial_gradient("L").save(photo, "PNG")
    (tmp_path / "server").mkdir()
    server = HubServer(tmp_path / "server", TOKEN)
    server.create(f"owner/{ZOO_NAME}")
    commit = server.add(f"owner/{ZOO_NAME}", {path.name: path.read_bytes() for path in folder.iterdir()})
    server.repositories[f"owner/{ZOO_NAME}"].tags["v1"] = commit
    name = f"owner/{ZOO_NAME}@v1"
    found = bkn_zoo.Classifier.from_pretrained(folder, engine="torch")(photo.getvalue(), top_k=10)
    wanted = [{"label": p.label, "score": p.score} for p in found.predictions]
    variables = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "NO_PROXY": "*", "HF_ENDPOINT": server.endpoint}
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        flags = ("--models", name, "--engine", "torch")
        with ServiceProcess(tmp_path, *flags, environment=variables | offline, ready_within=180) as process:
            answer = process.ask("/v1/classify?top_k=10", photo.getvalue()).json()
            assert TOKEN not in process.log()
        assert (answer["model"], answer["revision"], answer["predictions"]) == (name, commit, wanted)
        server.shutdown()
        server.server_close()
