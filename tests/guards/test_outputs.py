"""Outputs without logits that can be found: DCL says so in the forward pass, DCP by the line at the step."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Returning, assert_same, mlp, nested_batch, one
from tests.reference import EACH, wrap


@pytest.mark.parametrize("chosen", [False, True])
def test_dcl_says_so_in_the_forward_pass_and_goes_on_in_evaluation_mode(chosen):
    """Of the model's output, and of what ``logits=`` returns."""
    model = Returning((lambda z: z) if chosen else Tensor.mean)
    wrapped = wrap("dcl", model, **{"logits": Tensor.mean} if chosen else {})
    with pytest.raises(TypeError, match=r"shape \(\)"):
        model(one()[0])
    model.eval()(one()[0])
    wrapped.detach()


def test_logits_that_the_companion_replaces_are_an_error_before_the_loss():
    """Which would be the companion's, and the model not trained: of an object only the outer one is copied."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, batch):
            batch.inner.scores = self.net(batch.inner.x)
            return batch

    model, batch = Inner(), SimpleNamespace(inner=SimpleNamespace(x=one()[0]))
    optimizer = wrap("dcl", model, logits=lambda output: output.inner.scores)
    with pytest.raises(RuntimeError, match=r"an object inside of its input.*\n  Fix: return a new object"):
        model(batch)
    optimizer.detach()


def test_by_the_line_a_model_that_hides_its_logits_is_an_error_at_the_step_that_names_its_keys():
    (x, y), model = one(), Returning(lambda z: {"scores": z})
    optimizer = wrap("dcp", model)
    F.cross_entropy(model(x)["scores"], y).backward()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"(?s)keys 'scores'.*logits=.*optimizer\.penalty\(") as caught:
        optimizer.step()
    assert str(caught.value).count("Fix:") == 1
    assert_same([*model.parameters()], before)


@EACH
def test_nested_logits_are_refused_with_what_to_return_instead(variant):
    model = mlp(dtype=torch.float32)
    optimizer, (nested, _, y) = wrap(variant, model), nested_batch()

    def step():
        F.cross_entropy(model(nested).values(), y).backward()
        optimizer.step()

    with pytest.raises((TypeError, RuntimeError), match=r"the nested tensor .*\n.*return the values, logits.values"):
        step()
