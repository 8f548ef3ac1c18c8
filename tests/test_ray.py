"""The service on Ray, and `bkn-zoo classify --ray`; skipped where Ray is not installed."""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from attackers import encoded, picture
from service_process import ROOT, save_small_checkpoint

from bkn_zoo import cli
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


def double_of_ray():
    """Modules in the place of Ray's, which run what they are given at once, in this process."""

    class Dataset(list[dict[str, Any]]):
        def map_batches(self, worker, fn_constructor_args, batch_size, **_):
            call = worker(*fn_constructor_args)
            batches = [self[start : start + batch_size] for start in range(0, len(self), batch_size)]
            found = (call({"file": [row["file"] for row in batch]})["result"] for batch in batches)
            return Dataset({"result": result} for results in found for result in results)

        iter_rows = list.__iter__

    context = SimpleNamespace(execution_options=SimpleNamespace())
    data = SimpleNamespace(from_items=Dataset, DataContext=SimpleNamespace(get_current=lambda: context))
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}]
    ray = SimpleNamespace(
        data=data, init=lambda *_, **__: None, nodes=lambda: nodes, exceptions=SimpleNamespace(RayError=OSError)
    )
    return {"ray": ray, "ray.data": data}


def test_ray_s_workers_get_every_option_of_the_command(tmp_path, monkeypatch, capsys):
    save_small_checkpoint(tmp_path / "small", size=16)
    for number in range(17):
        (tmp_path / f"{number:02}.png").write_bytes(encoded(picture(number)))
    for name, module in double_of_ray().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    command = ["classify", ".", "--model", "./small", "--format", "csv", "--device", "cpu", "--engine", "torch"]
    command += ["--statistics", "sample", "--top-k", "3"]

    def rows(*flags):
        assert cli.main([*command, *flags]) == 0
        return capsys.readouterr().out

    low = rows("--precision", "bf16")
    assert rows("--precision", "bf16", "--ray") == low
    assert rows("--ray") == rows() != low, "in f32"


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_command_says_what_to_install(tmp_path, capsys):
    save_small_checkpoint(tmp_path / "small")
    (tmp_path / "photo.png").write_bytes(encoded(picture()))
    flags = ["classify", str(tmp_path / "photo.png"), "--model", str(tmp_path / "small"), "--engine", "torch", "--ray"]
    assert cli.main(flags) == 2
    assert "pip install 'bkn-zoo[ray]'" in capsys.readouterr().err
