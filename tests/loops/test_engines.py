"""An engine that replaces the parameters of the base optimizer, as DeepSpeed's ZeRO does, in a few lines.

``tests/integrations/test_deepspeed.py`` has DeepSpeed itself.
"""

import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import assert_same, batches, fit, matrices_and_others, mlp, through_pickle
from tests.reference import CLOSE, EACH_WAY, METHOD, learned, term_of

STEPS = 5
# The optimizer asks for DeepSpeed's engine by the name of its module.
MODULE = types.ModuleType("deepspeed.runtime.engine")
exec("def call(self, model, x):\n    return model(x)", MODULE.__dict__)


@pytest.fixture(autouse=True)
def imported(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)


class Engine:
    """Copies of the parameters are what the base steps: all at once, each group alone, or as ZeRO 3 one by one."""

    def __init__(self, model, optimizer, how, begins=False):
        self.model, self.optimizer, self.how, self.global_steps = model, optimizer, how, 0
        self.pairs = []
        for group in optimizer.param_groups:
            own = [parameter.detach().clone().requires_grad_() for parameter in group["params"]]
            self.pairs.append([*zip(group["params"], own, strict=True)])
            group["params"] = own
        self.all = [*itertools.chain(*self.pairs)]
        if begins:
            for _, own in self.all:
                own.grad = torch.zeros_like(own)
            optimizer.step()
            optimizer.base.zero_grad()
        if how == "one by one":
            for group in optimizer.param_groups:
                group["params"] = []

    def __call__(self, x):
        return MODULE.call(self, self.model, x)

    def step(self):
        """Step, or leave it out if a gradient is not finite."""
        theirs = [pair[0] for pair in self.all]
        if all(parameter.grad.isfinite().all() for parameter in theirs):
            for number in range(len(self.pairs)):
                self._step_group(number)
        self.global_steps += 1
        for parameter in theirs:
            parameter.grad = None

    def _step_group(self, number):
        groups = self.optimizer.param_groups
        for theirs, own in self.pairs[number]:
            own.grad, theirs.grad = theirs.grad, None
        if self.how == "groups":
            self.optimizer.param_groups = [groups[number]]
            self.optimizer.step()
            self.optimizer.param_groups = groups
        elif self.how == "one by one":
            for _, own in self.pairs[number]:
                groups[number]["params"] = [own]
                self.optimizer.step()
            groups[number]["params"] = []
        elif number == len(self.pairs) - 1:
            self.optimizer.step()
        for theirs, own in self.all if self.how == "at once" else self.pairs[number]:
            theirs.data.copy_(own.detach())
            if self.how != "at once" or number == len(self.pairs) - 1:
                own.grad = None


def build(kind, **options):
    model = mlp()
    weights, biases = matrices_and_others(model)
    base = torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1, momentum=0.9)
    return model, kind(base, model, **METHOD | options)


def train(engine, way, overflows=None):
    term = term_of(engine.optimizer, way)
    for number, (x, y) in enumerate(batches(STEPS)):
        z = engine(x)
        loss = F.cross_entropy(z, y) + term(z, y)
        parameter = next(engine.model.parameters())
        factor = float("inf") if number == overflows else 1.0
        handle = parameter.register_hook(lambda gradient, factor=factor: gradient * factor)
        loss.backward()
        handle.remove()
        engine.step()
    return engine.optimizer


def expected(skips=None):
    _, optimizer = build(DCPOptimizer)
    for number, (x, y) in enumerate(batches(STEPS)):
        if number != skips:
            fit(optimizer, [(x, y)])
    return optimizer


@EACH_WAY
@pytest.mark.parametrize("how", ["at once", "groups", "one by one"])
def test_a_step_by_groups_is_one_step(how, way):
    optimizer = train(Engine(*build(DCPOptimizer), how), way)
    assert_same(optimizer.model, expected().model, **CLOSE)
    assert_same(learned(optimizer), learned(expected()), **CLOSE)
    assert optimizer.logs()["step"] == STEPS
    assert optimizer.logs()["skipped"] == 0
    assert optimizer.logs()["penalty"] > 0


@EACH_WAY
@pytest.mark.parametrize("how", ["at once", "groups", "one by one"])
def test_the_batch_of_a_step_that_the_engine_skips_is_forgotten(how, way):
    """Its gradients overflow, as that of the second batch does here; the optimizer is not called."""
    optimizer = train(Engine(*build(DCPOptimizer), how), way, overflows=1)
    assert_same(optimizer.model, expected(skips=1).model, **CLOSE)
    assert_same(learned(optimizer), learned(expected(skips=1)), **CLOSE)
    assert optimizer.logs()["step"] == STEPS - 1


@pytest.mark.parametrize("how", ["at once", "groups"])
def test_a_step_that_creates_the_state_is_none(how):
    optimizer = train(Engine(*build(DCPOptimizer), how, begins=True), "line")
    assert_same(optimizer.model, expected().model, **CLOSE)
    assert optimizer.logs()["step"] == STEPS


@pytest.mark.parametrize("how", ["at once", "groups"])
def test_a_second_step_without_a_batch_is_refused_and_nothing_offered_that_trains_plainly(how):
    engine = Engine(*build(DCPOptimizer), how)
    train(engine, "line")
    for theirs, _ in engine.all:
        theirs.grad = torch.ones_like(theirs)
    with pytest.raises(RuntimeError, match=r"(?s)an engine \(DeepSpeed\) has put.*Fix: call the engine") as raised:
        engine.step()
    assert "strict" not in str(raised.value)


def test_a_copy_has_no_engine():
    optimizer = train(Engine(*build(DCPOptimizer), "at once"), "line")
    copied = through_pickle(optimizer)
    assert copied.logs()["step"] == STEPS
    assert_same(learned(copied), learned(optimizer))


@pytest.mark.parametrize("when", ["after", "before", "given"])
def test_a_companion_is_refused(when):
    """Whether it is made before or after the engine takes the parameters."""
    model, optimizer = build(DCLOptimizer, **{"companion": mlp(1)} if when == "given" else {})
    if when == "before":
        _ = optimizer.companion
    for how in ("groups", "one by one"):
        engine = Engine(model, optimizer, how)
        with pytest.raises(ValueError, match=r"(?s)an engine has put its own .* use DCPOptimizer"):
            engine(next(batches(1))[0])
