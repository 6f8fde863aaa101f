"""The options that plain, dcl, dcp and dcl-dcp share, and DCP's closest relatives, against their formulas by hand."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples.paper.methods import METHODS, Method, make
from tests.paper.test_paper_methods import (
    BATCH,
    CLASSES,
    FEATURES,
    STEPS,
    advance,
    assert_close,
    assert_resumes,
    assert_same,
    batches,
    frozen,
    network,
    partners,
    setting,
    started,
    train,
)
from tests.paper.test_paper_methods_formulas import (
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
    "dcl-dcp": {"dcl_weight": 0.5, "dcl_alpha": 0.3, "dcp_weight": 0.7, "dcp_alpha": 0.4},
}
# Each with what is used by hand below.
LOSSES: dict[str, float] = {
    "label_smoothing": 0.2,
    "confidence_penalty": 0.3,
    "logit_norm": 0.4,
    "logit_penalty": 0.6,
    "online_label_smoothing": 0.4,
    "center_loss": 0.5,
}
SHARED: list[dict[str, Any]] = [{name: value} for name, value in LOSSES.items()] + [
    {"mixup": 0.8},
    {"rho": 0.3},
]


def one_hot(y: Tensor) -> Tensor:
    return torch.eye(CLASSES, dtype=torch.float64)[y]


class Hand:
    """The training step of all four, written out for labels that are distributions."""

    def __init__(self, name: str, method: Method) -> None:
        self.model = twin(method)
        self.companion = twin(method, "companion") if "dcl" in name else None
        self.prototypes: list[Tensor | None] | None = [None] * CLASSES if "dcp" in name else None

    def evaluate(self, model: nn.Module, companion: nn.Module | None, x: Tensor, target: Tensor, task: Task) -> Any:
        z = model(x)
        loss, c = task(z, target), None
        if companion is not None:
            c = companion(x)
            loss = loss + 0.5 / z.numel() * (z - c.detach()).square().sum()
        if self.prototypes is not None:
            for row, shares in zip(z, target, strict=True):
                pairs = [(p, share) for p, share in zip(self.prototypes, shares, strict=True) if share > 0]
                if all(p is not None for p, _ in pairs):
                    loss = loss + 0.7 / z.numel() * (row - sum(share * p for p, share in pairs)).square().sum()
        return z, c, loss

    def step(
        self, epoch: int, x: Tensor, target: Tensor, task: Callable[[Tensor, Tensor], Tensor], rho: float
    ) -> Tensor:
        there, beside = copy.deepcopy(self.model), copy.deepcopy(self.companion)
        z, c, loss = self.evaluate(self.model, self.companion, x, target, task)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        if rho:
            norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
            with torch.no_grad():
                for parameter, gradient in zip(there.parameters(), gradients, strict=True):
                    parameter += rho / norm * gradient
            gradients = torch.autograd.grad(self.evaluate(there, beside, x, target, task)[2], list(there.parameters()))
        apply(self.model, gradients, rate(epoch))
        if self.companion is not None:
            chase = (c - (0.3 * c + 0.7 * z).detach()).square().mean()
            apply(self.companion, torch.autograd.grad(chase, list(self.companion.parameters())), rate(epoch))
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

    def __call__(self, z: Tensor, target: Tensor) -> Tensor:
        if self.option == "label_smoothing":
            return cross_entropy(z, 0.8 * target + 0.2 / CLASSES)
        if self.option == "confidence_penalty":
            p = probabilities(z)
            entropies = [-sum(share * share.log() for share in row) for row in p]
            return cross_entropy(z, target) - 0.3 * sum(entropies) / len(z)
        if self.option == "logit_norm":
            return cross_entropy(torch.stack([row / (0.4 * (row.square().sum().sqrt() + 1e-7)) for row in z]), target)
        if self.option == "logit_penalty":
            return cross_entropy(z, target) + 0.6 * (z * z).sum() / z.numel()
        if self.option == "online_label_smoothing":
            return 0.6 * cross_entropy(z, target) + 0.4 * cross_entropy(z, torch.stack(self.table)[target.argmax(1)])
        if self.option == "center_loss":
            away = [(row - self.centres[int(k)]).square().sum() for row, k in zip(z, target.argmax(1), strict=True)]
            return cross_entropy(z, target) + 0.25 * sum(away) / len(z)
        return cross_entropy(z, target)

    def learn(self, z: Tensor, y: Tensor, last: bool) -> None:
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
    (option,) = shared
    method = started(name, by_hand(normed), **WRAPPED[name], **shared)
    hand, task = Hand(name, method), Task(option)
    for batch in batches():
        epoch, step, x, y, _ = batch
        state = torch.get_rng_state()
        loss = advance(method, batch)
        torch.set_rng_state(state)
        x, target = mixed(x, y, 0.8) if option == "mixup" else (x, one_hot(y))
        expected = task(copy.deepcopy(hand.model)(x), target).detach()
        z = hand.step(epoch, x, target, task, shared.get("rho", 0.0))
        task.learn(z, y, last=step == STEPS - 1)
        tolerance = 1e-7 if option == "rho" else 1e-11  # pytorch_optimizer takes the norm in float32
        torch.testing.assert_close(loss, expected, rtol=0, atol=tolerance)
    assert_close(method.networks()["model"], hand.model, tolerance)
    if hand.companion is not None:
        assert_close(method.networks()["companion"], hand.companion, tolerance)
    if hand.prototypes is not None:
        own = method.prototypes
        ours = method.main.optimizer.prototypes if own is None else own.values
        torch.testing.assert_close(ours, torch.stack(hand.prototypes), rtol=0, atol=tolerance)
    if option == "online_label_smoothing":
        assert any(row.std() > 0 for row in task.table)  # something was classified right


def test_mixed_labels_have_the_mixed_loss_of_their_two_classes() -> None:
    method = started("plain", by_hand(), mixup=1.0)
    net, shares = twin(method), []
    for batch in batches():
        epoch, _, x, y, _ = batch
        torch.manual_seed(epoch)
        advance(method, batch)
        torch.manual_seed(epoch)
        one = torch.tensor(1.0, dtype=torch.float64)
        share, other = torch.distributions.Beta(one, one).sample(), torch.randperm(BATCH)
        z = net(share * x + (1 - share) * x[other])
        descend(net, share * cross_entropy(z, y) + (1 - share) * cross_entropy(z, y[other]), epoch)
        shares.append(float(share))
    assert 0 < min(shares) < max(shares) < 1
    assert_close(method.networks()["model"], net)


def test_the_logit_penalty_is_dcp_with_prototypes_of_zero() -> None:
    plain = started("plain", by_hand(normed), logit_penalty=0.6)
    held = started("dcp", by_hand(normed), weight=0.6, random_prototypes=1.0, distance="squared")
    held.prototypes.fix(torch.zeros(CLASSES, CLASSES))
    train(plain), train(held)
    assert_close(plain.networks()["model"], held.networks()["model"])


def test_terms_add_up() -> None:
    """On logits that a hand can follow: CE of uniform logits is log K, their entropy too."""
    chosen = {"confidence_penalty": 0.5, "logit_penalty": 0.25, "center_loss": 2.0}
    criterion = started("plain", **chosen).criterion
    z, y = torch.ones(2, CLASSES, dtype=torch.float64), torch.tensor([0, 1])
    expected = 0.5 * math.log(CLASSES) + 0.25 + 2.0 / 2 * CLASSES
    assert criterion(z, y).item() == pytest.approx(expected, abs=1e-12)
    criterion.learn(z, torch.tensor([2, 2]))  # c_2 = 0.5 · 2/3 of the way from 0 to 1
    assert criterion.centres[2].tolist() == pytest.approx([1 / 3] * CLASSES)
    assert not criterion.centres[[0, 1, 3]].any()
    assert criterion(z, torch.tensor([2, 2])).item() == pytest.approx(expected - CLASSES * (1 - 4 / 9), abs=1e-12)


def test_a_class_not_classified_right_in_the_last_epoch_has_uniform_soft_labels() -> None:
    criterion = started("plain", online_label_smoothing=0.5).criterion
    z = torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    criterion.learn(z, torch.tensor([0, 3]))
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
    (name, {**WRAPPED[name], **shared})
    for name, shared in (
        *(("dcl-dcp", shared) for shared in SHARED),
        ("plain", {"online_label_smoothing": 0.5, "center_loss": 0.1, "rho": 0.1}),
        ("dcl", {"mixup": 0.4, "rho": 0.1}),
        ("dcp", {"mixup": 0.4, "rho": 0.1, "logit_norm": 0.5}),
        ("dcp", {"online_label_smoothing": 0.5, "center_loss": 0.1, "label_smoothing": 0.1}),
    )
]


@pytest.mark.parametrize(("name", "options"), COMBINED, ids=str)
def test_a_resumed_run_with_options_equals_the_uninterrupted_one(name: str, options: dict[str, Any]) -> None:
    assert_resumes(lambda seed: started(name, seed=seed, **options), STEPS + 1)


@pytest.mark.parametrize("name", WRAPPED)
def test_options_of_zero_are_off_to_the_last_bit(name: str) -> None:
    off = dict.fromkeys([*LOSSES, "mixup", "rho"], 0.0)
    assert_same(*[trained(started(name, **WRAPPED[name], **options)) for options in ({}, off)])


@pytest.mark.parametrize("option", [*LOSSES, "mixup", "rho"])
@pytest.mark.parametrize("name", WRAPPED)
def test_an_option_of_all_four_is_refused_by_name_where_it_is_out_of_range(name: str, option: str) -> None:
    for value in (-0.1, math.nan):
        with pytest.raises(ValueError, match=rf"{option}=.* must be in \[0"):
            make(name, setting(), **{option: value})


@pytest.mark.parametrize("option", ["online_label_smoothing", "center_loss"])
def test_mixup_is_refused_where_a_term_needs_one_class_a_sample(option: str) -> None:
    with pytest.raises(ValueError, match=r"mixup=0.2 gives samples of two classes.*leave mixup or these out"):
        make("dcp", setting(), mixup=0.2, **{option: 0.5})


@pytest.mark.parametrize(("name", "cost"), [("plain", 2), ("dcp", 2), ("dcl", 10 / 3), ("dcl-dcp", 10 / 3)])
def test_sam_costs_a_second_pass_of_the_model_and_a_forward_of_the_companion(name: str, cost: float) -> None:
    passes: dict[str, int] = {"forward": 0, "backward": 0}

    class Counted(nn.Sequential):
        """Copies count too."""

        def forward(self, x: Tensor) -> Tensor:
            passes["forward"] += 1
            z = super().forward(x)
            if z.requires_grad:
                z.register_hook(lambda gradient: passes.update(backward=passes["backward"] + 1))
            return z

    method = started(name, setting(lambda: Counted(*network())), rho=0.1)
    for batch in batches():
        passes.update(forward=0, backward=0)
        advance(method, batch)
        assert passes["forward"] / 3 + passes["backward"] * 2 / 3 == pytest.approx(method.cost)
    assert method.cost == pytest.approx(cost)


def test_sam_is_plain_training_with_a_radius() -> None:
    assert_same(trained(started("sam")), trained(started("plain", rho=0.05)))


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


def test_without_its_weight_class_wise_distillation_is_plain_training_but_for_what_batch_norm_saw() -> None:
    plain, method = started("plain", by_hand()), started("cs-kd", by_hand(), weight=0.0)
    train(plain), train(method)
    assert_close(plain.networks()["model"], method.networks()["model"])


# ---- controls --------------------------------------------------------------------------------------------------------


def test_random_prototypes_are_there_from_the_start_and_stay() -> None:
    method = started("dcp", by_hand(), weight=0.5, random_prototypes=2.0, distance="squared")
    net, prototypes = twin(method), method.prototypes.values.clone()
    assert 1.0 < float(prototypes.std()) < 3.0
    for batch in batches():
        epoch, _, x, y, _ = batch
        advance(method, batch)
        z = net(x)
        descend(net, cross_entropy(z, y) + 0.5 * (z - prototypes[y]).square().mean(), epoch)
    assert torch.equal(method.prototypes.values, prototypes)
    assert_close(method.networks()["model"], net)
    same, twice, other = (
        started("dcp", seed=seed, random_prototypes=scale).prototypes.values
        for seed, scale in ((0, 2.0), (0, 4.0), (1, 2.0))
    )
    torch.testing.assert_close(twice, 2 * same)
    assert not torch.equal(same, other)
    assert_resumes(lambda seed: started("dcp", seed=seed, random_prototypes=2.0), STEPS + 1)


def test_random_prototypes_do_not_learn() -> None:
    with pytest.raises(ValueError, match=r"alpha=0.97 but random_prototypes stay as they are: leave alpha out"):
        make("dcp", setting(), random_prototypes=1.0, alpha=0.97)


@pytest.mark.parametrize(("options", "stays"), [({"companion_every": 10**9}, True), ({"alpha": 1.0}, False)])
def test_a_companion_that_never_learns_is_one_whose_turn_never_comes(options: dict[str, Any], stays: bool) -> None:
    """An alpha of 1 leaves the weight decay."""
    method = started("dcl", setting(normed), **options)
    before = copy.deepcopy(method.networks()["companion"])
    train(method)
    weights = zip(before.parameters(), method.networks()["companion"].parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in weights) == stays


def test_dcl_reports_the_mean_of_both_softmaxes() -> None:
    for name in ("dcl", "dcl-dcp"):
        method = started(name)
        train(method, 2)
        x = torch.randn(7, FEATURES, dtype=torch.float64)
        model, companion, both = (predict(x) for predict in method.predictors().values())
        torch.testing.assert_close(probabilities(both), (probabilities(model) + probabilities(companion)) / 2)
        assert list(method.predictors()) == ["model", "companion", "mean of both"]


# ---- dcl-dcp ---------------------------------------------------------------------------------------------------------


def test_the_alphas_of_both_are_the_wrappers() -> None:
    ours = inspect.signature(METHODS["dcl-dcp"].__init__).parameters
    for prefix, wrapper in (("dcl_", DCLOptimizer), ("dcp_", DCPOptimizer)):
        assert ours[prefix + "alpha"].default == inspect.signature(wrapper).parameters["alpha"].default
        assert ours[prefix + "weight"].default == 0.1


@pytest.mark.parametrize(("alone", "without"), [("dcl", "dcp_weight"), ("dcp", "dcl_weight")])
def test_without_one_of_its_weights_both_is_the_other(alone: str, without: str) -> None:
    given = setting(normed)
    options = {"weight": 0.5, "alpha": 0.3}
    further = {"distance": "squared"} | ({"update": "batch"} if alone == "dcp" else {})
    single = started(alone, given, **options, **further)
    both = started("dcl-dcp", given, **{without: 0.0, **{f"{alone}_{name}": value for name, value in options.items()}})
    train(single), train(both)
    for name, net in single.networks().items():
        assert_close(net, both.networks()[name])
