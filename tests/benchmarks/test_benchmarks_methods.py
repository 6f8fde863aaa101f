"""Each row of the benchmark is what its name says, and those that claim to train the same do."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.knobs import DEFAULT, EXACT, KNOBS, ROUNDING, rows_for
from benchmarks.methods import EMA_DECAY, METHODS, Row, companion_learning, plain_row, start
from benchmarks.script import Script, Training, sgd
from benchmarks.setting import Setting
from benchmarks.variants import VARIANTS
from benchmarks.workloads import ON_CPU, WORKLOADS
from dcl_optim import DCLOptimizer

MLP_PARAMETERS = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
DOUBLE = torch.float64


def script(workload: str = "mlp", rows: int = 16, variant: str = "") -> Script:
    """A small script in float64."""
    work = WORKLOADS[workload]
    batches = [(x[:rows], y[:rows]) for x, y in work.batches(dtype=DOUBLE)]
    model = work.model(dtype=DOUBLE)
    return Script(
        model, VARIANTS[variant](model, batches), dataclasses.replace(work, small=_doubled(work.small)), Setting()
    )


def _doubled(build):
    return lambda: build().double()


def trained(row: Row, steps: int, workload: str = "mlp") -> Training:
    training = row.build(script(workload, variant=row.variant))
    for _ in range(steps):
        training.step()
    return training


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient(model: nn.Module, batch) -> list[torch.Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), list(model.parameters())))


# ---- the same training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["mlp", "cnn"])
def test_the_wrapper_trains_what_the_handwritten_loop_trains(workload):
    """Otherwise their times could not be compared."""
    wrapped, written, plain = (trained(METHODS[n], 5, workload) for n in ("DCLOptimizer", "handwritten DCL", "plain"))
    for ours, theirs in ((wrapped.model, written.model), (wrapped.second, written.second)):
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(weights(wrapped.model), weights(plain.model))


@pytest.mark.parametrize("settings", ["", ", defaults"])
@pytest.mark.parametrize("method", ["DCL", "DCP"])
def test_the_term_trains_what_the_line_trains(method, settings):
    line, term = (trained(METHODS[f"{name}{settings}"], 5) for name in (f"{method}Optimizer", f"{method}, by the term"))
    torch.testing.assert_close(weights(term.model), weights(line.model), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "workload"), [*((method, "cnn") for method in METHODS), *(("DCLOptimizer", name) for name in ON_CPU)]
)
def test_methods_and_networks_take_steps(method, workload):
    work = dataclasses.replace(WORKLOADS[workload], batch_size=2)
    training = start(METHODS[method], work, warm_up=1)
    assert not torch.equal(weights(training.model), weights(work.model()))


@pytest.mark.parametrize("work", WORKLOADS.values(), ids=WORKLOADS)
def test_workloads_are_what_they_say(work):
    with torch.device("meta"):
        for model in [work.build()] + ([work.small()] if work.small else []):
            x = torch.empty(2, *work.shape, device="meta")
            assert model(x).shape == (2, work.classes)
    if work.small:
        with torch.device("meta"):
            full, small = (sum(p.numel() for p in build().parameters()) for build in (work.build, work.small))
        assert small < 0.6 * full


def test_a_diverging_method_is_not_timed():
    work = dataclasses.replace(
        WORKLOADS["mlp"], build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10), Explode())
    )
    with pytest.raises(RuntimeError, match="plain diverged"):
        start(METHODS["plain"], work)


class Explode(nn.Module):
    def forward(self, x):
        return x * float("inf")


def test_state_is_counted_exactly():
    copy_bytes = 4 * MLP_PARAMETERS
    prototypes_and_numbers = 4 * 10 * 10 + 4 * 10 + 8  # 8: the running accuracy
    ways = ("{}Optimizer", "{}Optimizer, defaults", "{}, by the term", "{}, by the term, defaults")
    expected = {
        "plain": (0, copy_bytes),
        "handwritten DCL": (MLP_PARAMETERS, 3 * copy_bytes),
        **{way.format("DCL"): (MLP_PARAMETERS, 3 * copy_bytes) for way in ways},
        "handwritten DCP": (0, copy_bytes + 4 * 10 * 10),
        **{way.format("DCP"): (0, copy_bytes + prototypes_and_numbers) for way in ways},
        "SAM": (0, copy_bytes),  # its copy of the weights is gone after the step
        "Lookahead": (0, 2 * copy_bytes),
        "EMA of the weights": (MLP_PARAMETERS, 2 * copy_bytes + 8),  # 8: how many were averaged
        "Schedule-Free SGD": (0, copy_bytes),
    }
    small = dataclasses.replace(WORKLOADS["mlp"], batch_size=4)
    found = {name: start(row, small) for name, row in METHODS.items()}
    assert {name: (one.parameters_added(), one.state_bytes()) for name, one in found.items()} == expected


# ---- the peers ------------------------------------------------------------------------------------------------------


def test_sam_steps_with_the_gradient_at_the_perturbed_weights():
    put = script()
    training = METHODS["SAM"].build(put)
    model, batch = copy.deepcopy(put.model), put.batches[0]
    forwards: list[int] = []
    put.model.register_forward_hook(lambda *_: forwards.append(1))
    training.step()
    assert len(forwards) == 2

    by_hand = copy.deepcopy(model)
    first = gradient(by_hand, batch)
    norm = torch.sqrt(sum((g**2).sum() for g in first))
    with torch.no_grad():
        for parameter, g in zip(by_hand.parameters(), first, strict=True):
            parameter += 0.05 * g / norm
    second = gradient(by_hand, batch)
    optimizer = sgd(model.parameters())
    for parameter, g in zip(model.parameters(), second, strict=True):
        parameter.grad = g
    optimizer.step()
    torch.testing.assert_close(weights(put.model), weights(model), rtol=1e-9, atol=1e-12)


def test_lookahead_goes_half_of_the_way_back_at_the_fifth_step():
    begin = weights(script().model)
    torch.testing.assert_close(
        weights(trained(METHODS["Lookahead"], 4).model), weights(trained(METHODS["plain"], 4).model), rtol=0, atol=0
    )
    fast = weights(trained(METHODS["plain"], 5).model)
    torch.testing.assert_close(weights(trained(METHODS["Lookahead"], 5).model), (begin + fast) / 2)


def test_the_average_is_the_average_and_leaves_the_model_alone():
    first, second = (weights(trained(METHODS["plain"], steps).model) for steps in (1, 2))
    training = trained(METHODS["EMA of the weights"], 2)
    assert torch.equal(weights(training.model), second)
    torch.testing.assert_close(weights(training.second), EMA_DECAY * first + (1 - EMA_DECAY) * second)
    assert EMA_DECAY < 1


def test_schedule_free_is_in_training_mode_and_keeps_an_average():
    training = METHODS["Schedule-Free SGD"].build(script())
    (optimizer,) = training.optimizers
    fast = []
    for _ in range(4):
        training.step()
        fast.append(torch.cat([optimizer.state[p]["z"].flatten() for p in training.model.parameters()]))
    assert optimizer.param_groups[0]["train_mode"]
    optimizer.eval()
    torch.testing.assert_close(weights(training.model), torch.stack(fast).mean(0))


def test_prototypes_are_the_class_means():
    training = trained(METHODS["DCPOptimizer"], 1)
    put = script()
    (x, y), z = put.batches[0], put.model(put.batches[0][0]).detach()
    values, numbers, _ = training.others()
    assert values.shape == (10, 10)
    assert len(x) == len(y)
    for label in y.unique():
        torch.testing.assert_close(values[label], z[y == label].mean(0))
    assert (numbers > 0.5).nonzero().flatten().tolist() == sorted(set(y.tolist()))


# ---- the cost options -----------------------------------------------------------------------------------------------


def knob_rows(workload: str) -> list[str]:
    return [name for name, knob in KNOBS.items() if knob.suits(WORKLOADS[workload])]


@pytest.mark.parametrize("name", knob_rows("cnn"))
def test_an_option_changes_what_its_line_says(name, monkeypatch):
    """Exact ones train the very bits of the default, the others do not."""
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    knob = KNOBS[name]
    with_option = trained(knob.row(), 4, "cnn")
    default = trained(Row("full copy", companion_of_its_own, knob.variant), 4, "cnn")
    ours, theirs = (torch.cat([weights(t.model), weights(t.second).sum()[None]]) for t in (with_option, default))
    if knob.changes in (DEFAULT, EXACT):
        assert torch.equal(ours, theirs)
    elif knob.changes == ROUNDING:
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    else:
        assert not torch.allclose(ours[:-1], theirs[:-1], rtol=1e-6)
    assert compiled == ([with_option.second] if name == "companion.compile()" else [])


def companion_of_its_own(put: Script) -> Training:
    """DCLOptimizer without options, and without sharing."""
    return companion_learning(put, companion=copy.deepcopy(put.model))


@pytest.mark.parametrize("workload", ["mlp", "resnet18"])
def test_rows_come_with_the_plain_training_they_are_divided_by(workload):
    rows = rows_for(WORKLOADS[workload])
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert {row.reference for row in rows} <= set(names)
    assert ("companion=ResNet-10" in names, "companion=half the width" in names) == (
        (True, False) if workload == "resnet18" else (False, True)
    )
    assert ("plain, channels last" in names) is (workload == "resnet18")


def test_in_a_linear_probe_the_last_layer_trains_and_the_rest_is_shared():
    row = KNOBS["linear probe: frozen parameters are shared"].row()
    before = script().model.state_dict()
    training, plain = trained(row, 2), trained(plain_row("linear probe"), 2)
    changed = [name for name, tensor in training.model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["5.weight", "5.bias"]
    assert training.parameters_added() == 512 * 10 + 10
    assert training.state_bytes() == 3 * plain.state_bytes() == 3 * 8 * (512 * 10 + 10)


def test_the_smaller_companion_is_the_workloads_own():
    training = trained(KNOBS["companion=half the width"].row(), 1, "cnn")
    assert [m.out_channels for m in training.second if isinstance(m, nn.Conv2d)] == [8, 16]
    assert training.second.training


def test_options_reach_the_optimizers():
    for name, option in (("foreach", "foreach"), ("fused", "fused")):
        base, companion = trained(KNOBS[f"companion_optimizer: {name}"].row(), 1).optimizers
        assert companion.defaults[option] is True
        assert base.defaults[option] is None
        assert companion.defaults | {option: None} == base.defaults


def test_periods_are_those_of_the_options():
    """The companion's optimizer steps once in each period."""
    for name, row in {**METHODS, **{name: knob.row() for name, knob in KNOBS.items()}}.items():
        assert row.period == {"Lookahead": 5, "companion_every=2": 2, "companion_every=4": 4}.get(name, 1)
    for period in (2, 4):
        training = KNOBS[f"companion_every={period}"].row().build(script())
        moved: list[int] = []
        training.optimizers[1].register_step_post_hook(lambda *_, moved=moved: moved.append(1))
        for _ in range(2 * period):
            training.step()
        assert len(moved) == 2


def test_a_wrapper_is_a_wrapper():
    """The rows of the package's name train through the package."""
    for name in ("DCLOptimizer", "companion_every=4"):
        assert KNOBS[name].row().build.__self__ is KNOBS[name]
    assert isinstance(companion_learning(script()).second, nn.Module)
    seen: list[DCLOptimizer] = []
    companion_learning(script(), finish=seen.append, companion_every=2)
    assert type(seen[0]) is DCLOptimizer
