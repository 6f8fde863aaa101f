"""The hooks on the model: which calls they see, and what copies, pickles, traces and exports have of them."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCPOptimizer
from dcl_optim._hooks import is_ours
from tests.helpers import CLASSES, assert_same, backward, batches, mlp, one, sgd, train, training_forwards, wrap


class Network(nn.Module):
    """A class of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)


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


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_replicas_of_the_model_are_refused_before_anything_changes(replicas, variant):
    """One of them got the penalty, at random: the others' forward passes were lost."""
    model = Network()
    optimizer = wrap(model) if variant == "dcl" else DCPOptimizer(sgd(model), model)
    x, y = one()
    train(model, optimizer, batches(2))
    before = copy.deepcopy(optimizer.state_dict())
    first, second = replicas(model)
    for replica in (first, second):
        with pytest.raises(RuntimeError, match=r"(?s)by nn.DataParallel.*Fix: .*\(optimizer, nn.DataParallel\(model"):
            replica(x)
    with torch.no_grad():
        assert_same(second(x), model(x))  # an evaluation is none of our business
    assert_same(optimizer.state_dict(), before)
    train(model, optimizer, [(x, y)])


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_replicas_inside_the_wrapped_model_are_trained(replicas, variant):
    """As nn.DataParallel's, if that is what was wrapped: equal to the model alone."""

    class Parallel(Network):
        def forward(self, x):
            return torch.cat([replica(part) for replica, part in zip(replicas(self.body), x.chunk(2), strict=True)])

    models = [Parallel(), Network()]
    for model in models:
        optimizer = wrap(model) if variant == "dcl" else DCPOptimizer(sgd(model), model, weight=1.0)
        train(model, optimizer, batches(5))
        assert optimizer.penalty > 0
    assert_same(*models, rtol=1e-9, atol=1e-12)


# ---- forwards in eval mode, and calls that no hook sees --------------------------------------------------------------


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_training_in_eval_mode(variant):
    """Equal to training without dropout and with batch norm's statistics frozen; evaluation under no_grad is none."""
    model = nn.Sequential(mlp(), nn.BatchNorm1d(CLASSES), nn.Dropout(0.5)).double().eval()
    model[1].running_var.fill_(2.0)
    expected = copy.deepcopy(model).train()
    for layer in expected[1:]:
        layer.eval()
    criterion = nn.CrossEntropyLoss()

    def make(net, **options):
        if variant != "dcp":
            return wrap(net, **options)
        return DCPOptimizer(sgd(net), net, CLASSES, weight=1.0, alpha=0.6, **options)

    optimizer, reference = make(model, count_eval=True), make(expected)
    forwards = training_forwards(optimizer)
    for batch in batches(4):
        train(model, optimizer, [batch], criterion)
        with torch.no_grad():
            model(batch[0])
        train(expected, reference, [batch], criterion)
    assert_same(model, expected)
    assert len(forwards) == 4
    assert optimizer.penalty > 0
    if variant != "dcp":
        assert_same(optimizer.companion, reference.companion)
        assert not any(module.training for module in optimizer.companion.modules())
    model.train()
    model[2].eval()
    train(model, optimizer, batches(1), criterion)  # either mode
    assert len(forwards) == 5


@pytest.mark.parametrize("training", [False, True])
def test_a_pre_hook_of_the_model_changes_the_inputs_of_both_once(training):
    model, (x, y) = mlp(), one()
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    optimizer = wrap(model.train(training), count_eval=True)
    backward(model, x, y)
    assert optimizer.penalty == 0.0
    assert torch.equal(optimizer.companion(2 * x), model(x))  # it has no such hook itself


def test_count_eval_is_a_flag():
    with pytest.raises(TypeError, match="count_eval=1 must be True or False"):
        wrap(mlp(), count_eval=1)


class OwnCall(Network):
    """Runs no hooks, as classes may that override the call."""

    def __call__(self, x):
        return self.forward(x)


class Encoder(Network):
    """As PyTorch Geometric's autoencoders, whose scripts call ``model.encode``."""

    def encode(self, x):
        return self.body(x)


CALLS = {
    "eval mode": (lambda: Network().eval(), lambda model, x: model(x), r"(?s)is in eval mode.*count_eval=True"),
    "forward": (Network, lambda model, x: model.forward(x), r"model\.forward, .* was called"),
    "another method": (Encoder, lambda model, x: model.encode(x), r"another method of the model, .* was called"),
    "own call": (OwnCall, lambda model, x: model(x), r"its class overrides __call__"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_does_not_count_is_named_at_the_first_step(case):
    make, call, message = CALLS[case]
    model, (x, y) = make(), one()
    optimizer = wrap(model)
    F.cross_entropy(call(model, x), y).backward()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


# ---- copies and pickles of a wrapped module --------------------------------------------------------------------------

COPIES = {
    "torch.save": lambda module: torch.load(io.BytesIO(saved(module)), weights_only=False),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "deepcopy": copy.deepcopy,
}


def saved(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    return stream.getvalue()


def hooks_of(module):
    return {name: list(value.values()) for name, value in vars(module).items() if "_hooks" in name}


def ours(module):
    return [hook for table in hooks_of(module).values() for hook in table if is_ours(hook)]


@pytest.mark.parametrize("form", COPIES)
def test_the_hooks_in_a_copy_of_a_wrapped_module_do_nothing(form):
    model = Network()
    first = DCPOptimizer(sgd(model), model, CLASSES)
    train(model, first, batches(2))
    copied = COPIES[form](model)
    assert_same(copied, model)
    assert all(hook.listener() is None for hook in ours(copied))
    before = repr(first.logs())
    forwards = training_forwards(first)
    backward(copied, *one(9))
    copied.load_state_dict(copied.state_dict())
    assert repr(first.logs()) == before
    assert forwards == []
    train(model, first, batches(1, seed=2))  # the original goes on
    assert len(forwards) == 1
    again = wrap(copied)
    assert len(ours(copied)) == 3, "those that did nothing have gone"
    train(copied, again, batches(2))
    assert again.penalty > 0


@pytest.mark.parametrize("form", COPIES)
def test_hooks_of_the_script_are_copied_and_their_handles_hold(form):
    model = Network()
    before = model.register_forward_hook(doubled)
    optimizer = wrap(model)
    forwards = training_forwards(optimizer)
    after = model.register_forward_hook(doubled, always_call=True)
    copied, x = COPIES[form](model), one()[0]
    assert [hook for hook in copied._forward_hooks.values() if not is_ours(hook)] == [doubled, doubled]
    assert torch.equal(copied(x), 4 * copied.body(x))
    before.remove()
    after.remove()
    assert torch.equal(model(x), model.body(x))
    assert len(forwards) == 1
    optimizer.detach()
    assert hooks_of(model) == hooks_of(Network())


def doubled(module, args, output):
    return 2 * output


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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's own
def test_torch_jit_script_says_how_to_take_the_hooks_off():
    model = mlp()
    optimizer = wrap(model)
    with pytest.raises(AttributeError, match=r"before torch.jit.script\(model\) call optimizer.detach\(\)"):
        torch.jit.script(model)
    optimizer.detach()
    assert torch.equal(torch.jit.script(model)(one()[0]), model(one()[0]))


@pytest.mark.filterwarnings("ignore")  # torch's own: deprecations, exports in training mode
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.integration] if "onnx" in form else []) for form in EXPORTS]
)
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_an_export_is_the_models_and_no_training_forward(variant, form, training):
    results = []
    for exported in (False, True):
        model, criterion = Network(), nn.CrossEntropyLoss()
        optimizer = wrap(model, count_eval=True) if variant == "dcl" else DCPOptimizer(sgd(model), model, CLASSES)
        train(model, optimizer, batches(2), criterion)
        if exported:
            model.train(training)
            x, forwards = one()[0], training_forwards(optimizer)
            alone = EXPORTS[form](model, x)
            assert forwards == []
            if alone is not None:
                assert torch.equal(alone(x), model.body(x))
            model.train()
        train(model, optimizer, batches(2, seed=2), criterion)
        results.append((model.state_dict(), copy.deepcopy(optimizer.state_dict())))
    assert_same(*results)
