"""The service, asked as its clients ask it."""

import base64
import hashlib
import http.client
import json
import re
import shlex
import subprocess

import pytest
from attackers import encoded, picture
from http_client import form
from huggingface_hub import InferenceClient
from service_process import ROOT, until

from bkn_zoo import Classifier
from bkn_zoo.norms import MODES

IMAGE = encoded(picture(1, side=50))
TEXT = base64.b64encode(IMAGE).decode()
JSON = "application/json"


@pytest.fixture(scope="module")
def classifier(checkpoints):
    return Classifier.from_pretrained(str(checkpoints / "first"), "cpu", "torch")


def ask_json(local, data, target="/v1/classify", **headers):
    return local.ask(target, json.dumps(data).encode(), Content_Type=JSON, **headers)


# Ways to ask


@pytest.mark.parametrize("statistics", [None, *MODES])
@pytest.mark.parametrize("shape", ["raw", "form", "json", "hugging face"])
def test_every_request_shape_gives_the_classifiers_answer(local, classifier, shape, statistics):
    chosen = {} if statistics is None else {"statistics": statistics}
    if shape == "raw":
        query = "&".join(f"{name}={value}" for name, value in {"top_k": 3, **chosen}.items())
        reply = local.ask(f"/v1/classify?{query}", IMAGE, Content_Type="image/png")
    elif shape == "form":
        body, kind = form(image=IMAGE, top_k="3", **chosen)
        reply = local.ask(body=body, Content_Type=kind)
    elif shape == "json":
        reply = ask_json(local, {"image": TEXT, "top_k": 3, **chosen})
    else:
        reply = ask_json(local, {"inputs": TEXT, "parameters": {"top_k": 3, **chosen}}, "/models/first")
    assert reply.status == 200, reply.body
    answer = {"predictions": reply.json()} if shape == "hugging face" else reply.json()
    wanted = classifier(IMAGE, statistics=statistics, top_k=3)
    assert [p["label"] for p in answer["predictions"]] == [p.label for p in wanted.predictions]
    assert [p["score"] for p in answer["predictions"]] == pytest.approx([p.score for p in wanted.predictions], abs=1e-5)
    if shape != "hugging face":
        assert (answer["statistics"], answer["engine"]) == (wanted.statistics, wanted.engine)
        assert (answer["model"], answer["revision"]) == ("first", None)
        assert 0 <= answer["timing_ms"]["queue"] < 30_000
        assert 0 < answer["timing_ms"]["inference"] < 30_000


@pytest.mark.parametrize("shape", ["form", "json"])
def test_batch_answers_each_image_as_if_alone_in_order(local, shape):
    images = [IMAGE, b"hello", encoded(picture(2)), IMAGE[:100], b"", IMAGE]
    alone = [local.ask("/v1/classify?top_k=2&statistics=sample", image).json() for image in images]
    if shape == "form":
        body, kind = form(*(("images", image) for image in images), top_k="2", statistics="sample")
        reply = local.ask("/v1/classify/batch?top_k=1", body, Content_Type=kind)
    else:
        texts = [base64.b64encode(image).decode() for image in images]
        reply = ask_json(local, {"images": texts, "top_k": 2, "statistics": "sample"}, "/v1/classify/batch?top_k=1")
    assert reply.status == 200, reply.body
    answer = reply.json()
    for one in (*alone, *answer["results"]):
        assert (one.pop("timing_ms", None) is None) == ("error" in one)
    assert answer == {"results": alone}
    codes = [result.get("error", {}).get("code") for result in alone]
    assert codes == [None, "unsupported_format", None, "broken_image", "malformed_request", None]


def test_text_instead_of_an_image_says_how_to_send_it(local):
    for target, field in (("/v1/classify", "image"), ("/v1/classify/batch", "images")):
        body, kind = form((field, "photo.jpg"))
        reply = local.ask(target, body, Content_Type=kind)
        assert reply.error == (400, "malformed_request")
        assert f"-F {field}=@photo.jpg" in reply.json()["error"]["message"]
    for body in ("docs/coffee.jpg", "été.JPG\n", ' {"image": "aGVsbG8="}\n'):
        # As curl sends it.
        reply = local.ask(body=body.encode(), Content_Type="application/x-www-form-urlencoded")
        assert reply.error == (415, "unsupported_format")
        assert "--data-binary @photo.jpg" in reply.json()["error"]["message"]


def test_batch_is_bounded_like_a_single_request(local):
    def ask(data):
        body, kind = data if isinstance(data, tuple) else (json.dumps(data).encode(), JSON)
        return local.ask("/v1/classify/batch", body, Content_Type=kind)

    body, kind = form(*[("image", IMAGE)] * 2)
    reply = local.ask(body=body, Content_Type=kind)
    assert reply.status == 400
    assert "send several images to /v1/classify/batch" in reply.json()["error"]["message"]
    assert ask({"images": [f"data:image/png;base64,{TEXT}"] * 32}).status == 200
    for bad in (
        {"images": [TEXT] * 33}, {"images": []}, {"images": TEXT}, {"image": TEXT}, [TEXT], {}, (IMAGE, "image/png"),
        form(*[("images", IMAGE)] * 33), form(image=IMAGE),
    ):  # fmt: skip
        assert ask(bad).error == (400, "malformed_request")
    for option, status in (({"top_k": 0}, 422), ({"model": "third"}, 404)):
        assert ask({"images": [TEXT], **option}).status == status
    assert ask(form(*[("images", bytes(2_000_000))] * 6)).status == 413
    results = ask({"images": [TEXT, "no base64!", 7, TEXT]}).json()["results"]
    codes = [result.get("error", {}).get("code") for result in results]
    assert codes == [None, "malformed_request", "malformed_request", None]


def test_inference_client_of_the_hub_works_unmodified(local, classifier):
    client = InferenceClient(model=f"{local.url}/models/first")
    five, three = client.image_classification(IMAGE), client.image_classification(IMAGE, top_k=3)
    wanted = [prediction.label for prediction in classifier(IMAGE).predictions]
    assert [element.label for element in five] == wanted
    assert [element.label for element in three] == wanted[:3]


def test_models_differ_and_are_listed(local):
    models = local.ask("/v1/models").json()["models"]
    assert [(model["name"], model["default"]) for model in models] == [("first", True), ("second", False)]
    assert models[0]["architecture"] == "inception_cifar_bkn"
    assert (models[0]["measured_on"], models[0]["crop"]) == (None, 1.0)
    wanted = [f"class {number}" for number in range(10)]
    assert local.ask("/v1/labels?model=second").json() == {"model": "second", "labels": wanted}
    assert local.ask("/v1/labels?model=third").error == (404, "unknown_model")
    first, second = (local.ask(f"/v1/classify?model={name}", IMAGE).json() for name in ("first", "second"))
    assert first["predictions"] != second["predictions"]


def test_refusal_has_status_and_code(local):
    for path, body, error in (
        ("/v1/classify", b"", (400, "malformed_request")),
        ("/v1/classify", b"\x89PNG\r\n\x1a\n", (422, "broken_image")),
        ("/v1/classify?statistics=mine", b"x", (422, "bad_parameter")),
        ("/models/../../etc/passwd", b"x", (404, "unknown_model")),
        ("/nowhere", b"x", (404, "not_found")),
        ("/health/live", b"x", (405, "method_not_allowed")),
        ("/v1/classify", bytes(10_000_001), (413, "too_large")),
    ):
        assert local.ask(path, body).error == error


@pytest.mark.parametrize("path", ["/", "/v1/models", "/nowhere"])
def test_head_is_answered_like_get_and_all_have_safety_headers(local, path):
    found = []
    connection = http.client.HTTPConnection("127.0.0.1", local.port)
    for method in ("GET", "HEAD", "GET"):  # the last sees whether the connection is still in order
        connection.request(method, path)
        response = connection.getresponse()
        found.append((response.status, response.headers["content-type"], len(response.read())))
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert ("frame-ancestors 'none'" in response.headers.get("content-security-policy", "")) == (path == "/")
    connection.close()
    assert found[1] == (*found[0][:2], 0)
    assert found[2] == found[0]


# Options


@pytest.mark.parametrize("route", ["classify", "classify/batch"])
def test_options_of_parameters_win_over_body_and_query(local, route):
    image = {"image": TEXT} if route == "classify" else {"images": [TEXT]}
    data = image | {"statistics": "sample", "top_k": 3, "parameters": {"top_k": 1, "statistics": None}}
    answer = ask_json(local, data, f"/v1/{route}?top_k=2&statistics=population").json()
    answer = answer if route == "classify" else answer["results"][0]
    assert (answer["statistics"], len(answer["predictions"])) == ("sample", 1)
    assert ask_json(local, data, f"/v1/{route}?top_k=0").error == (422, "bad_parameter")


def test_misspelt_option_is_refused_and_unrelated_names_pass(local):
    body, kind = form(image=IMAGE, top_k="3", models="first")
    for reply in (
        local.ask("/v1/classify?Statistics=sample", IMAGE),
        local.ask(body=body, Content_Type=kind),
        ask_json(local, {"image": TEXT, "parameters": {"topK": 3}}),
    ):
        assert reply.status == 422, reply.body
        assert reply.json()["error"]["message"].endswith("is not an option: choose from model, statistics, top_k.")
    others = {"code": 1, "token": 1, "stop": 1, "function_to_apply": "softmax"}
    assert ask_json(local, {"image": TEXT, **others, "parameters": others}).status == 200
    assert local.ask("/v1/classify?code=1&token=1&utm_source=mail", IMAGE).status == 200
    for wrong in ({"function_to_apply": "sigmoid"}, {"parameters": {"function_to_apply": []}}, {"top_k": True}):
        assert ask_json(local, {"image": TEXT, **wrong}).error == (422, "bad_parameter")


# Logs, metrics, pages


def test_request_id_and_refusal_are_in_the_log(service):
    assert service.ask(body=IMAGE, X_Request_Id="my-own.id_7").headers["x-request-id"] == "my-own.id_7"
    assert len(service.ask(body=IMAGE, X_Request_Id="spaces are not taken").headers["x-request-id"]) == 32
    refused = service.ask(body=b"x", X_Request_Id="refused").json()["error"]["message"]
    long = service.ask(body=b"x", Cookie="x" * 20_000).json()["error"]["message"]
    for line in (
        {"request_id": "my-own.id_7", "path": "/v1/classify", "status": 200, "model": "first"},
        {"request_id": "refused", "error": refused}, {"error": long, "status": 400},
    ):  # fmt: skip
        # Written after the answer.
        until(lambda line=line: service.lines(**line), f"{line} in the log")


def test_metrics_count_requests_and_errors(local):
    local.ask("/v1/classify?statistics=sample", IMAGE)
    local.ask(body=b"hello")
    text = local.ask("/metrics").body.decode()
    for wanted in (
        'bkn_requests_total{method="POST",route="/v1/classify",status="200"}',
        'bkn_requests_total{method="POST",route="/v1/classify",status="415"}',
        'bkn_inference_seconds_count{model="first",statistics="sample"}',
        'bkn_queue_seconds_count{model="first"}', 'bkn_queue_length{model="first"} 0.0',
        'bkn_batch_size_sum{model="first"}', 'bkn_rejected_total{reason="unsupported_format"}',
        'bkn_model_loaded{model="first"} 1.0', "process_resident_memory_bytes",
    ):  # fmt: skip
        assert wanted in text


def test_documentation_runs_only_its_own_scripts(local):
    reply = local.ask("/docs")
    page, policy = reply.body.decode(), reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.split("style-src")[0]
    (inline,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode() in policy
    assert "//" not in page.replace(inline, "") + policy, "no other host, in any spelling"


def test_openapi_lists_every_route_with_parameters_and_statuses(local):
    image = {"400", "401", "404", "408", "413", "415", "422", "429", "503", "504"}
    options = {"model", "statistics", "top_k"}
    wanted = {
        "/v1/classify": (image, options, "classify"),
        "/v1/classify/batch": (image - {"415"}, options, "classify"),
        "/models/{name}": (image, options | {"name"}, "classify"),
        "/v1/models": ({"401", "429"}, set(), "models"),
        "/v1/labels": ({"401", "404", "429"}, {"model"}, "models"),
        "/health/live": (set(), set(), "operation"),
        "/health/ready": ({"503"}, set(), "operation"),
        "/metrics": (set(), set(), "operation"),
    }
    paths = local.ask("/openapi.json").json()["paths"]
    assert paths.keys() == wanted.keys()
    for path, (statuses, parameters, tag) in wanted.items():
        (operation,) = paths[path].values()
        assert operation["responses"].keys() == statuses | {"200", "500"}
        assert {parameter["name"] for parameter in operation.get("parameters", [])} == parameters
        assert operation["tags"] == [tag]


# The guide


def test_curl_examples_of_the_guide_work(local, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(encoded(picture(), "JPEG"))
    examples = re.findall(r"^curl .*$", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        command = [*shlex.split(example.replace("http://127.0.0.1:8000", local.url)), "-sf", "--noproxy", "*"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
        assert json.loads(done.stdout)
