"""The service, asked as its clients ask it."""

import asyncio
import base64
import hashlib
import http.client
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from fastapi import Request
from huggingface_hub import InferenceClient
from PIL import Image
from service_process import DIRECT, ROOT, ServiceProcess, save_small_checkpoint
from starlette.testclient import TestClient

import bkn_zoo
from bkn_zoo import Classifier, InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.norms import MODES
from service.app import Service, create_app
from service.command import main
from service.errors import MalformedRequestError, ServiceError
from service.server import Server
from service.settings import Settings, read_settings
from service.uploads import read_uploads


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "first")
    save_small_checkpoint(folder / "second", seed=1)
    return folder


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "photo.png"
    rows = np.linspace(0, 255, 40 * 50 * 3).reshape(40, 50, 3)
    Image.fromarray((rows + 30 * np.random.default_rng(0).random(rows.shape)).clip(0, 255).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def running(checkpoints: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(checkpoints) as process:
        yield process


@pytest.fixture(scope="module")
def classifier(checkpoints: Path) -> Classifier:
    return Classifier.from_pretrained(str(checkpoints / "first"), precision="f32")


def ask(url: str, body: bytes | None = None, method: str | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON (or text) and headers of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, named, method=method)
    try:
        with DIRECT.open(request, timeout=30) as response:
            status, data, given = response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        status, data, given = error.code, error.read(), error.headers
    is_json = given.get_content_type() == "application/json"
    return status, json.loads(data) if is_json else data.decode(), given


def form(*files: tuple[str, bytes | str], **fields: bytes | str) -> tuple[bytes, str]:
    """A multipart body and its content type."""
    parts = []
    for name, value in (*files, *fields.items()):
        filename = '; filename="photo.png"' if isinstance(value, bytes) else ""
        data = value if isinstance(value, bytes) else value.encode()
        parts.append(f'--xyz\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n'.encode() + data)
    return b"\r\n".join(parts) + b"\r\n--xyz--\r\n", "multipart/form-data; boundary=xyz"


@pytest.mark.parametrize("statistics", [None, *MODES])
@pytest.mark.parametrize("shape", ["raw", "form", "json", "hugging face"])
def test_every_way_of_asking_gives_the_classifiers_answer(
    running: ServiceProcess, classifier: Classifier, photo: Path, shape: str, statistics: str | None
) -> None:
    chosen = {} if statistics is None else {"statistics": statistics}
    image, encoded = photo.read_bytes(), base64.b64encode(photo.read_bytes()).decode()
    url = f"{running.url}/v1/classify"
    if shape == "raw":
        query = "&".join(["top_k=3", *(f"{name}={value}" for name, value in chosen.items())])
        status, answer, _ = ask(f"{url}?{query}", image, Content_Type="image/png")
    elif shape == "form":
        body, kind = form(image=image, top_k="3", **chosen)
        status, answer, _ = ask(url, body, Content_Type=kind)
    elif shape == "json":
        data = {"image": encoded, "top_k": 3, **chosen}
        status, answer, _ = ask(url, json.dumps(data).encode(), Content_Type="application/json")
    else:
        data = {"inputs": encoded, "parameters": {"top_k": 3, **chosen}}
        status, answer, _ = ask(
            f"{running.url}/models/first", json.dumps(data).encode(), Content_Type="application/json"
        )
        answer = {"predictions": answer}
    wanted = classifier(photo, statistics=statistics, top_k=3)
    assert status == 200, answer
    assert [p["label"] for p in answer["predictions"]] == [p.label for p in wanted.predictions]
    assert [p["score"] for p in answer["predictions"]] == pytest.approx([p.score for p in wanted.predictions], abs=1e-5)
    if shape != "hugging face":
        assert (answer["statistics"], answer["engine"]) == (wanted.statistics, wanted.engine)
        assert (answer["model"], answer["revision"]) == ("first", None)
        assert 0 <= answer["timing_ms"]["queue"] < 30_000
        assert 0 < answer["timing_ms"]["inference"] < 30_000


@pytest.mark.parametrize("shape", ["form", "json"])
def test_several_images_are_answered_in_order_each_as_if_it_were_alone(
    running: ServiceProcess, photo: Path, shape: str
) -> None:
    good, turned = photo.read_bytes(), io.BytesIO()
    Image.open(photo).rotate(180).save(turned, "png")
    images = [good, b"hello", turned.getvalue(), good[:100], b"", good]
    alone = [ask(f"{running.url}/v1/classify?top_k=2&statistics=sample", image)[1] for image in images]
    if shape == "form":
        body, kind = form(*(("images", image) for image in images), top_k="2", statistics="sample")
    else:
        texts: list[Any] = [base64.b64encode(image).decode() for image in images]
        kind, body = "application/json", json.dumps({"images": texts, "top_k": 2, "statistics": "sample"}).encode()
    status, answer, _ = ask(f"{running.url}/v1/classify/batch?top_k=1", body, Content_Type=kind)
    assert status == 200, answer
    for one in (*alone, *answer["results"]):
        assert (one.pop("timing_ms", None) is None) == ("error" in one)
    assert answer == {"results": alone}
    codes = [result.get("error", {}).get("code") for result in alone]
    assert codes == [None, "unsupported_format", None, "broken_image", "malformed_request", None]
    lines: list[Any] = []
    end = time.monotonic() + 10  # it is written once the answer is sent
    while not lines and time.monotonic() < end:
        lines = [json.loads(line) for line in running.log().splitlines() if '"/v1/classify/batch"' in line]
    assert (lines[-1]["images"], lines[-1]["failed"], lines[-1]["model"]) == (6, 3, "first")


def test_a_request_of_several_images_is_bounded_as_one_of_a_single_is(running: ServiceProcess, photo: Path) -> None:
    def asked(data: Any) -> tuple[int, Any]:
        body, kind = data if isinstance(data, tuple) else (json.dumps(data).encode(), "application/json")
        return ask(f"{running.url}/v1/classify/batch", body, Content_Type=kind)[:2]

    body, kind = form(*[("image", photo.read_bytes())] * 2)
    status, answer, _ = ask(f"{running.url}/v1/classify", body, Content_Type=kind)
    assert status == 400
    assert "send several images to /v1/classify/batch" in answer["error"]["message"]
    text = base64.b64encode(photo.read_bytes()).decode()
    assert asked({"images": [text] * 32})[0] == 200
    for bad in (
        {"images": [text] * 33}, {"images": []}, {"images": text}, {"image": text}, [text], {},
        (photo.read_bytes(), "image/png"), form(*[("images", photo.read_bytes())] * 33), form(image=photo.read_bytes()),
    ):  # fmt: skip
        status, answer = asked(bad)
        assert (status, answer["error"]["code"]) == (400, "malformed_request")
    for option, status in (({"top_k": 0}, 422), ({"model": "third"}, 404)):
        assert asked({"images": [text], **option})[0] == status
    assert asked(form(*[("images", bytes(2_000_000))] * 6))[0] == 413
    # Each would be small enough by itself; a bad one between them counts for nothing.
    large = io.BytesIO()
    Image.new("L", (5000, 4000)).save(large, "png")
    texts = [base64.b64encode(large.getvalue()).decode()] * 3
    status, answer = asked({"images": [texts[0], "no base64!", 7, texts[1], texts[2], text]})
    codes = [result.get("error", {}).get("code") for result in answer["results"]]
    assert codes == [None, "malformed_request", "malformed_request", None, "too_large", None]
    assert "50,000,000 pixels together" in answer["results"][4]["error"]["message"]


def test_the_hubs_own_client_works_unmodified(running: ServiceProcess, classifier: Classifier, photo: Path) -> None:
    client = InferenceClient(model=f"{running.url}/models/first")
    five, three = client.image_classification(str(photo)), client.image_classification(str(photo), top_k=3)
    wanted = [prediction.label for prediction in classifier(photo).predictions]
    assert [element.label for element in five] == wanted
    assert [element.label for element in three] == wanted[:3]


def test_the_models_differ_and_are_listed(running: ServiceProcess, photo: Path) -> None:
    _, listed, _ = ask(f"{running.url}/v1/models")
    assert [(model["name"], model["default"]) for model in listed["models"]] == [("first", True), ("second", False)]
    assert listed["models"][0]["architecture"] == "inception_cifar_bkn"
    answers = [ask(f"{running.url}/v1/classify?model={name}", photo.read_bytes())[1] for name in ("first", "second")]
    assert answers[0]["predictions"] != answers[1]["predictions"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/classify", b"", 400, "malformed_request"),
        ("/v1/classify", b"hello", 415, "unsupported_format"),
        ("/v1/classify", b"\x89PNG\r\n\x1a\n", 422, "broken_image"),
        ("/v1/classify?top_k=0", b"x", 422, "bad_parameter"),
        ("/v1/classify?statistics=mine", b"x", 422, "bad_parameter"),
        ("/v1/classify?model=third", b"x", 404, "unknown_model"),
        ("/models/third", b"x", 404, "unknown_model"),
        ("/models/../../etc/passwd", b"x", 404, "unknown_model"),
        ("/nowhere", b"x", 404, "not_found"),
        ("/health/live", b"x", 405, "method_not_allowed"),
        ("/v1/classify", bytes(10_000_001), 413, "too_large"),
    ],
)
def test_each_refusal_has_its_status_and_says_what_to_do(
    running: ServiceProcess, path: str, body: bytes, status: int, code: str
) -> None:
    found, answer, _ = ask(running.url + path, body, Content_Type="application/octet-stream")
    assert (found, answer["error"]["code"]) == (status, code)
    assert len(answer["error"]["message"]) > 20


@pytest.mark.parametrize("path", ["/", "/health/live", "/v1/models", "/static/page.js", "/nowhere", "/v1/classify"])
def test_head_is_answered_as_get_is_without_a_body(running: ServiceProcess, path: str) -> None:
    found = []
    connection = http.client.HTTPConnection(running.url.removeprefix("http://"))
    for method in ("GET", "HEAD", "GET"):  # the last sees whether the connection is still in order
        connection.request(method, path)
        response = connection.getresponse()
        found.append((response.status, response.headers["content-type"], len(response.read())))
    connection.close()
    assert found[1] == (*found[0][:2], 0)
    assert found[2] == found[0]
    assert found[0][2] > 0


def test_a_request_carries_its_id_into_the_answer_and_the_log(running: ServiceProcess, photo: Path) -> None:
    headers = ask(f"{running.url}/v1/classify", photo.read_bytes(), X_Request_Id="my-own.id_7")[2]
    assert headers["x-request-id"] == "my-own.id_7"
    made = ask(f"{running.url}/v1/classify", photo.read_bytes(), X_Request_Id="spaces are not taken")[2]["x-request-id"]
    assert len(made) == 32
    lines = [json.loads(line) for line in running.log().splitlines() if line.startswith("{")]
    mine = [line for line in lines if line.get("request_id") == "my-own.id_7"]
    assert [(line["path"], line["status"], line["model"]) for line in mine] == [("/v1/classify", 200, "first")]


def test_the_log_says_why_something_was_refused_whether_or_not_it_was_a_request(running: ServiceProcess) -> None:
    url = f"{running.url}/v1/classify"
    for data in ({"top_k": True}, {"parameters": {"top_k": True}}):
        status, answer, _ = ask(url, json.dumps(data).encode(), Content_Type="application/json", X_Request_Id="refused")
        assert (status, answer["error"]["message"]) == (422, 'top_k: send a whole number, as in {"top_k": 3}.')
    status, long, _ = ask(url, b"x", Cookie="x" * 20_000)
    assert status == 400
    assert 'bkn_requests_total{method="any",route="none",status="400"}' in ask(f"{running.url}/metrics")[1]
    lines = [json.loads(line) for line in running.log().splitlines() if line.startswith("{")]
    assert [line["error"] for line in lines if line.get("request_id") == "refused"] == [answer["error"]["message"]] * 2
    assert 400 in [line["status"] for line in lines if line.get("error") == long["error"]["message"]]


def test_the_metrics_count_what_happened(running: ServiceProcess, photo: Path) -> None:
    ask(f"{running.url}/v1/classify?statistics=sample", photo.read_bytes())
    ask(f"{running.url}/v1/classify", b"hello")
    text = ask(f"{running.url}/metrics")[1]
    for wanted in (
        'bkn_requests_total{method="POST",route="/v1/classify",status="200"}',
        'bkn_requests_total{method="POST",route="/v1/classify",status="415"}',
        'bkn_inference_seconds_count{model="first",statistics="sample"}',
        'bkn_queue_seconds_count{model="first"}',
        'bkn_queue_length{model="first"} 0.0',
        'bkn_batch_size_sum{model="first"}',
        'bkn_rejected_total{reason="unsupported_format"}',
        'bkn_model_loaded{model="first"} 1.0',
        "process_resident_memory_bytes",
    ):
        assert wanted in text


def test_as_many_data_uris_as_images_are_allowed_are_not_too_many_parts() -> None:
    text = base64.b64encode(b"an image").decode()

    def read(most: int, parts: int) -> list[bytes | ServiceError]:
        body = json.dumps({"images": [f"data:image/png;base64,{text}"] * most, "more": [0] * parts}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        headers = [(b"content-type", b"application/json")]
        request = Request({"type": "http", "headers": headers, "query_string": b""}, receive)

        async def work(size: int, parse: Any, *arguments: Any) -> Any:
            return parse(*arguments)

        return asyncio.run(read_uploads(request, "images", most, work))[0]

    assert read(600, 0) == [b"an image"] * 600
    with pytest.raises(MalformedRequestError, match="too many parts"):
        read(600, 10_000)


def test_scores_of_another_function_than_softmax_are_refused(running: ServiceProcess, photo: Path) -> None:
    found = {}
    for function in (None, "softmax", "sigmoid", ["softmax"]):
        parameters = {"function_to_apply": function, "top_k": 1}
        data = {"inputs": base64.b64encode(photo.read_bytes()).decode(), "parameters": parameters}
        status, answer, _ = ask(
            f"{running.url}/models/first", json.dumps(data).encode(), Content_Type="application/json"
        )
        found[str(function)] = status
    assert list(found.values()) == [200, 200, 422, 422], found
    assert answer["error"]["message"].startswith("function_to_apply: scores are softmax's here")


@pytest.mark.parametrize("route", ["classify", "classify/batch"])
def test_options_beside_parameters_count_and_those_within_win(running: ServiceProcess, photo: Path, route: str) -> None:
    encoded = base64.b64encode(photo.read_bytes()).decode()
    image = {"image": encoded} if route == "classify" else {"images": [encoded]}
    data = image | {"statistics": "sample", "top_k": 3, "parameters": {"top_k": 1, "statistics": None}}
    status, answer, _ = ask(f"{running.url}/v1/{route}", json.dumps(data).encode(), Content_Type="application/json")
    assert status == 200, answer
    answer = answer if route == "classify" else answer["results"][0]
    assert (answer["statistics"], len(answer["predictions"])) == ("sample", 1)


def test_a_misspelt_option_is_refused_wherever_it_stands_and_other_names_are_not(
    running: ServiceProcess, photo: Path
) -> None:
    url, image = f"{running.url}/v1/classify", photo.read_bytes()

    def asked(query: str, body: bytes = image, kind: str = "image/png") -> tuple[int, Any]:
        return ask(f"{url}?{query}", body, Content_Type=kind)[:2]

    def as_json(**more: object) -> tuple[int, Any]:
        data = {"image": base64.b64encode(image).decode(), **more}
        return asked("", json.dumps(data).encode(), "application/json")

    for status, answer in (
        asked("Statistics=sample"),
        asked("", *form(image=image, top_k="3", models="first")),
        as_json(statistic="sample"),
        as_json(parameters={"topK": 3}),
    ):
        assert status == 422, answer
        assert answer["error"]["message"].endswith("is no option: choose from model, statistics, top_k.")
    others = {"code": 1, "token": 1, "stop": 1, "timeout": 3}
    assert as_json(**others, parameters=others, options={"use_cache": False})[0] == 200
    assert asked("code=1&token=1&utm_source=mail")[0] == 200


def test_the_body_s_options_win_over_the_query_s(running: ServiceProcess, photo: Path) -> None:
    data = {"image": base64.b64encode(photo.read_bytes()).decode(), "top_k": 2, "statistics": None}
    url = f"{running.url}/v1/classify?top_k=3&statistics=sample"
    status, answer, _ = ask(url, json.dumps(data).encode(), Content_Type="application/json")
    assert (status, len(answer["predictions"]), answer["statistics"]) == (200, 2, "sample")
    url = f"{running.url}/v1/classify?top_k=0"
    status, answer, _ = ask(url, json.dumps(data).encode(), Content_Type="application/json")
    assert (status, answer["error"]["code"]) == (422, "bad_parameter")  # which is refused even so


def test_the_page_asks_no_other_host(running: ServiceProcess) -> None:
    status, page, headers = ask(f"{running.url}/")
    assert (status, "<title>" in page) == (200, True)
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "default-src 'self'" in ask(f"{running.url}/static/index.html")[2]["content-security-policy"]
    assert not re.findall(r"""(?:src|href|action)=["']?(?:https?:)?//""", page)


def test_the_documentation_runs_no_script_but_its_own(running: ServiceProcess) -> None:
    status, page, headers = ask(f"{running.url}/docs")
    policy = headers["content-security-policy"]
    assert (status, "default-src 'none'" in policy, "'unsafe-inline'" in policy.split("style-src")[0]) == (
        200,
        True,
        False,
    )
    (inline,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode() in policy
    assert "//" not in page.replace(inline, "")  # no other host, in any spelling
    assert "//" not in policy
    scripts, sheets = re.findall(r'<script src="([^"]+)"', page), re.findall(r'rel="stylesheet" href="([^"]+)"', page)
    kinds = [ask(f"{running.url}/{path}")[2]["content-type"] for path in (*scripts, *sheets)]
    assert [kind.split(";")[0] for kind in kinds] == ["text/javascript", "text/css"]
    for path in ("/redoc", "/docs/oauth2-redirect"):
        assert ask(running.url + path)[0] == 404


def test_base64_may_be_broken_into_lines_and_of_the_kind_for_addresses(running: ServiceProcess, photo: Path) -> None:
    image = photo.read_bytes()
    for text in (
        base64.encodebytes(image).decode(),
        base64.urlsafe_b64encode(image).decode().rstrip("="),
        "data:image/png;base64,\r\n\t" + base64.b64encode(image).decode(),
    ):
        status, answer, _ = ask(
            f"{running.url}/v1/classify", json.dumps({"image": text}).encode(), Content_Type="application/json"
        )
        assert status == 200, answer


def test_logs_are_ascii_and_without_the_warnings_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import service.logs, logging, warnings; service.logs.set_up_logs(); warnings.warn('odd'); "
    code += "logging.getLogger('bkn_zoo.service').info('a\\u2028b\\u202ec', extra={'path': '/\\u2028'})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert line.isascii()
    assert json.loads(line)["message"] == "a\u2028b\u202ec"


def test_openapi_shows_the_ways_to_send_an_image(running: ServiceProcess) -> None:
    schema = ask(f"{running.url}/openapi.json")[1]
    operation = schema["paths"]["/v1/classify"]["post"]
    assert {"multipart/form-data", "application/json", "image/*"} <= operation["requestBody"]["content"].keys()
    several = schema["paths"]["/v1/classify/batch"]["post"]
    assert several["requestBody"]["content"].keys() == {"multipart/form-data", "application/json"}
    for path, parameters in {
        "/v1/classify/batch": {("model", "query"), ("statistics", "query"), ("top_k", "query")},
        "/v1/classify": {("model", "query"), ("statistics", "query"), ("top_k", "query")},
        "/models/{name}": {("name", "path"), ("model", "query"), ("statistics", "query"), ("top_k", "query")},
    }.items():
        shown = schema["paths"][path]["post"]["parameters"]
        assert {(parameter["name"], parameter["in"]) for parameter in shown} == parameters


def test_openapi_lists_every_status_of_every_route_with_its_body(running: ServiceProcess) -> None:
    image = {"400", "401", "404", "408", "413", "415", "422", "429", "503", "504"}
    wanted = {
        "/v1/classify": image,
        "/v1/classify/batch": image - {"415"},
        "/models/{name}": image,
        "/v1/models": {"401", "429"},
        "/health/live": set(),
        "/health/ready": {"503"},
        "/metrics": set(),
    }
    shown = {path: method["responses"] for path, methods in ask(f"{running.url}/openapi.json")[1]["paths"].items()
             for method in methods.values()}  # fmt: skip
    assert {path: answers.keys() - {"200", "500"} for path, answers in shown.items()} == wanted
    assert all({"200", "500"} <= answers.keys() for answers in shown.values())
    bodies = {
        answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, answers in shown.items()
        for status, answer in answers.items()
        if status != "200" and (path, status) != ("/health/ready", "503")
    }
    assert bodies == {"ErrorBody"}


def test_the_curl_examples_of_the_guide_work(running: ServiceProcess, photo: Path) -> None:
    Image.open(photo).convert("RGB").save(photo.parent / "photo.jpg")
    examples = re.findall(r"^curl .*$", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        command = shlex.split(example.replace("http://127.0.0.1:8000", running.url))
        done = subprocess.run(
            [*command, "-sf", "--noproxy", "*"], cwd=photo.parent, capture_output=True, check=True, timeout=60
        )
        assert json.loads(done.stdout)


class FromAShell(ServiceProcess):
    command = (str(Path(sys.executable).with_name("bkn-zoo")), "serve")


def test_the_serve_command_of_the_guide_works(tmp_path: Path) -> None:
    save_small_checkpoint(tmp_path / "my_network")
    line = re.search(r"^bkn-zoo serve .*$", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE)
    assert line is not None
    flags = shlex.split(line[0], comments=True)[2:]
    with FromAShell(tmp_path, *(flag.replace("./", f"{tmp_path}/") for flag in flags)) as process:
        assert [model["name"] for model in ask(f"{process.url}/v1/models")[1]["models"]] == ["my_network"]


@pytest.fixture
def bundled(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BKN_ZOO_API_KEYS", "BKN_ZOO_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # an unknown name is looked for there


@pytest.mark.usefixtures("bundled")
def test_an_image_of_several_that_fails_here_leaves_the_others_their_answers(
    photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, images = Service._answer, []

    async def fails_once(self: Service, loaded: Any, image: bytes, options: Any) -> Any:
        images.append(image)
        if len(images) == 2:
            raise ValueError("as a score that is no number would")
        return await answer(self, loaded, image, options)

    monkeypatch.setattr(Service, "_answer", fails_once)
    text = base64.b64encode(photo.read_bytes()).decode()
    with TestClient(create_app(read_settings(["--models", "first"]))) as client:
        until_ready(client)
        given = client.post("/v1/classify/batch", json={"images": [text] * 3})
    assert given.status_code == 200
    assert [result.get("error", {}).get("code") for result in given.json()["results"]] == [None, "internal", None]


def test_statistics_that_the_engine_refuses_are_the_clients_error_in_its_own_words(
    tmp_path: Path, photo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openvino")
    model = bkn_zoo.create_model("inception_cifar_bkn", 10).eval()
    model.conv.norm.running_var.fill_(1e4)  # too large for sums in f16
    about: dict[str, Any] = {"preprocessing": Preprocessing(32, (0.5,) * 3, (0.25,) * 3)}
    bkn_zoo.save_pretrained(model, tmp_path / "odd", default_statistics="population", **about)
    engine = ["--engine", "openvino", "--precision", "f16"]
    with TestClient(
        create_app(read_settings(["--models", str(tmp_path / "odd"), "--device", "cpu", *engine]))
    ) as client:
        until_ready(client)
        assert client.post("/v1/classify", content=photo.read_bytes()).status_code == 200
        refused = client.post("/v1/classify?statistics=sample", content=photo.read_bytes())
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "bad_parameter")
    assert "statistics='population'" in refused.json()["error"]["message"]
    assert "failed" not in caplog.text


@pytest.mark.usefixtures("bundled")
def test_with_api_keys_only_health_metrics_and_the_page_are_open() -> None:
    settings = read_settings(["--models", "first", "--api-keys", "one,another"])
    with TestClient(create_app(settings)) as client:
        for path in ("/", "/health/live", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 200
        paths = client.get("/openapi.json").json()["paths"]
        keyed = [(method, path) for path in paths if path.startswith(("/v1", "/models")) for method in paths[path]]
        assert len(keyed) == 4
        for method, path in keyed:
            refused = client.request(method, path.format(name="first"))
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_key")
        for headers in ({"Authorization": "Bearer another"}, {"X-API-Key": "one"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        for headers in ({"Authorization": "Bearer anothe"}, {"Authorization": "Basic one"}, {"X-API-Key": "ä"}):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            assert client.post("/v1/classify", content=b"x", headers=encoded).status_code == 401


@pytest.mark.usefixtures("bundled")
def test_other_origins_are_refused_unless_they_are_named() -> None:
    origin = {"Origin": "https://example.org"}
    for origins, allowed in (("", None), ("https://example.org", "https://example.org")):
        client = TestClient(create_app(read_settings(["--models", "first", "--cors-origins", origins])))
        assert client.get("/health/live", headers=origin).headers.get("access-control-allow-origin") == allowed
    asked = {"Origin": "https://example.net", "Access-Control-Request-Method": "POST"}
    refused = client.options("/v1/classify", headers=asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cors_refused")
    assert client.options("/v1/classify", headers=asked | origin).status_code == 200


@pytest.mark.usefixtures("bundled")
def test_a_service_that_is_starting_or_stopping_says_so() -> None:
    app = create_app(read_settings(["--models", "first"]))
    client = TestClient(app)  # without its lifespan, so that nothing is loaded
    assert (client.get("/health/live").status_code, client.get("/health/ready").status_code) == (200, 503)
    early = client.post("/v1/classify", content=b"x")
    assert (early.status_code, early.headers["retry-after"]) == (503, "2")
    app.state.service.edge.draining = True
    assert client.get("/health/ready").json() == {"status": "draining"}


@pytest.mark.usefixtures("bundled")
def test_an_address_that_nobody_reads_keeps_no_service_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings(["--models", "first"])
    server = Server(create_app(settings), settings)
    gone, pipe = os.pipe()
    os.close(gone)
    with socket.create_server(("127.0.0.1", 0)) as listening, os.fdopen(pipe, "w") as stdout:
        server.servers = [Mock(sockets=[listening])]
        monkeypatch.setattr("sys.stdout", stdout)
        server._announce()
        stdout.flush()  # nor is anything left that fails at the end


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKN_ZOO_QUEUE_LENGTH", "3")
    monkeypatch.setenv("BKN_ZOO_MODELS", "one, owner/two@main")
    monkeypatch.setenv("BKN_ZOO_API_KEYS", "secret")
    settings = read_settings(["--deadline", "2.5"])
    assert (settings.queue_length, settings.deadline) == (3, 2.5)
    assert settings.models == ["one", "owner/two@main"]
    assert "secret" not in repr(settings)
    assert read_settings(["--queue-length", "5", "--model", "three"]).models == ["three"]
    for several in (["--models", "one", "two,three"], ["--models=one", "two", "three"]):
        assert read_settings([*several, "--queue-length", "5"]).models == ["one", "two", "three"]
    assert read_settings(["--queue-length", "5"]).queue_length == 5
    assert Settings().host == "127.0.0.1"


def test_the_environment_s_old_prefix_is_read_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKN_API_KEYS", "secret")
    monkeypatch.setenv("BKN_PORT", "1")
    monkeypatch.setenv("BKN_ZOO_PORT", "2")
    with pytest.warns(DeprecationWarning, match="BKN_API_KEYS is now called BKN_ZOO_API_KEYS"):
        settings = read_settings([])
    assert ([key.get_secret_value() for key in settings.api_keys], settings.port) == (["secret"], 2)
    monkeypatch.setenv("BKN_ZOO_PORT", "tcp://10.0.0.1:80")
    with pytest.warns(DeprecationWarning, match="BKN_ZOO_PORT"), pytest.raises(InputError, match="enableServiceLinks"):
        read_settings([])


def test_only_names_with_the_prefix_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "a stranger's")
    monkeypatch.setenv("MODELS", "another's")
    assert read_settings([]).models == []


@pytest.mark.parametrize("keys", ["", " , ", "schlüssel"])
def test_keys_that_nobody_could_send_are_refused(monkeypatch: pytest.MonkeyPatch, keys: str) -> None:
    """Rather than leave the service open because a secret was not filled in."""
    monkeypatch.setenv("BKN_ZOO_API_KEYS", keys)
    with pytest.raises(InputError, match="BKN_ZOO_API_KEYS"):
        read_settings([])


SECONDS = [f"--{name.replace('_', '-')}" for name, field in Settings.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--engine", "magic"], "--engine"),
        *(([name, value], name) for name in SECONDS for value in ("x", "inf", "nan")),
    ],
)
def test_a_bad_setting_is_named_in_one_sentence(flags: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_settings(flags)


@pytest.mark.usefixtures("bundled")
def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.command.set_up_logs", lambda: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--models", "first", "--port", str(port)]) == 1
    assert str(port) in capsys.readouterr().err


@pytest.mark.usefixtures("bundled")
def test_a_model_that_cannot_be_loaded_drives_no_other_out(checkpoints: Path, photo: Path) -> None:
    broken = checkpoints.parent / "broken"
    shutil.copytree(checkpoints / "first", broken, dirs_exist_ok=True)
    (broken / "model.safetensors").write_bytes(b"")
    settings = read_settings(["--models", f"first,{broken},nowhere", "--loaded-models", "1"])
    with TestClient(create_app(settings)) as client:
        until_ready(client)
        for _ in range(2):
            refused = client.post("/v1/classify?model=nowhere", content=photo.read_bytes())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert [model["loaded"] for model in client.get("/v1/models").json()["models"]] == [True, False, False]
        assert client.post("/v1/classify?model=broken", content=photo.read_bytes()).status_code == 503
        assert client.post("/v1/classify", content=photo.read_bytes()).status_code == 200


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize(("arguments", "loaded"), [([], 1), (["--models", "first,second,third"], 2)])
def test_named_models_are_loaded_at_the_start_and_of_those_bundled_the_default(
    arguments: list[str], loaded: int
) -> None:
    with TestClient(create_app(read_settings([*arguments, "--engine", "torch"]))) as client:
        until_ready(client)
        models = client.get("/v1/models").json()["models"]
        assert len(models) >= 3
        assert [model["loaded"] for model in models] == [k < loaded for k in range(len(models))]


def until_ready(client: TestClient) -> None:
    end = time.monotonic() + 60
    while client.get("/health/ready").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("./nowhere", "there is no folder ./nowhere"),
        ("first,{empty}", "config.json does not exist"),
        ("{broken}", "model.safetensors"),
        ("nonesuch", "unknown checkpoint 'nonesuch'"),
    ],
)
@pytest.mark.usefixtures("bundled")
def test_a_model_that_is_not_there_is_refused_before_anything_claims_to_serve(
    models: str,
    words: str,
    checkpoints: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.command.set_up_logs", lambda: None)  # it would go on writing where this test captures
    (tmp_path / "empty").mkdir()
    shutil.copytree(checkpoints / "first", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    models = models.format(empty=tmp_path / "empty", broken=tmp_path / "broken")
    assert main(["--port", "0", "--models", models]) == 1
    shown = capsys.readouterr()
    assert (shown.out, words in shown.err) == ("", True)
