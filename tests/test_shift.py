"""The study of robustness under distribution shift: corruptions, rules, the whole pipeline at toy size."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from attackers import encoded
from local_service import LocalService
from PIL import Image
from service_process import save_small_checkpoint
from studies import shift, shift_evaluate, shift_unlabelled
from studies.figures import plotted
from studies.full_length import drawn
from studies.regions import fill
from studies.shift_corruptions import CONSTANTS, MAIN, NAMES, SEVERITIES, corrupt
from studies.shift_evaluate import packed, roc_area, unpacked
from studies.shift_filters import plasma, replaced
from studies.shift_rules import (
    Adaptive,
    Watch,
    augmented,
    believing_by,
    instance_aware,
    mixed,
    norms,
    tent_online,
    tent_single,
)

from bkn_zoo import create_model
from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.inference.drift import Drift
from bkn_zoo.modes import MODES
from bkn_zoo.training.augmentation import generator
from service.batching import ModelQueue
from service.metrics import Metrics

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
pytestmark = pytest.mark.usefixtures("shallow_network")


def photographs(count, side=32):
    """Smooth random images, in bytes."""
    noise = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return (torch.nn.functional.interpolate(noise, side, mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


def trained(norm="bn", group=None):
    """A network whose running averages have seen images."""
    torch.manual_seed(0)
    model = create_model(f"inception_cifar_{norm}", 10)
    model.statistics_batch_size = group
    model.train()
    for _ in range(30):
        model(torch.randn(8, 3, 16, 16) + torch.randn(8, 3, 1, 1))
    return model.eval()


@pytest.mark.parametrize("side", CONSTANTS)
@pytest.mark.parametrize("name", NAMES)
def test_corruption_grows_with_severity(name, side):
    images = photographs({32: 16, 64: 4, 224: 1}[side], side)
    assert corrupt(images, name, 0) is images
    if side == 224 and name in ("defocus_blur", "elastic_transform"):
        return  # for which kernels are so large here that a test takes seconds
    results = [corrupt(images, name, severity, seed=3) for severity in SEVERITIES]
    assert all(result.dtype == torch.uint8 and result.shape == images.shape for result in results)
    assert torch.equal(results[1], corrupt(images, name, 2, seed=3))
    changes = [(result.float() - images.float()).abs().mean().item() for result in results]
    assert changes[0] > 0
    if name not in ("elastic_transform", "saturate", "spatter"):  # whose official constants do not
        assert changes[4] > changes[0]


def test_corruption_refuses_unknown_names():
    with pytest.raises(UnknownNameError, match="rain"):
        corrupt(photographs(1), "rain", 1)


def test_corruptions_are_those_of_the_benchmark():
    assert len(MAIN) == 15
    assert {len(levels) for of_side in CONSTANTS.values() for levels in of_side.values()} == {5}


def test_glass_blur_replaces_one_pixel_after_another():
    side, delta, count = 12, 2, 3
    line = torch.arange(side - delta, delta, -1)
    here = (line[:, None] * side + line).flatten()
    moves = torch.randint(-delta, delta, (2, len(here), count), generator=torch.Generator().manual_seed(0))
    there = here[:, None] + moves[0] * side + moves[1]
    pixels = torch.arange(side * side)[:, None].repeat(1, count)
    for row, at in zip(there, here, strict=True):
        pixels[at] = pixels.gather(0, row[None])[0]
    assert torch.equal(replaced(here, there, side * side), pixels)


def test_plasma_covers_zero_to_one():
    heights = plasma(3, 32, 2.0, generator("cpu", 0))
    assert heights.shape == (3, 1, 32, 32)
    assert torch.allclose(heights.amax((1, 2, 3)), torch.ones(3))
    assert torch.allclose(heights.amin((1, 2, 3)), torch.zeros(3))


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        (mixed(math.inf), "population"),
        (mixed(0), "sample"),
        (augmented(math.inf, 2), "population"),
        (augmented(0, 1), "sample"),
    ],
)
@torch.no_grad()
def test_mix_limits_are_the_modes(rule, mode):
    model, images = trained(), torch.randn(4, 3, 16, 16)
    with believing_by(model, rule):
        result = model(images, statistics="sample")
    assert torch.allclose(result, model(images, statistics=mode), atol=1e-5)


@pytest.mark.parametrize(("alpha", "mode"), [(0.0, "sample"), (1e9, "population")])
@torch.no_grad()
def test_instance_aware_limits_are_the_modes(alpha, mode):
    model, images = trained(), torch.randn(4, 3, 16, 16)
    with believing_by(model, instance_aware(model, images, alpha)):
        result = model(images, statistics="sample")
    assert torch.allclose(result, model(images, statistics=mode), atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "group", "base"), [("bn", None, "population"), ("bkn", 2, "population"), ("bkn", 2, "expected")]
)
@torch.no_grad()
def test_adaptive_with_infinite_k_is_its_base(norm, group, base):
    model, clean = trained(norm, group), torch.randn(64, 3, 16, 16)
    rule = Adaptive(1.0, base, group).fit(model, clean)
    with believing_by(model, rule):
        on_clean = model(clean, statistics="sample")
    assert torch.allclose(on_clean, model(clean, statistics=base), atol=1e-4)
    rule.clean = {layer: tuple(part._replace(k=math.inf) for part in parts) for layer, parts in rule.clean.items()}
    shifted = 5 * torch.randn(8, 3, 16, 16) + 7
    with believing_by(model, rule):
        result = model(shifted, statistics="sample")
    assert torch.allclose(result, model(shifted, statistics=base), atol=1e-4)


@torch.no_grad()
def test_adaptive_approaches_image_statistics_under_shift():
    model, clean = trained(), torch.randn(64, 3, 16, 16)
    rule = Adaptive(0.9).fit(model, clean)
    first = norms(model)[0]
    beliefs = {}

    def spying(layer, images, prior):
        belief = rule(layer, images, prior)
        if layer is first:
            beliefs["images"], beliefs["adapted"] = images, belief
        return belief

    with believing_by(model, spying):
        model(clean[:8] + 20, statistics="sample")
    distance = beliefs["adapted"].mean - beliefs["images"].mean
    assert distance.abs().max() < 0.1 * (first.running_mean - beliefs["images"].mean).abs().max()


@torch.no_grad()
def test_rules_do_not_depend_on_the_rest_of_the_batch():
    model, images = trained(), torch.randn(6, 3, 16, 16)
    for rule in (mixed(4), instance_aware(model, images, 4.0), Adaptive(0.5).fit(model, torch.randn(64, 3, 16, 16))):
        with believing_by(model, rule):
            together, alone = model(images, statistics="sample"), model(images[2:3], statistics="sample")
        assert torch.allclose(together[2:3], alone, atol=1e-4)


def test_tent_single_treats_images_alone():
    model, images = trained(), torch.randn(3, 3, 16, 16)
    together = tent_single(model, images)
    assert torch.allclose(together[1:2], tent_single(model, images[1:2]), atol=1e-4)
    assert not torch.equal(together, model(images, statistics="sample"))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tent_online_adapts_a_copy():
    model, images = trained(), torch.randn(8, 3, 16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapt = tent_online(model)
    assert not torch.equal(adapt(images), adapt(images))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_watch_scores_shifted_images_higher():
    model = trained()
    watch = Watch(model)
    with watch.watching():
        model(torch.randn(64, 3, 16, 16))
    with watch.watching():
        model(torch.randn(16, 3, 16, 16))
        clean = watch.score()
        model(3 * torch.randn(16, 3, 16, 16))
        shifted = watch.score()
    assert clean.shape == (16,)
    assert roc_area(shifted.numpy(), clean.numpy()) > 0.95


def test_roc_area_counts_ties_half():
    assert roc_area(np.array([1.0, 2.0]), np.array([1.0, 0.0])) == 0.875
    assert roc_area(np.ones(3), np.ones(4)) == 0.5


def test_packed_hits_can_be_read_back():
    counts = np.arange(76, dtype=np.uint8)
    assert np.array_equal(unpacked(packed(counts)), counts)


def test_blurred_images_lower_confidence_in_metrics():
    def classify(images, mode):
        """Whether stripes run down or across, by the differences between neighbours."""
        across, down = images.diff(dim=3).abs().mean((1, 2, 3)), images.diff(dim=2).abs().mean((1, 2, 3))
        return torch.stack([across, down], 1).mul(10).softmax(1)

    line = ModelQueue("stripes", classify, Metrics(), length=100)
    stripes = (torch.arange(32) // 2 % 2 * 255).to(torch.uint8).expand(8, 3, 32, 32)
    means = []
    for severity in (0, 5):
        for image in corrupt(stripes, "gaussian_blur", severity):
            line.submit(image / 255, "sample").result(60)
        labels = {"model": "stripes", "statistics": "sample"}
        means.append(line.metrics.registry.get_sample_value("bkn_confidence_sum", labels))
    assert line.metrics.registry.get_sample_value("bkn_confidence_count", labels) == 16
    line.close()
    assert means[1] - means[0] < 0.9 * means[0]


def textures(count, seed):
    """Images with details, of different brightness and contrast, in bytes."""
    source = torch.Generator().manual_seed(seed)
    level, contrast = (torch.rand(count, 1, 1, 1, generator=source) for _ in range(2))
    noise = torch.randn(count, 3, 32, 32, generator=source)
    return (255 * (0.3 + 0.4 * level + (0.1 + 0.1 * contrast) * noise)).clamp(0, 255).to(torch.uint8)


def as_file(image):
    return encoded(Image.fromarray(image.permute(1, 2, 0).numpy()))


@pytest.mark.parametrize("mode", ["population", "expected"])
def test_drift_of_usual_images_is_spread_evenly(mode):
    model = trained("bkn", 2)
    model.default_statistics = mode
    usual, more = (textures(count, seed) / 255 for count, seed in ((120, 0), (60, 1)))
    drift = Drift(model, usual)
    scores = drift(more)
    assert 0.3 < scores.mean() < 0.7
    assert torch.equal(drift(more[:1]), scores[:1])  # whatever else is in the batch
    assert drift(more * 0.2).min() > scores.mean()


def test_drift_asks_for_enough_usual_images():
    with pytest.raises(InputError, match="20 or more"):
        Drift(trained("bkn", 2), textures(19, 0) / 255)


def test_service_shows_drift_of_blurred_images_in_metrics(tmp_path):
    save_small_checkpoint(tmp_path / "small")
    (tmp_path / "usual").mkdir()
    for number, image in enumerate(textures(40, 0)):
        (tmp_path / "usual" / f"{number}.png").write_bytes(as_file(image))
    flags = ("--models", str(tmp_path / "small"), "--usual-images", str(tmp_path / "usual"))
    means = []
    with LocalService(*flags) as service:
        for severity in (0, 5):
            replies = [service.ask(body=as_file(image)) for image in corrupt(textures(8, 1), "gaussian_blur", severity)]
            assert all(0 <= reply.json()["drift"] <= 1 for reply in replies)
            means.append(service.metric('bkn_drift_sum{model="small"}') / 8)
        assert service.metric('bkn_drift_count{model="small"}') == 16
    assert means[0] < 0.8
    assert means[1] - means[0] > 0.95  # the blurred ones are more unusual than all that are usual


def write_cifar(folder):
    """Both data sets with a few images."""
    rng = np.random.default_rng(0)

    def write(name, count, key, classes):
        labels = rng.integers(0, classes, count)
        pixels = photographs(count).numpy().reshape(count, -1) // 2 + 10 * (labels[:, None] % 10).astype(np.uint8)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels.astype(np.uint8), key: labels.tolist()}))

    for number in range(1, 6):
        write(f"cifar-10-batches-py/data_batch_{number}", 40, b"labels", 10)
    write("cifar-10-batches-py/test_batch", 40, b"labels", 10)
    write("cifar-100-python/test", 40, b"fine_labels", 100)
    names = {b"label_names": [f"class {number}".encode() for number in range(10)]}
    (folder / "cifar-10-batches-py/batches.meta").write_bytes(pickle.dumps(names))


def few_sets(monkeypatch):
    """Two corruptions instead of 15, and one extra one."""
    corruptions = ("contrast", "gaussian_noise")
    monkeypatch.setattr(shift_evaluate, "MAIN", corruptions)
    monkeypatch.setattr(shift_evaluate, "EXTRA", ("saturate",))
    sets = [("clean", 0), *((name, severity) for name in corruptions for severity in SEVERITIES)]
    monkeypatch.setattr(shift_evaluate, "SETS", sets)
    return corruptions


def test_pipeline_trains_and_measures_twins(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    corruptions = few_sets(monkeypatch)
    arguments = [
        "--data", str(tmp_path), "--arms", "bn128", "bkn2", "--seeds", "0", "--epochs", "1", "--device", "cpu",
        "--images", "20", "--chunk", "10", "--tuning", "10", "--fitted", "20", "--published",
        "--output", str(tmp_path / "runs"), "--results", str(tmp_path / "results"),
    ]  # fmt: skip
    args = shift.parse(arguments)
    whole = shift.recipe_of
    monkeypatch.setattr(shift, "recipe_of", lambda *of: shift.dataclasses.replace(whole(*of), gradient_batch=32))
    for arm in args.arms:
        shift.folder_of(arm, 0, args).mkdir(parents=True)
        shift.train(arm, 0, args)
    shift.measure("0", args)
    record = json.loads((tmp_path / "results" / "cifar10.bn128.seed=0.json").read_text())
    assert record["images"] == 20
    wanted = {"population", "sample", "mix, tuned", "IABN, tuned", "AugBN, tuned", "TENT online"}
    assert set(record["methods"]) >= wanted
    population = record["methods"]["population"]
    assert len(unpacked(population["shifted_hits"])) == 20
    assert population["shifted"] == pytest.approx(100 * unpacked(population["shifted_hits"]).mean() / 10, abs=1e-3)
    assert set(population["by_corruption"]) == set(corruptions)
    assert set(record["roc_areas"]["unknown classes"]) == set(shift_evaluate.SCORES)
    other = json.loads((tmp_path / "results" / "cifar10.bkn2.seed=0.json").read_text())
    assert set(other["methods"]) >= {"population", "sample", "expected", "adaptive from expected, tuned"}
    assert other["recipe"]["statistics_batch_size"] == 2


def test_unlabelled_arms_learn_and_are_measured(tmp_path, monkeypatch):
    write_cifar(tmp_path)
    few_sets(monkeypatch)
    monkeypatch.setattr(shift_unlabelled, "BATCH", 64)
    arguments = [
        "--data", str(tmp_path), "--seed", "0", "--augmented", "--epochs", "1", "--width", "8", "--sizes", "16",
        "--steps", "2", "--images", "4", "--chunk", "4", "--tuning", "4", "--fitted", "16", "--device", "cpu",
        "--results", str(tmp_path),
    ]  # fmt: skip
    shift_unlabelled.measure(shift_unlabelled.parse(arguments))
    record = json.loads((tmp_path / "cifar10.unlabelled.jitter.seed=0.json").read_text())
    learned = {"A, R and q, 16 images", "R and q, A = 0, 16 images", "scales and shifts, 16 images"}
    assert set(record["methods"]) >= {"population", "mix, N = 4", "adaptive from population, tuned", *learned}
    assert record["augmented"]


def test_page_is_that_of_the_records():
    ((page, contents),) = shift.STUDY.regions(shift.STUDY.records(shift.STUDY.results)).items()
    text = page.read_text()
    assert fill(text, contents) == text
    assert "Not measured yet" not in text


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir()))
def test_every_card_has_a_row_under_shift_for_each_mode(name):
    card = (CHECKPOINTS / name / "README.md").read_text()
    section = card.partition("### Under distribution shift")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == list(MODES)
    assert all(0 < float(shifted) < float(clean) < 100 for _, clean, shifted in rows)


def test_plot_is_that_of_the_records():
    pytest.importorskip("matplotlib")
    records = shift.STUDY.records(shift.STUDY.results)
    (drawn_now,) = [plotted(figure) for figure in shift.STUDY.figures(records).values()]
    assert drawn(shift.STUDY.plots / "shift.png") == drawn_now
