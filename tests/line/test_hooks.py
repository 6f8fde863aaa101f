"""The hooks on the model: which calls they see, and what copies, pickles, traces and exports have of them."""

import copy
import functools
import io
import sys

import pytest
import torch
from torch import nn

from dcl_optim import DCPOptimizer
from dcl_optim.pytorch.hooks import Hook, _do_nothing
from tests.helpers import (
    Network,
    assert_same,
    backward,
    batches,
    fit,
    one,
    sgd,
    through_a_file,
    through_pickle,
    training_forwards,
)
from tests.reference import EACH, NEAR, wrap

# ---- nn.DataParallel around the model --------------------------------------------------------------------------------


@pytest.fixture
def replicas(monkeypatch):
    """What nn.DataParallel calls on two GPUs: torch's own replicas, whose parameters are on the CPU here."""
    torch_replicate = sys.modules[nn.parallel.replicate.__module__]
    monkeypatch.setattr(
        torch_replicate,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[1.0 * tensor for tensor in tensors] for _ in devices],
    )
    return lambda model: nn.parallel.replicate(model, [0, 1])


@EACH
@pytest.mark.guard
def test_replicas_of_the_model_are_refused_before_anything_changes(replicas, variant):
    """One of them got the penalty, at random: the others' forward passes were lost."""
    model = Network()
    optimizer = wrap(variant, model)
    x, y = one()
    fit(optimizer, batches(2))
    before = copy.deepcopy(optimizer.state_dict())
    first, second = replicas(model)
    for replica in (first, second):
        with pytest.raises(RuntimeError, match=r"(?s)by nn.DataParallel.*Fix: .*nn.DataParallel\(model"):
            replica(x)
    with torch.no_grad():
        assert_same(second(x), model(x))  # an evaluation is none of our business
    assert_same(optimizer.state_dict(), before)
    fit(optimizer, [(x, y)])


@EACH
def test_replicas_inside_the_wrapped_model_are_trained(replicas, variant):
    """As nn.DataParallel's, if that is what was wrapped: equal to the model alone."""

    class Parallel(Network):
        def forward(self, x):
            return torch.cat([replica(part) for replica, part in zip(replicas(self.body), x.chunk(2), strict=True)])

    models = [Parallel(), Network()]
    for model in models:
        optimizer = wrap(variant, model, weight=1.0)
        fit(optimizer, batches(5))
        assert optimizer.logs()["penalty"] > 0
    assert_same(*models, **NEAR)


# ---- copies and pickles of a wrapped module --------------------------------------------------------------------------


def by_default(module):
    """By torch.load's default, which reads the classes that it was told are safe."""
    classes = [Network, nn.Sequential, nn.Linear, nn.Tanh, set, doubled, unchanged]
    with torch.serialization.safe_globals(classes):
        return through_a_file(module)


COPIES = {
    "torch.save": functools.partial(through_a_file, weights_only=False),
    "torch.save, weights only": by_default,
    "pickle": through_pickle,
    "deepcopy": copy.deepcopy,
}


def hooks_of(module):
    return {name: list(value.values()) for name, value in vars(module).items() if "_hooks" in name}


def ours(module):
    return [
        hook for table in hooks_of(module).values() for hook in table if isinstance(hook, Hook) or hook is _do_nothing
    ]


def doubled(module, args, output):
    return 2 * output


def unchanged(module, args, output):
    assert output.requires_grad


@pytest.mark.parametrize("form", COPIES)
def test_the_hooks_in_a_copy_of_a_wrapped_module_do_nothing_and_those_of_the_script_stay(form):
    model = Network()
    before = model.register_forward_hook(doubled)
    optimizer = DCPOptimizer(sgd(model), model)
    after = model.register_forward_hook(unchanged, always_call=True)
    fit(optimizer, batches(2))
    forwards = training_forwards(optimizer)
    copied, x = COPIES[form](model), one()[0]
    assert_same(copied, model)
    assert [hook for hook in copied._forward_hooks.values() if hook is not _do_nothing] == [doubled, unchanged]
    assert torch.equal(copied(x), 2 * copied.body(x))
    logs = repr(optimizer.logs())
    backward(copied, *one(9))
    copied.load_state_dict(copied.state_dict())
    assert repr(optimizer.logs()) == logs
    assert forwards == []
    fit(optimizer, batches(1, seed=2))  # the original goes on
    assert len(forwards) == 1
    again = DCPOptimizer(sgd(copied), copied, weight=1.0)
    assert sum(isinstance(hook, Hook) for hook in ours(copied)) == 2
    fit(again, batches(2))
    assert again.logs()["penalty"] > 0
    before.remove()
    after.remove()
    assert torch.equal(model(x), model.body(x))
    optimizer.detach()
    assert hooks_of(model) == hooks_of(Network())


# ---- traces and exports ----------------------------------------------------------------------------------------------


def by_trace(model, x):
    return torch.jit.trace(model, x, check_trace=False)


def by_export(model, x):
    return torch.export.export(model, (x,), strict=False).module()


def by_onnx(model, x, **options):
    stream = io.BytesIO()
    program = torch.onnx.export(model, (x,), *([] if options["dynamo"] else [stream]), **options)
    assert program is not None or stream.getvalue()


EXPORTS = {
    "jit.trace": by_trace,
    "export": by_export,
    "onnx": functools.partial(by_onnx, dynamo=True, verbose=False),
    "onnx, by trace": functools.partial(by_onnx, dynamo=False, training=torch.onnx.TrainingMode.PRESERVE),
}


@pytest.mark.filterwarnings("ignore")  # torch's own: deprecations, exports in training mode
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.integration] if "onnx" in form else []) for form in EXPORTS]
)
@EACH
def test_an_export_in_training_mode_is_the_models_and_no_training_forward(variant, form):
    results = []
    for exported in (False, True):
        model = Network()
        optimizer = wrap(variant, model)
        fit(optimizer, batches(2))
        if exported:
            x, forwards = one()[0], training_forwards(optimizer)
            alone = EXPORTS[form](model, x)
            assert forwards == []
            if alone is not None:
                assert torch.equal(alone(x), model.body(x))
        fit(optimizer, batches(2, seed=2))
        results.append((model.state_dict(), copy.deepcopy(optimizer.state_dict())))
    assert_same(*results)
