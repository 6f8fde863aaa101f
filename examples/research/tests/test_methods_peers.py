"""The options that plain, dcl and dcp share, and DCP's closest relatives, against their formulas by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.research.methods import Method, make
from examples.research.methods.companion import half_squared
from examples.research.tests.test_methods import (
    CLASSES,
    FEATURES,
    STEPS,
    advance,
    assert_close,
    assert_resumes,
    assert_same,
    batches,
    frozen,
    partners,
    setting,
    started,
    train,
)
from examples.research.tests.test_methods_formulas import (
    apply,
    by_hand,
    cross_entropy,
    descend,
    normed,
    probabilities,
    rate,
    twin,
)

WRAPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "dcl": {"weight": 0.5, "alpha": 0.3},
    "dcp": {"weight": 0.7, "alpha": 0.4, "update": "batch", "distance": "squared"},
}
# Each with what is used by hand below.
LOSSES: dict[str, float] = {
    "label_smoothing": 0.2,
    "logit_penalty": 0.6,
    "online_label_smoothing": 0.4,
    "center_loss": 0.5,
    "generalized": 0.7,
    "reverse": 0.3,
    "early_learning": 0.8,
}
ONE_CLASS = ("online_label_smoothing", "center_loss", "generalized", "reverse", "early_learning")
SHARED: list[dict[str, Any]] = [{name: value} for name, value in LOSSES.items()] + [{"mixup": 0.8}]
SHARED[-2]["early_learning_momentum"] = 0.6


def one_hot(y: Tensor) -> Tensor:
    return torch.eye(CLASSES, dtype=torch.float64)[y]


class Hand:
    """The training step of all three, written out for labels that are distributions."""

    def __init__(self, name: str, method: Method) -> None:
        self.model = twin(method)
        self.companion = twin(method, "companion") if "dcl" in name else None
        self.is_first = True  # the companion's first gradient is 0 but for rounding, and then its optimizer waits
        self.prototypes: list[Tensor | None] | None = [None] * CLASSES if "dcp" in name else None

    def step(self, epoch: int, x: Tensor, target: Tensor, task: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        z = self.model(x)
        loss = task(z, target)
        if self.companion is not None:
            c = self.companion(x)
            loss = loss + 0.5 / z.numel() * (z - c.detach()).square().sum()
            chase = (c - (0.3 * c + 0.7 * z).detach()).square().mean()
        if self.prototypes is not None:
            for row, shares in zip(z, target, strict=True):
                pairs = [(p, share) for p, share in zip(self.prototypes, shares, strict=True) if share > 0]
                if all(p is not None for p, _ in pairs):
                    loss = loss + 0.7 / z.numel() * (row - sum(share * p for p, share in pairs)).square().sum()
        descend(self.model, loss, epoch)
        if self.companion is not None:
            if not self.is_first:
                apply(self.companion, torch.autograd.grad(chase, list(self.companion.parameters())), rate(epoch))
            self.is_first = False
        if self.prototypes is not None:
            for k, share in enumerate(target.T):
                if share.sum() > 0:
                    mean, old = (share @ z.detach()) / share.sum(), self.prototypes[k]
                    self.prototypes[k] = mean if old is None else 0.4 * old + 0.6 * mean
        return z.detach()


class Task:
    """The loss of one option by hand, for labels that are distributions; S and c are lists of rows."""

    def __init__(self, option: str) -> None:
        self.option = option
        self.table = [torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)] * CLASSES
        self.right: list[list[Tensor]] = [[] for _ in range(CLASSES)]
        self.centres = [torch.zeros(CLASSES, dtype=torch.float64)] * CLASSES
        self.targets: dict[int, Tensor] = {}
        self.index: list[int] = []  # of this step's samples

    def __call__(self, z: Tensor, target: Tensor) -> Tensor:
        if self.option == "label_smoothing":
            return cross_entropy(z, 0.8 * target + 0.2 / CLASSES)
        if self.option == "logit_penalty":
            return cross_entropy(z, target) + 0.6 * (z * z).sum() / z.numel()
        if self.option == "online_label_smoothing":
            return 0.6 * cross_entropy(z, target) + 0.4 * cross_entropy(z, torch.stack(self.table)[target.argmax(1)])
        if self.option == "generalized":
            return torch.stack([(1 - share**0.7) / 0.7 for share in (probabilities(z) * target).sum(1)]).mean()
        if self.option == "reverse":
            logarithms = (target == 0).to(z) * math.log(1e-4)
            return cross_entropy(z, target) - 0.3 * (probabilities(z) * logarithms).sum() / len(z)
        if self.option == "early_learning":
            new = self.moved(z.detach())
            terms = [(1 - new[i] @ row).log() for i, row in zip(self.index, clamped(z), strict=True)]
            return cross_entropy(z, target) + 0.8 * sum(terms) / len(z)
        if self.option == "center_loss":
            away = [(row - self.centres[int(k)]).square().sum() for row, k in zip(z, target.argmax(1), strict=True)]
            return cross_entropy(z, target) + 0.25 * sum(away) / len(z)
        return cross_entropy(z, target)

    def moved(self, z: Tensor) -> dict[int, Tensor]:
        """The targets of this step's samples after it; the momentum is 0.6."""
        start = torch.zeros(CLASSES, dtype=torch.float64)
        rows = zip(self.index, clamped(z), strict=True)
        return {i: 0.6 * self.targets.get(i, start) + 0.4 * row / row.sum() for i, row in rows}

    def learn(self, z: Tensor, y: Tensor, last: bool) -> None:
        self.targets |= self.moved(z)
        centres = list(self.centres)
        for k in range(CLASSES):
            rows = z[y == k]
            self.right[k] += list(probabilities(rows[rows.argmax(1) == k]))
            moved = sum((self.centres[k] - row for row in rows), torch.zeros(CLASSES, dtype=torch.float64))
            centres[k] = self.centres[k] - 0.5 * moved / (1 + len(rows))
        self.centres = centres
        if last:
            for k, found in enumerate(self.right):
                uniform = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
                self.table[k] = torch.stack(found).mean(0) if found else uniform
            self.right = [[] for _ in range(CLASSES)]


def clamped(z: Tensor) -> Tensor:
    return probabilities(z).clamp(1e-4, 1 - 1e-4)


def mixed(x: Tensor, y: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Draw as the method does, and mix row by row."""
    concentration = torch.tensor(alpha, dtype=torch.float64)
    share, other = torch.distributions.Beta(concentration, concentration).sample(), torch.randperm(len(y))
    rows = [share * x[i] + (1 - share) * x[j] for i, j in enumerate(other.tolist())]
    labels = [share * one_hot(y[i]) + (1 - share) * one_hot(y[j]) for i, j in enumerate(other.tolist())]
    return torch.stack(rows), torch.stack(labels)


@pytest.mark.parametrize("shared", SHARED, ids=str)
@pytest.mark.parametrize("name", WRAPPED)
def test_the_training_step_with_each_option_is_the_one_written_out(name: str, shared: dict[str, Any]) -> None:
    option = next(iter(shared))
    method = started(name, by_hand(normed), **WRAPPED[name], **shared)
    hand, task = Hand(name, method), Task(option)
    for batch in batches():
        epoch, step, x, y, index = batch
        state = torch.get_rng_state()
        loss = advance(method, batch)
        torch.set_rng_state(state)
        x, target = mixed(x, y, 0.8) if option == "mixup" else (x, one_hot(y))
        task.index = index.tolist()
        expected = task(copy.deepcopy(hand.model)(x), target).detach()
        task.learn(hand.step(epoch, x, target, task), y, last=step == STEPS - 1)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-11)
    assert_close(method.networks()["model"], hand.model, 1e-11)
    if hand.companion is not None:
        assert_close(method.networks()["companion"], hand.companion, 1e-11)
    if hand.prototypes is not None:
        torch.testing.assert_close(method.main.optimizer.prototypes, torch.stack(hand.prototypes), rtol=0, atol=1e-11)
    if option == "online_label_smoothing":
        assert any(row.std() > 0 for row in task.table)  # something was classified right


def test_a_generalized_cross_entropy_near_zero_is_cross_entropy_and_smoothing_is_refused_with_it() -> None:
    z, y, index = torch.randn(8, CLASSES), torch.arange(8) % CLASSES, torch.arange(8)
    near = started("plain", generalized=1e-4).criterion
    torch.testing.assert_close(near(z, y, index), F.cross_entropy(z, y), rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match=r"generalized=0.5 takes the place of cross-entropy"):
        make("plain", setting(), generalized=0.5, label_smoothing=0.1)


def test_the_forward_weight_of_symmetric_cross_entropy_is_that_of_its_usual_term() -> None:
    """Two classes of four share the softmax: p = 1/2, 1/2, 0, 0."""
    z, y = torch.tensor([[0.0, 0.0, -50.0, -50.0]], dtype=torch.float64), torch.tensor([0])
    symmetric = started("plain", forward_weight=0.5, reverse=2.0).criterion
    expected = 0.5 * math.log(2) + 2 * 0.5 * 4 * math.log(10)
    assert symmetric(z, y, torch.tensor([5])).item() == pytest.approx(expected)


def test_terms_add_up() -> None:
    """On logits that a hand can follow: CE of uniform logits is log K."""
    chosen = {"logit_penalty": 0.25, "center_loss": 2.0}
    criterion = started("plain", **chosen).criterion
    z, y = torch.ones(2, CLASSES, dtype=torch.float64), torch.tensor([0, 1])
    index = torch.tensor([0, 1])
    expected = math.log(CLASSES) + 0.25 + 2.0 / 2 * CLASSES
    assert criterion(z, y, index).item() == pytest.approx(expected, abs=1e-12)


def test_a_class_not_classified_right_in_the_last_epoch_has_uniform_soft_labels() -> None:
    criterion = started("plain", online_label_smoothing=0.5).criterion
    z = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    criterion.learn(z, torch.tensor([0, 3]), torch.tensor([0, 1]))
    assert (criterion.table == 1 / CLASSES).all()
    criterion.end_epoch()
    torch.testing.assert_close(criterion.table[0], probabilities(z[:1])[0], rtol=0, atol=1e-12)
    assert (criterion.table[1:] == 1 / CLASSES).all()
    criterion.end_epoch()
    assert (criterion.table == 1 / CLASSES).all()


def trained(method: Method) -> list[Any]:
    return [*train(method), *frozen(method)]


# ---- what holds for every method holds with the options --------------------------------------------------------------

COMBINED: list[tuple[str, dict[str, Any]]] = [
    ("dcl", {"mixup": 0.4, **WRAPPED["dcl"]}),
    ("plain", {"early_learning": 2.0, "rho": 0.1}),
    ("dcp", {"rho": 0.1, **WRAPPED["dcp"]}),
    ("dcp", {"online_label_smoothing": 0.5, "center_loss": 0.1, "label_smoothing": 0.1, **WRAPPED["dcp"]}),
]


@pytest.mark.parametrize(("name", "options"), COMBINED, ids=str)
def test_a_resumed_run_with_options_equals_the_uninterrupted_one(name: str, options: dict[str, Any]) -> None:
    assert_resumes(lambda seed: started(name, seed=seed, **options), STEPS + 1)


@pytest.mark.parametrize("name", WRAPPED)
def test_options_of_zero_are_off_to_the_last_bit(name: str) -> None:
    off = dict.fromkeys([*LOSSES, "mixup", "rho"], 0.0)
    assert_same(*[trained(started(name, **WRAPPED[name], **options)) for options in ({}, off)])


@pytest.mark.parametrize("option", [*LOSSES, "mixup", "rho"])
def test_an_option_of_all_three_is_refused_by_name_where_it_is_out_of_range(option: str) -> None:
    for value in (-0.1, math.nan):
        with pytest.raises(ValueError, match=rf"{option}=.* must be in \[0"):
            make("dcp", setting(), **{option: value})


@pytest.mark.parametrize("option", ONE_CLASS)
def test_mixup_is_refused_where_a_term_needs_one_class_a_sample(option: str) -> None:
    with pytest.raises(ValueError, match=r"mixup=0.2 gives samples of two classes.*leave mixup or these out"):
        make("dcp", setting(), mixup=0.2, **{option: 0.5})


def counted(name: str, **options: Any) -> tuple[Method, dict[str, int]]:
    """A method, and how often its networks and their copies run forward and backward."""
    passes = {"forward": 0, "backward": 0}

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            passes["forward"] += 1
            z = super().forward(x)
            if z.requires_grad:
                z.register_hook(lambda gradient: passes.update(backward=passes["backward"] + 1))
            return z

    return started(name, setting(lambda: Counted(*normed())), **options), passes


@pytest.mark.parametrize("name", ["plain", "dcp"])
def test_sam_costs_a_second_pass(name: str) -> None:
    method, passes = counted(name, rho=0.1)
    for batch in batches():
        passes.update(forward=0, backward=0)
        advance(method, batch)
        assert passes == {"forward": 2, "backward": 2}
    assert method.cost == 2


def test_a_penalty_is_in_both_gradients_of_sam() -> None:
    """With a weight so large that one of them without it shows."""
    method = started("dcp", by_hand(normed), rho=0.3, weight=5.0, alpha=1.0, update="batch", distance="squared")
    net, prototypes = twin(method), {}
    for batch in batches(2):
        epoch, _, x, y, _ = batch
        advance(method, batch)
        start = [parameter.detach().clone() for parameter in net.parameters()]
        z = net(x)

        def penalized(z: Tensor, y: Tensor) -> Tensor:
            pulls = [(z[i] - prototypes[k]).square().mean() for i, k in enumerate(y.tolist()) if k in prototypes]
            return cross_entropy(z, y) + 5 * sum(pulls, torch.zeros(())) / len(y)

        first = torch.autograd.grad(penalized(z, y), list(net.parameters()))
        norm = math.sqrt(sum(float(part.square().sum()) for part in first))
        with torch.no_grad():
            for parameter, part in zip(net.parameters(), first, strict=True):
                parameter += 0.3 / norm * part
        ascended = copy.deepcopy(net)  # whose batch norm sees the batch again
        second = torch.autograd.grad(penalized(ascended(x), y), list(ascended.parameters()))
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), start, strict=True):
                parameter.copy_(value)
        apply(net, second, rate(epoch))
        for k in set(y.tolist()):
            prototypes.setdefault(k, z[y == k].detach().mean(0))
    assert_close(method.networks()["model"], net, 1e-6)


# ---- two samples of a class ------------------------------------------------------------------------------------------


def test_class_wise_distillation_holds_a_sample_to_another_of_its_class() -> None:
    method = started("cs-kd", by_hand(normed), weight=0.7, temperature=3.0)
    net = twin(method)
    for batch in batches():
        epoch, _, x, y, _ = batch
        state = torch.get_rng_state()
        advance(method, batch)
        torch.set_rng_state(state)
        z, other = net(x), net(partners(y)).detach()
        p, q = probabilities(other / 3), probabilities(z / 3)
        descend(net, cross_entropy(z, y) + 0.7 * 9 * (p * (p / q).log()).sum(1).mean(), epoch)
    assert_close(method.networks()["model"], net)


# ---- controls --------------------------------------------------------------------------------------------------------


def test_random_prototypes_are_there_from_the_start_and_stay() -> None:
    method = started("dcp", by_hand(), weight=0.5, random_prototypes=2.0, distance="squared")
    net, prototypes = twin(method), method.kept["prototypes"].weight.clone()
    assert 1.0 < float(prototypes.std()) < 3.0
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z = net(x)
        descend(net, cross_entropy(z, y) + 0.5 * (z - prototypes[y]).square().mean(), epoch)
    assert torch.equal(method.kept["prototypes"].weight, prototypes)
    assert_close(method.networks()["model"], net)
    same, twice, other = (
        started("dcp", seed=seed, random_prototypes=scale).kept["prototypes"].weight
        for seed, scale in ((0, 2.0), (0, 4.0), (1, 2.0))
    )
    torch.testing.assert_close(twice, 2 * same)
    assert not torch.equal(same, other)
    assert_resumes(lambda seed: started("dcp", seed=seed, random_prototypes=2.0), STEPS + 1)


def test_dcp_by_a_sum_of_class_means_is_equation_5_as_it_is_written() -> None:
    """By hand: a class weighs 1 in each batch, however many rows it has; its first batch has no penalty."""
    options = {"weight": 0.5, "alpha": 0.6, "update": "batch", "distance": "half-squared", "class_means": True}
    method = started("dcp", by_hand(), **options)
    net, prototypes = twin(method), {}
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z = net(x)
        loss = cross_entropy(z, y)
        for k in set(y.tolist()) & prototypes.keys():
            loss = loss + 0.5 * (z[y == k] - prototypes[k]).square().sum(1).mean() / 2
        means = {k: z[y == k].mean(0).detach() for k in set(y.tolist())}
        descend(net, loss, epoch)
        for k, mean in means.items():
            prototypes[k] = 0.6 * prototypes[k] + 0.4 * mean if k in prototypes else mean
    assert_close(method.networks()["model"], net)
    assert_resumes(lambda seed: started("dcp", seed=seed, **options), STEPS + 1)


def test_half_the_squared_norm_is_half_as_many_times_the_mean_as_there_are_classes() -> None:
    """For DCL, which is then the wrapper with such a function."""
    z, c = torch.tensor([[1.0, 3.0, 0.0, 2.0]]), torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert half_squared(z, c).tolist() == [4.5]
    assert "distance=half_squared" in repr(started("dcl", distance="half-squared").main.optimizer)


def test_random_prototypes_do_not_learn() -> None:
    with pytest.raises(ValueError, match=r"random_prototypes stay .* leave the prototypes' options out"):
        make("dcp", setting(), random_prototypes=1.0, alpha=0.97)


def test_dcl_reports_the_mean_of_both_softmaxes() -> None:
    method = started("dcl")
    train(method, 2)
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    model, companion, both = (predict(x) for predict in method.predictors().values())
    torch.testing.assert_close(probabilities(both), (probabilities(model) + probabilities(companion)) / 2)
    assert list(method.predictors()) == ["model", "companion", "mean of both"]
