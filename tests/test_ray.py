"""The service on Ray; skipped where Ray is not installed."""

from importlib.util import find_spec

import pytest
import yaml
from service_process import ROOT

from service.settings import Settings, read_settings


def file():
    return yaml.safe_load((ROOT / "deploy" / "ray.yaml").read_text())


def test_serve_deploy_file_names_what_exists():
    (application,) = file()["applications"]
    module, _, function = application["import_path"].partition(":")
    package, _, room = module.partition(".")
    assert f"package-dir = {{ {package} = " in (ROOT / "pyproject.toml").read_text()
    source = (ROOT / "service" / f"{room}.py").read_text()
    assert f"def {function}(" in source
    assert f'name="{application["deployments"][0]["name"]}"' in source
    assert application["args"].keys() <= Settings.model_fields.keys()
    assert read_settings([f"--{name.replace('_', '-')}={value}" for name, value in application["args"].items()])
    assert file()["http_options"]["host"] == "127.0.0.1"


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_accepts_the_file_and_its_limits_exceed_ours():
    from ray.serve.schema import ServeDeploySchema

    from service.distributed import application

    ServeDeploySchema.model_validate(file())
    deployment = application({"queue_length": 7, "deadline": 9})._bound_deployment
    assert deployment.max_ongoing_requests > Settings().loaded_models * 8
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 9
