"""What runs the service elsewhere: the Dockerfile's commands, compose, the manifests; and a proxy in front."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from service_process import ROOT, ServiceProcess, save_small_checkpoint

from bkn_zoo import __version__
from service.settings import Settings, read_settings


class Instruction(NamedTuple):
    name: str
    text: str

    def words(self):
        """Of the exec form, which runs without a shell."""
        return json.loads(self.text[self.text.index("[") :])


def stages():
    """Those of the Dockerfile, each with all of the stage that it is built from."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    found = {}
    for line in filter(str.strip, text.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            source, _, stage = rest.partition(" AS ")
            here = found[stage] = list(found.get(source, [Instruction("FROM", source)]))
        else:
            here.append(Instruction(name, rest.strip()))
    return found


TARGETS = {name: stage for name, stage in stages().items() if name != "base"}


def last(stage, name):
    return [instruction for instruction in stage if instruction.name == name][-1]


def variables(stage):
    pairs = [pair for instruction in stage if instruction.name == "ENV" for pair in instruction.text.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def documents(name):
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """What ENTRYPOINT and CMD start, with the image's environment but for its addresses."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "first")
    program, *command = [*last(TARGETS["cpu"], "ENTRYPOINT").words(), *last(TARGETS["cpu"], "CMD").words()]
    run = (str(Path(sys.executable).with_name(program)), *command)
    here = {"BKN_ZOO_HOST": "127.0.0.1", "BKN_ZOO_CHECKPOINTS": str(folder), "HOME": str(folder)}
    environment = variables(TARGETS["cpu"]) | here
    with ServiceProcess(folder, "--root-path", "bkn/", command=run, environment=environment) as process:
        yield process


def test_image_command_serves_and_its_health_check_tells(image):
    program, *check = last(TARGETS["cpu"], "HEALTHCHECK").words()
    assert program == "python"
    for port, healthy in ((image.port, True), (1, False)):
        environment = os.environ | {"BKN_ZOO_PORT": str(port)}
        done = subprocess.run([sys.executable, *check], env=environment, capture_output=True, timeout=60)
        assert (done.returncode == 0) is healthy


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_unprivileged_and_copy_what_exists(target):
    stage = TARGETS[target]
    assert stage[-1] == Instruction("USER", "10001:10001"), "nothing is done after it"
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert ignored[0] == "*"
    copied = [word for each in stage if each.name == "COPY" for word in each.text.split()[:-1]]
    for name in copied:
        assert (ROOT / name).exists() or name == "checkpoints"
        assert f"!{name}" in ignored
    # The package is installed from these alone, and with extras that it has.
    assert {"pyproject.toml", "README.md", "LICENSE", "bkn_zoo", "service", "checkpoints"} == set(copied)
    runs = " ".join(each.text for each in stage if each.name == "RUN")
    extras = re.search(r'"/source\[([\w,]+)\]"', runs)
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras[1].split(","))
    assert last(stage, "EXPOSE").text == variables(stage)["BKN_ZOO_PORT"] == "8000"
    assert list(stages())[-1] == "cpu"  # the default, and the small one
    assert ("/whl/cpu" in runs) == (target == "cpu")


def test_compose_builds_what_exists_and_waits_for_a_drain():
    (found,) = documents("compose.yaml")
    settings, proxy = Settings(), found["services"].pop("proxy")
    assert (ROOT / "deploy" / proxy["volumes"][0].partition(":")[0]).exists()
    for service in found["services"].values():
        assert service["build"]["target"] in TARGETS
        assert (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").exists()
        assert service["stop_grace_period"] == "40s"
        assert settings.drain_seconds + settings.deadline < 40
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+:8000", port) for port in service["ports"])


def test_kubernetes_probes_exist_and_a_drain_has_time(image, monkeypatch):
    kinds = {document["kind"]: document for document in documents("kubernetes.yaml")}
    deployment, pod = kinds["Deployment"]["spec"], kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"].endswith(f"/bkn-zoo:{__version__}")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(variables(TARGETS["cpu"])["BKN_ZOO_PORT"])}
    assert kinds["Service"]["spec"]["ports"][0]["targetPort"] in ports
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["timeoutSeconds"] >= 2, "the default of 1 s is less than a busy node may take"
        asked = container[probe]["httpGet"]
        assert asked["port"] in ports
        assert image.ask(asked["path"]).status == 200
    monkeypatch.setenv("BKN_ZOO_API_KEYS", "secret")
    assert container["args"][0] == last(TARGETS["cpu"], "CMD").words()[0]
    settings = read_settings(container["args"][1:])
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    notices = container["readinessProbe"]["periodSeconds"] * container["readinessProbe"]["failureThreshold"]
    assert notices < float(seconds) + settings.drain_seconds, "a drain is noticed in time"
    patience = float(seconds) + settings.drain_seconds + settings.deadline
    assert patience < pod["terminationGracePeriodSeconds"]
    user = pod["securityContext"]
    assert user["runAsNonRoot"]
    assert f"{user['runAsUser']}:{user['runAsGroup']}" == last(TARGETS["cpu"], "USER").text
    assert kinds["Service"]["spec"]["selector"].items() <= deployment["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("prefix", ["", "/bkn"])
def test_proxy_may_remove_or_keep_the_path(image, prefix):
    paths = ("/", "/static/page.js", "/v1/models", "/health/ready", "/metrics", "/docs", "/openapi.json")
    found = {path: image.ask(prefix + path) for path in paths}
    assert {reply.status for reply in found.values()} == {200}
    assert found["/openapi.json"].json()["servers"] == [{"url": "/bkn"}], "so that /docs asks where the proxy is"
    assert b"'openapi.json'" in found["/docs"].body, "which is found beside it"
    assert b'route="/v1/models"' in image.ask(f"{prefix}/metrics").body, "by the route's own name"
