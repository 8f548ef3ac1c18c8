"""Settings of the service, API keys, and models that can or cannot be loaded."""

import re
import shutil
import socket
import sys

import pytest
from attackers import encoded, picture
from local_service import LocalService
from service_process import until
from starlette.testclient import TestClient

import bkn_zoo
from bkn_zoo import InputError
from bkn_zoo.images import Preprocessing
from service.app import create_app
from service.command import serve_command
from service.settings import Settings, read_settings

IMAGE = encoded(picture(1, side=50))


@pytest.fixture(autouse=True)
def bundled(checkpoints, monkeypatch):
    for name in ("BKN_ZOO_API_KEYS", "BKN_ZOO_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # an unknown name is looked for there
    monkeypatch.setattr("service.command.set_up_logs", lambda: None)  # it would go on writing where a test captures


def test_statistics_the_engine_refuses_are_the_clients_error(tmp_path, caplog):
    pytest.importorskip("openvino")
    model = bkn_zoo.create_model("inception_cifar_bkn", 10).eval()
    model.conv.norm.running_var.fill_(1e4)  # too large for sums in f16
    about = {"preprocessing": Preprocessing(32, (0.5,) * 3, (0.25,) * 3)}
    bkn_zoo.save_pretrained(model, tmp_path / "odd", default_statistics="population", **about)
    engine = ["--engine", "openvino", "--precision", "f16"]
    with LocalService("--models", str(tmp_path / "odd"), *engine) as service:
        assert service.ask(body=IMAGE).status == 200
        refused = service.ask("/v1/classify?statistics=sample", IMAGE)
    assert refused.error == (422, "bad_parameter")
    assert "statistics population" in refused.json()["error"]["message"]
    assert "failed" not in caplog.text


def test_api_keys_leave_only_health_metrics_and_pages_open():
    with LocalService("--models", "first", "--api-keys", "one,another") as service:
        assert [service.ask(path).status for path in ("/", "/health/live", "/metrics", "/openapi.json")] == [200] * 4
        paths = service.ask("/openapi.json").json()["paths"]
        keyed = [(method, path) for path in paths if path.startswith(("/v1", "/models")) for method in paths[path]]
        assert len(keyed) == 5
        for method, path in keyed:
            assert service.ask(path.format(name="first"), method=method.upper()).error == (401, "invalid_key")
        for good in ({"Authorization": "Bearer another"}, {"X-API-Key": "one"}):
            assert service.ask("/v1/models", **good).status == 200
        for bad in ({"Authorization": "Bearer anothe"}, {"Authorization": "Basic one"}, {"X-API-Key": "ä"}):
            assert service.ask(body=b"x", **bad).status == 401


def test_other_origins_are_refused_unless_named():
    origin = {"Origin": "https://example.org"}
    for origins, allowed in (("", None), ("https://example.org", "https://example.org")):
        client = TestClient(create_app(read_settings(["--models", "first", "--cors-origins", origins])))
        assert client.get("/health/live", headers=origin).headers.get("access-control-allow-origin") == allowed
    asked = {"Origin": "https://example.net", "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/classify", headers=asked).status_code == 400
    assert client.options("/v1/classify", headers=asked | origin).status_code == 200


def test_starting_or_stopping_service_says_so():
    app = create_app(read_settings(["--models", "first"]))
    client = TestClient(app)  # without its lifespan, so that nothing is loaded
    assert (client.get("/health/live").status_code, client.get("/health/ready").status_code) == (200, 503)
    early = client.post("/v1/classify", content=b"x")
    assert (early.status_code, early.headers["retry-after"]) == (503, "2")
    app.state.service.edge.draining = True
    assert client.get("/health/ready").json() == {"status": "draining"}


def test_flag_wins_over_environment(monkeypatch):
    for name in ("MODEL", "MODELS"):
        monkeypatch.setenv(name, "a stranger's, without the prefix")
    assert read_settings([]).models == []
    for name, value in {"QUEUE_LENGTH": "3", "MODELS": "one, owner/two@main", "API_KEYS": "secret"}.items():
        monkeypatch.setenv(f"BKN_ZOO_{name}", value)
    settings = read_settings(["--deadline", "2.5"])
    assert (settings.queue_length, settings.deadline) == (3, 2.5)
    assert settings.models == ["one", "owner/two@main"]
    assert "secret" not in repr(settings)
    assert read_settings(["--queue-length", "5", "--model", "three"]).models == ["three"]
    assert read_settings(["--models", "one", "two,three", "--queue-length", "5"]).models == ["one", "two", "three"]
    assert read_settings(["--queue-length", "5"]).queue_length == 5
    assert Settings().host == "127.0.0.1"


def test_help_lists_every_option_and_its_variable(capsys):
    with pytest.raises(SystemExit):
        read_settings(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"--{name.replace('_', '-')} " in shown for name in Settings.model_fields)
    assert "--queue-length is BKN_ZOO_QUEUE_LENGTH" in shown
    assert not re.search(r"default: (\)|\[)|list\[| str ", shown)


SECONDS = [f"--{name.replace('_', '-')}" for name, field in Settings.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"], ["--engine", "magic"], ["--api-keys", " , "], ["--api-keys", "schlüssel"],
        *([name, value] for name in SECONDS for value in ("x", "inf", "nan")),
    ],
)  # fmt: skip
def test_bad_setting_is_named(flags):
    with pytest.raises(InputError, match=flags[0]):
        read_settings(flags)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        # Ignored, those of an earlier version would leave the service open.
        ("BKN_API_KEYS", "secret", "BKN_API_KEYS is .*: rename it to BKN_ZOO_API_KEYS"),
        ("BKN_MAX_IMAGES", "8", "BKN_MAX_IMAGES is .*: remove it"),
        ("BKN_ZOO_PORT", "tcp://10.0.0.1:8000", r"BKN_ZOO_PORT.*Kubernetes.*enableServiceLinks: false"),
        ("BKN_ZOO_API_KEYS", "", "BKN_ZOO_API_KEYS"),
    ],
)
def test_unusable_variable_is_refused(monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=words):
        read_settings([])


def test_variables_of_other_programs_are_ignored(monkeypatch):
    monkeypatch.setenv("BKN_HOME", "/srv")
    assert read_settings([]).port == 8000


@pytest.mark.parametrize("workers", ["1", "2"])
def test_port_in_use_is_named(capsys, monkeypatch, workers):
    """Also where a stranger would share it."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(workers) - 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve_command(["--models", "first", "--port", str(port), "--workers", workers]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bkn-zoo serve: starting\n")
    assert str(port) in said
    assert "choose another port with --port" in said


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A checkpoint without weights."""
    shutil.copytree(checkpoints / "first", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    return tmp_path / "broken"


def test_model_that_cannot_be_loaded_evicts_no_other(broken):
    with LocalService("--models", f"first,{broken},nowhere", "--loaded-models", "1") as service:
        for name in ("nowhere", "nowhere", "broken"):
            assert service.ask(f"/v1/classify?model={name}", IMAGE).error == (503, "unavailable")
        assert service.ask(body=IMAGE).status == 200


@pytest.mark.parametrize(("arguments", "loaded"), [([], 1), (["--models", "first,second,third"], 2)])
def test_named_models_or_the_bundled_default_are_loaded_first(arguments, loaded):
    with LocalService(*arguments) as service:
        models = service.ask("/v1/models").json()["models"]
        assert [model["loaded"] for model in models] == [k < loaded for k in range(len(models))]
        engine = next(iter(service.service.pool._loaded.values())).classifier.engine
        until(lambda: len(engine._prepared) == 2, "all modes are prepared without being asked for")
        assert not engine.watched


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("./nowhere", "there is no folder ./nowhere"),
        ("first,{empty}", "config.json does not exist"),
        ("{broken}", "model.safetensors"),
        ("nonesuch", "unknown checkpoint 'nonesuch'"),
    ],
)
def test_missing_model_ends_the_command_before_it_serves(models, words, broken, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert serve_command(["--port", "0", "--models", models.format(empty=tmp_path / "empty", broken=broken)]) == 1
    shown = capsys.readouterr()
    assert (shown.out, words in shown.err) == ("", True)
