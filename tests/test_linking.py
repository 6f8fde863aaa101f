"""Which forwards a call of the criterion is about, and what share of its factor each of them has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, assert_same, batches, mlp, sgd, training_forwards

A, B = batches(2, size=12)
SMALL = (B[0][:4], B[1][:4])


def wrapped(criterion, variant="dcl"):
    model = mlp()
    if variant == "dcl":
        optimizer = DCLOptimizer(sgd(model), model, criterion=criterion, weight=1.0)
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, criterion=criterion, weight=1.0, alpha=0.6)
    optimizer.forwards = training_forwards(optimizer)
    return model, optimizer


def scales(optimizer, loss):
    """What each forward's loss was multiplied by, in the order of the forwards."""
    forwards = [reference() for reference in optimizer.forwards]
    loss.backward()
    return [forward.criterion_scale[1] for forward in forwards]


def both(outputs):
    return torch.cat(outputs), torch.cat([A[1], SMALL[1]])


def test_outputs_handed_over_one_by_one_have_the_factor_each():
    criterion = nn.CosineEmbeddingLoss()
    model, optimizer = wrapped(criterion)
    first, second = model(A[0]), model(B[0])
    assert scales(optimizer, criterion(first, second, torch.ones(12)) / 4) == [0.25, 0.25]


def test_outputs_in_a_list_have_the_factor_each():
    class OfAList(nn.Module):
        def forward(self, outputs, y):
            return sum(F.cross_entropy(z, y) for z in outputs)

    criterion = OfAList()
    model, optimizer = wrapped(criterion)
    views = [model(A[0]), model(-A[0])]
    assert scales(optimizer, criterion(views, A[1]) / 4) == [0.25, 0.25]


def test_an_output_that_is_held_constant_has_no_part_in_it():
    criterion = nn.MSELoss()
    model, optimizer = wrapped(criterion)
    first, second = model(A[0]), model(B[0])
    loss = criterion(first, second.detach()) / 4 + criterion(second, torch.zeros_like(second))
    assert scales(optimizer, loss) == [0.25, 1.0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("keep", [True, False], ids=["outputs kept", "outputs gone"])
def test_a_loss_of_forwards_put_together_is_shared_by_their_rows(reduction, keep):
    """So says "auto", which reads each forward's part off its gradient."""
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    found = []
    for given in (criterion, None):
        model, optimizer = wrapped(given)
        if keep:
            outputs = [model(A[0]), model(SMALL[0])]
            loss = criterion(*both(outputs)) / 2
        else:
            loss = criterion(*both([model(A[0]), model(SMALL[0])])) / 2
        if given:
            parts = [6.0, 2.0] if reduction == "sum" else [0.375, 0.125]
            assert scales(optimizer, loss) == pytest.approx(parts)
        else:
            loss.backward()
        optimizer.step()
        found.append((model.state_dict(), optimizer.companion.state_dict()))
    assert_same(*found, rtol=1e-8, atol=1e-9)


def test_a_mean_of_outputs_is_shared():
    criterion = nn.CrossEntropyLoss()
    model, optimizer = wrapped(criterion)
    assert scales(optimizer, criterion((model(A[0]) + model(-A[0])) / 2, A[1])) == [0.5, 0.5]


def test_a_view_of_an_output_is_the_output():
    criterion = nn.CrossEntropyLoss()
    model, optimizer = wrapped(criterion)
    first, second = model(A[0]), model(B[0])
    loss = 0.3 * criterion(first.view(-1, CLASSES), A[1]) + 0.7 * criterion(second[:4], SMALL[1])
    assert scales(optimizer, loss) == [0.3, 0.7]


def test_a_converted_output_is_that_of_a_single_forward_that_waits():
    criterion = nn.MSELoss()
    model, optimizer = wrapped(criterion)
    loss = 0.3 * criterion(model(A[0]).float(), torch.zeros(12, CLASSES))
    assert scales(optimizer, loss) == [pytest.approx(0.3)]


def test_converted_outputs_of_several_forwards_are_shared_by_all_that_wait():
    """As if they had been put together: nothing says whose they are."""
    criterion = nn.CrossEntropyLoss()
    model, optimizer = wrapped(criterion)
    first, second, third = model(A[0]), model(SMALL[0]), model(-A[0])
    loss = 0.3 * criterion(second.float(), SMALL[1]) + 0.7 * criterion(first.float(), A[1])
    assert scales(optimizer, loss) == pytest.approx([12 / 28, 4 / 28, 12 / 28], rel=1e-5)
    del third


def test_a_converted_output_is_not_that_of_a_forward_whose_own_was_given():
    criterion = nn.MSELoss()
    model, optimizer = wrapped(criterion)
    first, second = model(A[0]), model(SMALL[0])
    loss = 0.3 * criterion(first, torch.zeros(12, CLASSES).double())
    loss = loss + 0.7 * criterion(second.float(), torch.zeros(4, CLASSES))
    assert scales(optimizer, loss) == pytest.approx([0.3, 0.7], rel=1e-6)


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_forward_whose_backward_has_come_waits_no_longer(variant):
    """A call on its very output is still its own: another backward may come through it."""
    criterion = nn.CrossEntropyLoss()
    model, optimizer = wrapped(criterion, variant)
    first = model(A[0])
    (0.5 * criterion(first, A[1])).backward(retain_graph=True)
    second = model(SMALL[0])
    (0.3 * criterion(second.float(), SMALL[1])).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(0.3, rel=1e-6)
    (0.2 * criterion(first, A[1])).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(0.2)
    optimizer.step()
    if variant == "dcp":
        z, y = torch.cat([first, second]).detach(), torch.cat([A[1], SMALL[1]])
        for k in y.unique():
            assert_same(optimizer.prototypes[k], z[y == k].mean(0), atol=1e-12)


def test_a_criterion_on_something_else_is_not_about_any_of_several_forwards():
    criterion, other = nn.CrossEntropyLoss(), mlp(seed=1)
    model, optimizer = wrapped(criterion)
    first, second = model(A[0]), model(B[0])
    loss = criterion(first, A[1]) + 0.4 * criterion(other(A[0]), A[1]) + 2 * criterion(second, B[1])
    assert scales(optimizer, loss) == [1.0, 2.0]


@pytest.mark.parametrize("loss_of", [
    lambda criterion, first, second: criterion(torch.cat([first, second]), torch.cat([A[1], B[1]])),
    lambda criterion, first, second: criterion((first + second) / 2, A[1]),
    lambda criterion, first, second: criterion(first, second),
    lambda criterion, first, second: criterion(first.float(), A[1]) + criterion(second.float(), B[1]),
])  # fmt: skip
def test_labels_of_several_forwards_are_refused_with_a_mend_that_works(loss_of):
    criterion = nn.CrossEntropyLoss()
    model, optimizer = wrapped(criterion, "dcp")
    with pytest.raises(RuntimeError, match=r"set_targets\(labels\) before each forward"):
        loss_of(criterion, model(A[0]), model(B[0]))
    outputs = []
    for x, y in (A, B):
        optimizer.set_targets(y)
        outputs.append(model(x))
    loss_of(criterion, *outputs).backward()
    optimizer.step()
    z, y = torch.cat(outputs).detach(), torch.cat([A[1], B[1]])
    for k in y.unique():
        assert_same(optimizer.prototypes[k], z[y == k].mean(0), atol=1e-12)


def test_two_empty_batches_are_two_forwards():
    criterion = nn.CrossEntropyLoss(reduction="sum")
    model, optimizer = wrapped(criterion)
    first, second = model(A[0][:0]), model(B[0][:0])
    criterion(second, B[1][:0])
    assert [reference().is_criterion_input for reference in optimizer.forwards] == [False, True]
    del first


class Segmenter(nn.Module):
    """A model with an auxiliary head, whose outputs the script resizes or casts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.main, self.aux = nn.Conv2d(3, CLASSES, 1), nn.Conv2d(3, CLASSES, 1)

    def forward(self, x):
        return {"out": self.main(x), "aux": self.aux(x)}


PROCESSED = {
    "resized": lambda z: F.interpolate(z, size=(8, 8), mode="bilinear"),
    "cast": lambda z: z.double(),
    "resized and cast": lambda z: F.interpolate(z.double(), size=(8, 8), mode="bilinear"),
}


@pytest.mark.parametrize("order", [("out", "aux"), ("aux", "out")])
@pytest.mark.parametrize("how", PROCESSED)
def test_processed_logits_of_two_heads_are_refused_with_a_mend_that_works(how, order):
    """torchvision's reference for segmentation, where the script resizes: the factor was read as 1.4 for 1."""
    process, x, y = PROCESSED[how], torch.randn(2, 3, 4, 4), torch.randint(CLASSES, (2, 8, 8))
    y = y[:, :4, :4] if how == "cast" else y

    def loss_of(criterion, of_main):
        outputs = model(x)
        losses = {name: (of_main if name == "out" else criterion)(process(outputs[name]), y) for name in order}
        return losses["out"] + 0.4 * losses["aux"]

    criterion = nn.CrossEntropyLoss()
    model = Segmenter()
    optimizer = DCLOptimizer(sgd(model), model, criterion=criterion)
    with pytest.raises(RuntimeError, match="criterion= a loss module that only the main head's calls"):
        loss_of(criterion, criterion).backward()
    main = nn.CrossEntropyLoss()
    optimizer = DCLOptimizer(sgd(model), model, criterion=main)
    optimizer.zero_grad()
    loss_of(criterion, main).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)
    optimizer.step()


def test_a_processed_auxiliary_output_leaves_the_main_one_its_factor():
    criterion, model = nn.CrossEntropyLoss(), Segmenter()
    optimizer = DCLOptimizer(sgd(model), model, criterion=criterion)
    outputs, y = model(torch.randn(2, 3, 4, 4)), torch.randint(CLASSES, (2, 4, 4))
    others = [criterion(outputs["aux"].double(), y) for _ in range(2)]
    (0.3 * criterion(outputs["out"], y) + 0.4 * sum(others)).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(0.3)


@pytest.mark.parametrize("part", ["mixed labels", "slices", "one for a log"])
def test_several_calls_on_processed_logits_of_one_head_are_its_own(part):
    criterion = nn.CrossEntropyLoss()
    model, optimizer = wrapped(criterion)
    z, y = model(A[0]), A[1]
    if part == "mixed labels":
        converted = z.float()
        loss, expected = 0.3 * criterion(converted, y) + 0.7 * criterion(converted, y.flip(0)), 1.0
    elif part == "slices":  # each row of either half has twice the weight that it has in a mean of all rows
        loss, expected = criterion(z[:6], y[:6]) + criterion(z[6:], y[6:]), 2.0
    else:
        loss, expected = 0.3 * criterion(z.float(), y), 0.3
        criterion(z.float().clone(), y)
    loss.backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(expected)
