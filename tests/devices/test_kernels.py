"""What a training step launches on an accelerator, counted on a fake one: few kernels, and no wait for the device.

``python -m tests.devices.test_kernels`` counts and prints. ``python -m benchmarks kernels`` has more losses and steps.
"""

import json
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import fake_device, measure
from benchmarks.fake_device import counted
from benchmarks.methods import METHODS as ROWS
from benchmarks.methods import companion_learning, companion_prototype
from dcl_optim import DCPOptimizer
from tests.devices.on_device import answers, needs_device
from tests.reference import train

pytestmark = needs_device
SYNC_STEP, COUNTED = 4, 3  # the step that may read values, after which steps are counted
METHODS = (
    "plain",
    "DCL, line",
    "DCL, term",
    "DCP, line",
    "DCP, term",
)
# Further steps, of which only the waits are looked at; the defaults have the automatic weight.
OTHERS = {
    "DCL, line, companion_fraction": partial(companion_learning, companion_fraction=0.5),
    "DCL, line, weight 0": partial(companion_learning, weight=0.0),
}
OTHERS |= {f"DCP, line, {name}": partial(companion_prototype, distance=name) for name in ("l1", "kl", "infonce")}
# The most kernels that a step may take. Those of plain training are torch's, and exact: they say that the counting is
# right. Lower a figure when a step gets cheaper; python -m benchmarks kernels prints what it takes.
BUDGETS = {
    ("hard labels", "float32"): (24, 77, 67, 70, 61),
    ("hard labels", "bfloat16"): (24, 86, 73, 76, 64),
    ("label smoothing 0.1", "float32"): (42, 92, 85, 85, 79),
    ("label smoothing 0.1", "bfloat16"): (42, 128, 91, 118, 82),
    ("4 micro-batches", "float32"): (110, 325, 285, 267, 231),
}


# ---- in the process with the device ----------------------------------------------------------------------------------


def count_steps():
    """The kernels of the dearest step, and the synchronizations of all these and of the step that may read values."""
    builds = ROWS | OTHERS
    cases = [(loss, dtype, method) for loss, dtype in BUDGETS for method in METHODS]
    cases += [("hard labels", "float32", name) for name in OTHERS]
    found = {}
    for loss, dtype, method in cases:
        steps = measure.count(builds[method], loss, dtype, SYNC_STEP + COUNTED)
        last = steps[SYNC_STEP:]
        waits = sum(step.synchronizations for step in last)
        found[f"{loss}, {dtype}, {method}"] = [
            max(step.kernels for step in last),
            waits,
            steps[SYNC_STEP - 1].synchronizations,
        ]
    return found


def waits_of_the_term(device, num_classes, is_soft):
    """The synchronizations of the third step with such labels."""
    model = nn.Linear(8, num_classes).to(device)
    optimizer = DCPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y = torch.randn(16, 8).to(device), torch.arange(16).remainder(num_classes)
    y = (F.one_hot(y, num_classes).float() if is_soft else y).to(device)
    for _ in range(3):
        with counted() as counts:
            train(optimizer, [(x, y)], loss=F.cross_entropy)
    return counts.synchronizations.total()


def count_operations(device):
    """Kernels and synchronizations of operations that are known."""
    x, labels = torch.randn(4, 3, device=device), torch.tensor([0, 2, 1, 0]).to(device)
    operations = {
        "x + 1": lambda: x + 1,
        "x.T and x[1:]": lambda: (x.T, x[1:]),
        "two additions in place": lambda: x.add_(1).add_(1),
        "x.sum().item()": lambda: x.sum().item(),
        "bool(x.any())": lambda: bool(x.any()),
        "x.cpu()": lambda: x.cpu(),
        "to the device": lambda: torch.zeros(3).to(device),
        "within the device": lambda: x.clone(),
        "nonzero": lambda: labels.nonzero(),
        "x[mask]": lambda: x[labels > 0],
        "x[labels]": lambda: x[labels],
        "labels[mask] = rows": lambda: labels.index_put_((torch.ones_like(labels) > 0,), labels.clone()),
        "_foreach_add_": lambda: torch._foreach_add_([x, x.clone()], 1.0),
        "scatter, which copies first": lambda: x.scatter(1, labels[:, None], 0.0),
        "outside": lambda: torch.zeros(3) + 1,
    }
    found = {}
    for name, operation in operations.items():
        with counted() as counts:
            operation()
        found[name] = [counts.kernels.total(), counts.synchronizations.total()]
    return found


def mixed_operands(device):
    """What is said of operands in two places."""
    here, there = torch.ones(3, 3), torch.ones(3, 3, device=device)
    operations = (lambda: there + here, lambda: there @ here, lambda: there.copy_(here).add_(here))
    number = (there + torch.tensor(1.0)).sum().item()  # which may come from the CPU
    return [*map(error_of, operations), str(number)]


def error_of(operation):
    try:
        operation()
    except RuntimeError as error:
        return str(error)
    return ""


def main():
    device = fake_device.register()
    torch.set_num_threads(1)
    found = {
        "steps": count_steps(),
        "many classes": waits_of_the_term(device, 600, is_soft=False),  # fewer rows than classes
        "soft labels": waits_of_the_term(device, 10, is_soft=True),
        "operations": count_operations(device),
        "mixed": mixed_operands(device),
    }
    print(json.dumps(found))


# ---- in pytest's -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return answers(__name__)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("loss", "dtype"), BUDGETS)
def test_a_step_launches_no_more_kernels_than_its_budget(found, loss, dtype, method):
    count = found["steps"][f"{loss}, {dtype}, {method}"][0]
    budget = BUDGETS[loss, dtype][METHODS.index(method)]
    assert count <= budget
    assert method != "plain" or count == budget


def test_a_step_does_not_wait_for_the_device_unless_it_may_read_values(found):
    assert {case: waits for case, (_, waits, _) in found["steps"].items() if waits} == {}
    assert found["many classes"] == found["soft labels"] == 0
    most = {case: waits for case, (_, _, waits) in found["steps"].items() if waits > (13 if "4 micro" in case else 4)}
    assert most == {}
    assert any(waits for _, _, waits in found["steps"].values())


def test_operations_are_counted_as_cuda_runs_them(found):
    assert found["operations"] == {
        "x + 1": [1, 0],
        "x.T and x[1:]": [0, 0],
        "two additions in place": [2, 0],
        "x.sum().item()": [1, 1],
        "bool(x.any())": [1, 1],
        "x.cpu()": [0, 1],
        "to the device": [0, 1],
        "within the device": [1, 0],
        "nonzero": [3, 1],
        "x[mask]": [5, 1],
        "x[labels]": [1, 0],
        "labels[mask] = rows": [7, 1],
        "_foreach_add_": [2, 0],
        "scatter, which copies first": [2, 0],
        "outside": [0, 0],
    }


def test_operands_in_two_places_are_refused(found):
    *refused, number = found["mixed"]
    assert len(refused) == 3
    assert all(re.search("same device.*mockgpu.*cpu", said) for said in refused)
    assert number == "18.0"


if __name__ == "__main__":
    main()
