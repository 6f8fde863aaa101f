"""What the paper's rows are made of: networks by the size of the images, batches, ensembles, pretrained weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torchvision

from examples.research import datasets, methods, networks
from examples.research.configuration import Configuration
from examples.research.paper.images import Blank, load
from examples.research.paper.rows import Work
from examples.research.paper.session import Session
from examples.research.paper.training import Training, weights_file
from examples.research.tests import paper_files
from examples.research.tests.test_methods import setting


def multiplications(name, shape):
    """Of one image, in the convolutions and linear layers."""
    counts = []

    def count(module, inputs, output):
        weights = module.weight[0].numel() if isinstance(module, torch.nn.Conv2d) else module.in_features
        counts.append(output.numel() * weights)

    with torch.device("meta"):
        network = networks.build(name, 1000 if shape[1] == 224 else 100, shape).eval()
        for module in network.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
                module.register_forward_hook(count)
        network(torch.zeros(1, *shape))
    return sum(counts)


def test_a_resnet50_has_the_papers_multiplications():
    """Section 4.2: 1298 million for 32 pixels; its 4198 million for 224 are more than torchvision counts, 4.09e9."""
    assert multiplications("resnet50", (3, 32, 32)) == pytest.approx(1298e6, rel=0.01)
    assert multiplications("resnet50", (3, 224, 224)) == pytest.approx(4.09e9, rel=0.005)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "shufflenetv2"])
def test_from_128_pixels_on_a_network_is_torchvisions(name):
    theirs = getattr(torchvision.models, {"shufflenetv2": "shufflenet_v2_x1_0"}.get(name, name))().eval()
    ours = networks.build(name, 1000, (3, 224, 224)).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", networks.FOR_SMALL)
def test_a_network_for_small_images_is_refused_at_imagenets_size(name):
    with pytest.raises(ValueError, match=f"name is '{name}', whose stem is for images below 128 pixels; for 224x224"):
        networks.build(name, 10, (3, 224, 224))


def test_processes_share_each_batch_and_see_what_one_sees(files):
    def epoch(**options):
        data = datasets.load("cifar100", folder=files, validation=0.0, **options)
        return list(data.epoch(6, torch.Generator().manual_seed(0)))

    whole, parts = epoch(), [epoch(process=(rank, 2)) for rank in (0, 1)]
    assert [len(y) for _, y, _ in whole] == [6, 6, 4]
    for batch, *shares in zip(whole, *parts, strict=True):
        for tensor, one, two in zip(batch, *shares, strict=True):
            assert torch.equal(tensor[0::2], one)
            assert torch.equal(tensor[1::2], two)
    three = [epoch(process=(rank, 3)) for rank in range(3)]
    assert [[len(y) for _, y, _ in part] for part in three] == [[2, 2, 1]] * 3


def test_a_skipped_batch_changes_nothing_in_the_others(files):
    data = datasets.load("cifar100", folder=files, validation=0.0)
    assert data.sizes() == (4, 16, 4)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    whole, rest = list(data.epoch(6, generators[0])), list(data.epoch(6, generators[1], skip=2))
    assert len(rest) == 1
    assert all(torch.equal(one, two) for one, two in zip(whole[2], rest[0], strict=True))
    assert torch.equal(*(generator.get_state() for generator in generators))


def test_images_for_networks_from_imagenet_are_enlarged(files):
    small, large = (datasets.load(name, folder=files, validation=0.0) for name in ("cifar100", "cifar100-224"))
    assert large.shape == (3, 224, 224)
    x, _ = next(large.fixed("test"))
    assert x.shape == (4, 3, 224, 224)
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    shown = F.avg_pool2d(x * std + mean, 7)
    own, _ = next(small.fixed("test"))
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)))
    torch.testing.assert_close(shown[..., 4:-4, 4:-4], (own * std + mean)[..., 4:-4, 4:-4], rtol=0, atol=0.08)


def test_a_pretrained_network_has_the_weights_of_the_file_and_a_head_of_the_seed(files, tmp_path):
    paper_files.weights(tmp_path, ("shufflenetv2",))
    path, _ = weights_file("shufflenetv2", tmp_path)
    saved = torch.load(path)
    torch.save({name: value for name, value in saved.items() if "num_batches" not in name}, path)  # as older files
    work = Work(Configuration("cifar100-224", "shufflenetv2", "plain", 1, augmentation="basic"), pretrained=True)
    session = Session(torch.device("cpu"), tmp_path, tmp_path)
    data = load(work, replace(session, data=files), 0)
    one, two = (Training(work, seed, session, data).method.main.network.state_dict() for seed in (0, 1))
    assert torch.equal(one["conv5.0.weight"], saved["conv5.0.weight"])
    assert torch.equal(two["conv5.0.weight"], saved["conv5.0.weight"])
    assert one["fc.weight"].shape == (4, 1024)
    assert not torch.equal(one["fc.weight"], two["fc.weight"])


def fixmatch(seed=0, labels=10, steps=500):
    details = {"labels": labels, "ratio": 2, "threshold": 0.9, "unlabelled_weight": 1.0, "average": 0.9, "steps": steps}
    return Work(Configuration("cifar10", "mlp", "plain", 2, batch_size=4), "fixmatch", details)


def test_fixmatchs_batch_depends_on_its_number_alone(files, tmp_path):
    session = Session(torch.device("cpu"), files, tmp_path)
    whole, rest, other = (load(fixmatch(steps=3), session, seed) for seed in (0, 0, 1))
    batches = list(whole.epoch(4, torch.Generator()))
    assert [tuple(x.shape) for x, _, _ in batches] == [(4 + 2 * 8, 3, 32, 32)] * 3
    (x, y, _), (x_2, y_2, _) = batches[2], next(rest.epoch(4, torch.Generator(), skip=2))
    assert torch.equal(x, x_2)
    assert torch.equal(y, y_2)
    assert not torch.equal(next(other.epoch(4, torch.Generator()))[0], batches[0][0])
    assert not torch.equal(next(whole.epoch(4, torch.Generator()))[0], batches[0][0])  # the second epoch


def test_fixmatch_shows_each_image_once_in_a_pass(files, tmp_path):
    data = load(fixmatch(), Session(torch.device("cpu"), files, tmp_path), 0)
    next(data.epoch(4, torch.Generator()))
    shown = torch.cat([data._steps._drawn(step, 8, 4000, 1) for step in range(500)])
    assert sorted(shown.tolist()) == list(range(4000))
    assert shown.tolist() != sorted(shown.tolist())
    labelled = torch.cat([data._steps._drawn(step, 4, 10, 0) for step in range(5)])
    assert [sorted(part.tolist()) for part in labelled.split(10)] == [list(range(10))] * 2


def test_a_blank_data_set_has_the_size_of_the_real_one():
    blank = Blank("tiny-imagenet")
    assert (blank.classes, blank.shape, blank.train_size()) == (200, (3, 64, 64), 100_000)


def test_bagging_weighs_each_sample_by_its_draws():
    torch.manual_seed(0)
    method = methods.make("bagging", setting(), estimators=2)
    counts = method.kept["bootstrap"].counts
    samples = method.setting.samples
    assert counts.sum(1).tolist() == [samples, samples]
    assert not torch.equal(counts[0], counts[1])
    z, y, index = torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.tensor([5, 0, 2])
    by_hand = sum(counts[1, i] * -F.log_softmax(z, 1)[row, y[row]] for row, i in enumerate(index.tolist())) / 3
    torch.testing.assert_close(method._loss(1, z, y, index), by_hand)


def test_snapshots_are_the_states_at_the_ends_of_the_cycles():
    """Four epochs, two snapshots: the rate is back at its first value after two epochs, and nearly 0 before."""
    torch.manual_seed(0)
    method = methods.make("snapshot", replace(setting(), epochs=4), estimators=2)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    states, rates = [], []
    for _ in range(4):
        rates.append(method.main.optimizer.param_groups[0]["lr"])
        method.step(x, y, torch.arange(8))
        method.end_epoch()
        states.append({name: value.clone() for name, value in method.main.network.state_dict().items()})
    assert rates == pytest.approx([rates[0], rates[0] / 2] * 2)
    for snapshot, epoch in zip(method.kept["snapshots"], (1, 3), strict=True):
        assert all(torch.equal(value, states[epoch][name]) for name, value in snapshot.state_dict().items())
    softmaxes = torch.stack([F.softmax(one.eval()(x), 1) for one in method.kept["snapshots"]])
    torch.testing.assert_close(method.predict(x).exp(), softmaxes.mean(0))
