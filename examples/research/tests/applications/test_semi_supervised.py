"""FixMatch with and without DCL: a training by hand, the same batches for both, the labels, CIFAR-10."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from examples.research import records
from examples.research.applications import semi_supervised
from examples.research.applications.comparison import main
from examples.research.applications.fixmatch import fixmatch_loss
from examples.research.applications.semi_supervised import APPLICATION, labelled, train
from examples.research.datasets import load

SMALL = dict(APPLICATION.settings) | {"data": "digits", "train_size": 120, "labels": 20, "network": "small-cnn-quarter"}
SMALL |= {"steps": 6, "batch_size": 4, "ratio": 2, "threshold": 0.15}


def score(**changed):
    texts = []
    settings = SMALL | {"weight": None, "seed": 1, "device": torch.device("cpu"), "progress": texts.append} | changed
    return train(**settings), texts


@pytest.fixture
def trained(monkeypatch):
    """The networks that were deployed, by way of the measurement of their accuracy."""
    networks, measure = [], semi_supervised.accuracy

    def kept(model, *arguments):
        networks.append(model.module)
        return measure(copy.deepcopy(model).float(), *arguments)

    monkeypatch.setattr(semi_supervised, "accuracy", kept)
    return networks


@pytest.mark.parametrize(("threshold", "unlabelled_weight"), [(0.0, 1.0), (0.3, 0.5)])
def test_training_with_dcl_is_algorithm_1_by_hand_over_all_rows(threshold, unlabelled_weight, trained, monkeypatch):
    """Two networks side by side; the penalty is the mean over all 3·4 rows and 10 classes, with the factor 1.

    With as many unlabelled images as labelled ones and no threshold, the factor would be read off the gradient as 2.
    """
    seen, initial, real_batches, build = [], [], semi_supervised.batches, semi_supervised.networks.build

    def recorded(*arguments):
        for x, y in real_batches(*arguments):
            seen.append((x.double(), y))
            yield seen[-1]

    def built(*arguments):
        initial.append(build(*arguments).double())
        return copy.deepcopy(initial[0])

    monkeypatch.setattr(semi_supervised, "batches", recorded)
    monkeypatch.setattr(semi_supervised.networks, "build", built)
    settings = {"threshold": threshold, "unlabelled_weight": unlabelled_weight, "ratio": 1, "weight_decay": 0.1}
    score(**settings, weight=1.0)
    theta, omega = initial[0], copy.deepcopy(initial[0])
    steppers = [_stepper(network) for network in (theta, omega)]
    for k, (x, y) in enumerate(seen):
        z, c = theta(x), omega(x)
        loss = fixmatch_loss(z[:4], y, z[4:8], z[8:], threshold, unlabelled_weight)[0]
        penalty = ((z - c.detach()) ** 2).sum() / 120
        ((c - 0.6 * c.detach() - 0.4 * z.detach()) ** 2).sum().div(120).backward()
        (loss + penalty).backward()
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = SMALL["lr"] * math.cos(7 * math.pi * k / (16 * SMALL["steps"]))
            if stepper is steppers[0] or k > 0:  # the companion's first gradient is 0 but for rounding
                stepper.step()
            stepper.zero_grad()
    assert penalty > 1e-5
    for found, expected in zip(trained[0].state_dict().values(), theta.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _stepper(network):
    kernels = [weight for weight in network.parameters() if weight.ndim > 1]
    rest = [weight for weight in network.parameters() if weight.ndim == 1]
    options = {"momentum": 0.9, "nesterov": True, "lr": 1.0}
    return torch.optim.SGD([{"params": kernels, "weight_decay": 0.1}, {"params": rest}], **options)


def test_without_weight_dcl_equals_plain_bit_for_bit_and_with_weight_it_does_not(trained):
    network = {"network": "cnn"}  # has dropout, whose draws must be the same
    (plain, texts), _, _ = score(**network), score(**network, weight=0.0), score(**network)
    score(**network, weight=1.0)
    weights = [torch.cat([v.flatten().double() for v in one.state_dict().values()]) for one in trained]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    assert 0 <= plain <= 100
    assert texts[-1].startswith("step 6/6, loss ")


def test_rows_of_a_seed_see_the_same_batches_and_other_seeds_others(monkeypatch):
    seen, real = [], semi_supervised.batches

    def recorded(*arguments):
        seen.append([])
        for x, y in real(*arguments):
            seen[-1].append((x.clone(), y))
            yield x, y

    monkeypatch.setattr(semi_supervised, "batches", recorded)
    for changed in ({}, {"weight": 1.0}, {"seed": 2}):
        score(**changed, network="cnn")
    plain, companion, other = seen
    assert len(plain) == SMALL["steps"]
    assert all(torch.equal(a, b) for p, c in zip(plain, companion, strict=True) for a, b in zip(p, c, strict=True))
    assert not torch.equal(plain[0][0], other[0][0])


def test_the_average_is_the_mean_of_the_weights_until_its_decay_is_reached(trained, monkeypatch):
    steps, real = [], semi_supervised.moving_average

    def recorded(model, decay, warm_up):
        average = real(model, decay, warm_up)
        update = average.update_parameters

        def updated(network):
            steps.append(network[0].weight.detach().clone())
            update(network)

        average.update_parameters = updated
        return average

    monkeypatch.setattr(semi_supervised, "moving_average", recorded)
    score(average=0.999)
    torch.testing.assert_close(trained[0][0].weight, torch.stack(steps).mean(0))
    score(average=0.0)
    assert torch.equal(trained[1][0].weight, steps[-1])


def test_labels_are_spread_over_the_classes_and_none_is_in_validation_or_test():
    data = load("digits", train_size=200)
    x, y = (torch.cat(some) for some in zip(*data.fixed("train"), strict=True))
    chosen = labelled(y, 40, seed=0)
    assert torch.bincount(y[chosen]).tolist() == [4] * 10
    assert len(set(chosen.tolist())) == 40
    assert torch.equal(chosen, labelled(y, 40, seed=0))
    assert not torch.equal(chosen, labelled(y, 40, seed=1))
    used = {tuple(picture.flatten().tolist()) for picture in x}
    for part in ("validation", "test"):
        held_out = {tuple(picture.flatten().tolist()) for some, _ in data.fixed(part) for picture in some}
        assert len(held_out) > 200
        assert not used & held_out


@pytest.mark.parametrize("count", [-5, 0, 9, 201])
def test_too_few_or_too_many_labels_are_refused(count):
    y = torch.arange(200) % 10
    with pytest.raises(ValueError, match=f"labels={count} must be at most the 200"):
        labelled(y, count, seed=0)


def test_errors_name_what_to_do():
    for changed, message in (
        ({"steps": 0}, "steps=0"),
        ({"average": 1.5}, "average=1.5"),
        ({"together": 0}, "together=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"ratio": 0}, "ratio=0"),
        ({"part": "tests"}, "part='tests' is unknown"),
        ({"data": "cifar"}, "name='cifar' is unknown"),
    ):
        with pytest.raises(ValueError, match=message):
            score(**changed)


def test_the_command_trains_every_row(tmp_path, capsys):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if value is not None]
    main(APPLICATION, semi_supervised.__doc__, [*arguments, "--seeds", "2", "--device", "cpu", f"--results={tmp_path}"])
    assert "| FixMatch, DCL, paper | " in capsys.readouterr().out
    found = records.read(tmp_path / "application-semi-supervised.jsonl")
    assert [r["label"] for r in found] == list(APPLICATION.rows) * 2
    assert all(r["score"] == score(weight=r["configuration"]["weight"], seed=r["seed"])[0] for r in found[:3])
