"""What every training method of the paper's experiments keeps: resumption, harmless predictions, seeds, its limits."""

from __future__ import annotations

import copy
import functools
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._pytree import tree_leaves

from examples.research.methods import METHODS, NAMES, Method, Setting, make

SAMPLES, BATCH, FEATURES, CLASSES, EPOCHS = 24, 8, 6, 4, 4
STEPS = SAMPLES // BATCH

# Options that bring what a method adds into the first epochs.
EARLY: dict[str, dict[str, Any]] = {"saf": {"lag": 1, "start": 1}, "mean-teacher": {"ramp_up": 1}}


def network(width: int = 8, batch_norm: bool = True, dropout: float = 0.3) -> nn.Sequential:
    norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
    layers = (nn.Linear(FEATURES, width), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, CLASSES))
    return nn.Sequential(*layers).double()


def setting(build: Callable[[], nn.Module] = network, momentum: float = 0.9, epochs: int = EPOCHS) -> Setting:
    return Setting(
        build=build,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=momentum, weight_decay=1e-2),
        classes=CLASSES,
        epochs=epochs,
        samples=SAMPLES,
        device=torch.device("cpu"),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, epochs),
        partners=partners,
    )


def partners(labels: Tensor) -> Tensor:
    """Other inputs of these classes."""
    return 0.5 * labels[:, None] + torch.randn(len(labels), FEATURES, dtype=torch.float64)


def started(name: str, given: Setting | None = None, seed: int = 0, **options: Any) -> Method:
    torch.manual_seed(seed)
    return make(name, given or setting(), **(options or EARLY.get(name, {})))


def batches(epochs: int = EPOCHS) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Epoch, step, inputs, labels, indices: the samples in another order each epoch, with noise of its own."""
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    for epoch in range(epochs):
        order = torch.randperm(SAMPLES, generator=generator)
        for step, index in enumerate(order.split(BATCH)):
            noise = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
            yield epoch, step, samples[index] + 0.3 * noise, labels[index], index


def advance(method: Method, batch: tuple[int, int, Tensor, Tensor, Tensor]) -> Tensor:
    _, step, x, y, index = batch
    loss = method.step(x, y, index)
    if step == STEPS - 1:
        method.end_epoch()
    return loss


def train(method: Method, epochs: int = EPOCHS) -> list[Tensor]:
    return [advance(method, batch) for batch in batches(epochs)]


def frozen(method: Method) -> list[Any]:
    """A copy of all that belongs to a method's state, the random stream included."""
    return tree_leaves(copy.deepcopy(method.state_dict()))


def assert_same(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def assert_close(left: nn.Module, right: nn.Module, tolerance: float = 1e-12) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance)


def assert_resumes(start: Callable[[int], Method], saved_after: int) -> None:
    """Hold a run that was saved after some batches, and loaded into one of another seed, against the whole one."""
    whole = start(0)
    losses = train(whole)

    first, todo = start(0), list(batches())
    for batch in todo[:saved_after]:
        advance(first, batch)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = start(99)
    torch.rand(3)
    second.load_state_dict(torch.load(file, weights_only=True))
    rest = [advance(second, batch) for batch in todo[saved_after:]]

    assert_same(losses[saved_after:], rest)
    assert_same(frozen(whole), frozen(second))
    x = todo[0][2]
    assert torch.equal(whole.predict(x), second.predict(x))


# ---- resumption, predictions, seeds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str) -> None:
    assert_resumes(lambda seed: started(name, seed=seed), STEPS + 1)


@pytest.mark.parametrize("name", NAMES)
def test_predictions_leave_state_modes_random_stream_and_the_run_as_they_were(name: str) -> None:
    undisturbed = started(name)
    train(undisturbed)
    x = torch.randn(5, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    method = started(name)
    assert method.networks()  # which makes the companion, so that it is in the state
    for batch in batches():
        before, modes = frozen(method), [m.training for n in method.networks().values() for m in n.modules()]
        for predict in [method.predict, *method.predictors().values()]:
            logits = predict(x)
            assert logits.shape == (5, CLASSES)
            assert not logits.requires_grad
            assert torch.equal(logits, predict(x))
            assert torch.equal(logits[:1].argmax(), predict(x[:1]).argmax())  # batch norm does not look at the batch
        assert_same(before, frozen(method))
        assert modes == [m.training for n in method.networks().values() for m in n.modules()]
        advance(method, batch)
    assert_same(frozen(undisturbed), frozen(method))


@pytest.mark.parametrize("name", NAMES)
def test_a_network_predicts_in_evaluation_mode_and_the_first_predictor_is_deployed(name: str) -> None:
    method = started(name)
    train(method, 2)
    x = next(batches())[2]
    predictors = method.predictors()
    assert torch.equal(method.predict(x), next(iter(predictors.values()))(x))
    for key, net in method.networks().items():
        assert torch.equal(predictors[key](x), copy.deepcopy(net).eval()(x))


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_the_run(name: str) -> None:
    runs = [started(name, seed=seed) for seed in (0, 0, 1)]
    losses = []
    for method, seed in zip(runs, (0, 0, 1), strict=True):
        torch.manual_seed(seed + 10)
        losses.append(train(method))
    assert_same(losses[0], losses[1])
    assert_same(frozen(runs[0]), frozen(runs[1]))
    assert not torch.equal(losses[0][0], losses[2][0])


# ---- the limits in which a method is plain training ------------------------------------------------------------------

REMOVED: dict[str, dict[str, Any]] = {
    "plain": {"label_smoothing": 0.0},
    "dcl": {"weight": 0.0},
    "dcp": {"weight": 0.0},
    "saf": {"weight": 0.0, "lag": 1, "start": 1},
    "dml": {"weight": 0.0},
    "ps-kd": {"alpha": 0.0},
    "mean-teacher": {"weight": 0.0},
    "voting": {"estimators": 3},
}


@pytest.mark.parametrize("name", REMOVED)
def test_without_what_it_adds_the_model_is_trained_plainly_to_the_last_bit(name: str) -> None:
    given = setting(functools.partial(network, dropout=0.0))
    plain, method = started("plain", given), started(name, given, **REMOVED[name])
    train(plain), train(method)
    assert_same(
        tree_leaves(plain.networks()["model"].state_dict()), tree_leaves(method.networks()["model"].state_dict())
    )


# ---- loss, cost, names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_returned_is_the_tasks(name: str) -> None:
    given = setting(functools.partial(network, dropout=0.0))
    method = started(name, given)
    for batch in batches():
        _, _, x, y, _ = batch
        nets = list(method.networks().values()) if name in ("voting", "bagging") else [method.networks()["model"]]
        expected = sum(-F.log_softmax(copy.deepcopy(net)(x), 1)[torch.arange(BATCH), y].mean() for net in nets)
        loss = advance(method, batch)
        assert loss.shape == ()
        assert not loss.requires_grad
        torch.testing.assert_close(loss, expected.detach() / len(nets), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_the_number_of_passes(name: str) -> None:
    passes: list[float] = []

    class Counted(nn.Sequential):
        """Copies count too."""

        def forward(self, x: Tensor) -> Tensor:
            passes.append(1.0 if torch.is_grad_enabled() else 1 / 3)
            return super().forward(x)

    method = started(name, setting(lambda: Counted(*network())))
    for batch in batches():
        passes.clear()
        advance(method, batch)
    assert sum(passes) == pytest.approx(method.cost)


def test_an_unknown_method_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(ValueError, match=r"'dlc' is unknown; choose one of plain, dcl, .*voting"):
        make("dlc", setting())


@pytest.mark.parametrize("name", ["plain", "dcl"])  # with options of its own, and with the optimizer's
def test_an_unknown_option_is_refused_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' has no option rhoo; it has .*{METHODS[name].options()[-1]}"):
        make(name, setting(), rhoo=1)


WRONG = [
    ("plain", "label_smoothing", 1.5),
    ("dcl", "weight", -1.0),
    ("dcp", "alpha", 2.0),
    ("dcp", "random_prototypes", -1.0),
    ("cs-kd", "weight", -1.0),
    ("cs-kd", "temperature", 0.0),
    ("gam", "rho", -0.1),
    ("gam", "rho_gradient", -0.1),
    ("gam", "gamma", -0.1),
    ("gam", "beta_0", 1.1),
    ("gam", "beta_1", -0.1),
    ("saf", "weight", -1.0),
    ("saf", "temperature", 0.0),
    ("saf", "lag", 0),
    ("saf", "start", 2),
    ("dml", "weight", -1.0),
    ("ps-kd", "alpha", 1.1),
    ("mean-teacher", "weight", -1.0),
    ("mean-teacher", "ramp_up", -1),
    ("mean-teacher", "decay", 1.1),
    ("voting", "estimators", 0),
    ("voting", "estimators", 1.5),
]


@pytest.mark.parametrize(("name", "option", "value"), WRONG)
def test_an_option_out_of_range_is_refused_by_name(name: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        make(name, setting(), **{option: value})


def test_sam_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ImportError, match="pip install pytorch_optimizer"):
        make("plain", setting(), rho=0.1)


def test_the_options_are_the_wrappers_that_change_what_is_learned() -> None:
    of_companions = {"companion", "companion_lr_scale", "companion_every", "companion_fraction"}
    assert {"weight", "alpha", "distance"} | of_companions <= set(METHODS["dcl"].options())
    assert {"weight", "alpha", "distance", "update"} <= set(METHODS["dcp"].options())
    with pytest.raises(ValueError, match="has no option strict"):
        make("dcl", setting(), strict=False)
