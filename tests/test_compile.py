"""torch.compile in every order; the tracing backend without code generation keeps this fast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer
from tests.helpers import assert_same, batch_norm_net, batches

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def trained(order: str):
    torch._dynamo.reset()
    model = batch_norm_net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    call, options = model, {"backend": "aot_eager"}
    if order in ("compiled before", "outer module wrapped"):
        call = torch.compile(model, **options)
    optimizer = DCLOptimizer(base, call if order == "outer module wrapped" else model)
    if order == "compiled after":
        call = torch.compile(model, **options)
    elif order == "compiled in place":
        model.compile(**options)
    for x, y in batches(6):
        optimizer.zero_grad()
        F.cross_entropy(call(x), y).backward()
        optimizer.step()
    return model, optimizer.companion


@pytest.mark.parametrize("order", ["compiled before", "compiled after", "compiled in place", "outer module wrapped"])
def test_compiled_equals_eager(order):
    for ours, eager in zip(trained(order), trained("eager"), strict=True):
        assert_same(ours, eager, rtol=1e-10, atol=1e-12)


def test_wrapping_the_inner_module_after_the_first_compiled_call_is_refused_at_the_step():
    torch._dynamo.reset()
    model = batch_norm_net()
    call = torch.compile(model, backend="aot_eager")
    x, y = next(iter(batches(1)))
    call(x)
    optimizer = DCLOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    F.cross_entropy(call(x), y).backward()
    with pytest.raises(RuntimeError, match="compiled and called before it was wrapped"):
        optimizer.step()
