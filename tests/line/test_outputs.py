"""What a model returned: its logits, the loss that it took from them, the tensor that logits were converted from."""

from __future__ import annotations

from operator import itemgetter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.pytorch.outputs import conversion_source, find_logits
from tests.helpers import CLASSES, all_warnings, assert_same, batches, fit, mlp, nested_batch, one, sgd, wrap
from tests.reference import NEAR
from tests.reference import train as train_by

# ---- logits that were converted --------------------------------------------------------------------------------------


def test_conversion_source():
    leaf = torch.ones(2, 3, requires_grad=True)
    computed = leaf * 2
    assert conversion_source(computed) is None
    assert conversion_source(leaf.double()) is None, "nothing was computed before"
    node, index = conversion_source(computed.double().half())
    assert node is computed.grad_fn
    assert index == 0


# ---- a model that returns (logits, loss), as nanoGPT's does ----------------------------------------------------------


class Named(NamedTuple):
    scores: Tensor
    cost: Tensor


FORMS = {
    "tuple": lambda logits, loss: (logits, loss),
    "list": lambda logits, loss: [logits, loss],
    "loss first": lambda logits, loss: (loss, None, logits),
    "named tuple": Named,
    "dict": lambda logits, loss: {"logits": logits, "loss": loss},
}


class WithLoss(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.body, self.form = mlp(), form

    def forward(self, x, y):
        logits = self.body(x)
        return self.form(logits, F.cross_entropy(logits, y))


@pytest.mark.parametrize("form", FORMS)
def test_the_models_own_loss_in_any_form_of_output(form):
    """Equal to a loss outside; the caller gets the form that the model returned."""
    model, expected = WithLoss(FORMS[form]), mlp()
    optimizer, reference = wrap(model), wrap(expected)
    for x, y in batches(4):
        optimizer.zero_grad()
        output = model(x, y)
        assert type(output) is type(FORMS[form](None, None))
        (loss,) = (part for part in tree_leaves(output) if isinstance(part, Tensor) and not part.ndim)
        loss *= 0.25  # in place, as some trainers do
        loss.backward()
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.25)
        optimizer.step()
        fit(reference, [(x, y)], lambda z, y: 0.25 * F.cross_entropy(z, y))
    assert_same(model.body, expected, **NEAR)


# ---- which of several tensors are the logits ------------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.body, self.head, self.form = mlp(), nn.Linear(CLASSES, CLASSES).double(), form

    def forward(self, x):
        features = self.body(x)
        logits = self.head(features)
        return self.form(features, logits, F.cross_entropy(logits, torch.zeros(len(x)).long(), reduction="none"))


@pytest.mark.guard
@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
def test_the_error_of_logits_that_are_another_tensor_of_the_output_names_the_argument(kind):
    """The first tensor with rows and classes is taken; its gradient is that of the head after it."""
    model = Several(lambda f, z, e: (f, z))
    optimizer, (x, y) = kind(sgd(model), model), one()
    loss = F.cross_entropy(model(x)[1], y)
    with pytest.raises(RuntimeError, match=r"Fix: if the logits.*logits=lambda output: output\[1\]; else add"):
        loss.backward()
    assert optimizer.logs()["step"] == 0
    optimizer = kind(sgd(model), model, logits=lambda output: output[1])
    with pytest.raises(RuntimeError, match=r"Fix: add the penalty to the loss.*optimizer\.penalty\("):  # it was chosen
        model(x)[1].square().mean().backward()
    F.cross_entropy(model(x)[1], y).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)


class Exits(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.early, self.late, self.form = mlp(), mlp(1), form

    def forward(self, x):
        return self.form(self.early(x), self.late(x))


class Decided(NamedTuple):
    logits: Tensor
    auxiliary: Tensor


@pytest.mark.guard
@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
@pytest.mark.parametrize(
    ("form", "options", "said"),
    [
        (lambda early, late: (early, late), {}, 1),
        (lambda early, late: (early, late), {"logits": itemgetter(1)}, 0),
        (Decided, {}, 0),
        (lambda early, late: (early, late[:, 1:]), {}, 0),
    ],
)
def test_of_several_exits_the_first_is_taken_with_one_warning_that_names_the_argument(kind, form, options, said):
    model = Exits(form)
    optimizer, (x, y) = kind(sgd(model), model, **options), one()
    with all_warnings() as caught:
        for _ in range(2):
            sum(F.cross_entropy(z, y % z.shape[1]) for z in model(x)).backward()
            optimizer.step()
    assert len(caught) == said
    assert all("tensors of the shape of logits" in str(warning.message) for warning in caught)


def test_by_the_term_the_script_chooses_the_exit_without_a_warning():
    model = Exits(lambda early, late: (early, late))
    optimizer, (x, y) = DCPOptimizer(sgd(model), model), one()
    early, late = model(x)
    (F.cross_entropy(early, y) + F.cross_entropy(late, y) + optimizer.penalty(late, y)).backward()
    optimizer.step()


def test_with_nested_logits_dcps_term_takes_their_values():
    model, other = (mlp(dtype=torch.float32) for _ in range(2))
    optimizer, expected = (DCPOptimizer(sgd(net), net) for net in (model, other))
    nested, x, y = nested_batch()
    train_by(optimizer, [(nested, y)] * 3, loss=F.cross_entropy, call=lambda inputs: model(inputs).values())
    train_by(expected, [(x, y)] * 3, loss=F.cross_entropy)
    assert_same(model, other)


@pytest.mark.parametrize(
    "make",
    [
        lambda f, z, e: (z, e.mean()),
        lambda f, z, e: (z, f.detach(), [f, f], None),
        lambda f, z, e: (z, f.T),
        lambda f, z, e: SimpleNamespace(logits=z, hidden=f, loss=e),
        lambda f, z, e: {"features": f, "logits": z, "loss": e},
        lambda f, z, e: {"aux": f, "out": z},
    ],
)
def test_a_choice_that_is_decided_is_not_said(make):
    model = Several(make)
    optimizer, (x, y) = wrap(model), one()
    for _ in range(2):
        z = find_logits(model(x))
        assert torch.equal(z, model.head(model.body(x)))
        F.cross_entropy(z, y).backward()
        assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)
        optimizer.step()


WRONG = {
    "0-dim": (
        lambda z: z.mean(),
        r"(?s)is of torch.float64, shape \(\).*return real .* as in \(logits, loss\)",
    ),
    "only a loss": (lambda z: (z.mean(), None), r"shape \(\)\.\n  Fix: return"),
    "complex": (lambda z: torch.complex(z, z), r"(?s)is of torch.complex128.*real floating-point logits"),
    "integer": (lambda z: z.argmax(1), r"is of torch.int64"),
    "bool": (lambda z: {"logits": z > 0}, r"is of torch.bool"),
    "nested": (lambda z: ((z, z), None), "no logits found in the model's output of type tuple"),
    "empty": (lambda z: (), "no logits found in the model's output of type tuple"),
}


@pytest.mark.parametrize("form", WRONG)
def test_what_cannot_be_logits_is_named(form):
    make, message = WRONG[form]
    with pytest.raises(TypeError, match=message):
        find_logits(make(torch.zeros(2, CLASSES).double()))
    with pytest.raises(TypeError, match=r"shape \(\)|of torch\.(complex|int|bool)|no logits found"):
        find_logits(torch.zeros(2, CLASSES), make)
