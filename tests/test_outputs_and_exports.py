"""What models return besides logits, and what leaves the script: copies, pickles, traces, exports."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import pickle
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.hooks.outputs import find_logits
from tests.helpers import CLASSES, assert_same, backward, batches, cells, mlp, one, sgd, train, training_forwards, wrap


class Network(nn.Module):
    """A class of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x)


# ---- a model that returns (logits, loss), as nanoGPT's does ----------------------------------------------------------

VOCABULARY, TIME, STEPS = 11, 4, 2
BACKENDS = ["no compiler", "eager", "aot_eager"]
IGNORED_BY_TORCH = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


class GPT(nn.Module):
    """The shape of nanoGPT's: tied weights, the loss inside, logits of the last position alone without targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.mix = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = torch.tanh(self.mix(self.wte(idx)))
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Returning(nn.Module):
    """The same model with its output in another form."""

    def __init__(self, form) -> None:
        super().__init__()
        self.gpt, self.form = GPT(), form

    def forward(self, idx, targets):
        return self.form(*self.gpt(idx, targets))


def texts(steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(VOCABULARY, (6, TIME + 1), generator=generator)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


GIVEN = {"num_classes": VOCABULARY, "targets": "targets", "class_dim": -1}


def nanogpt(variant, backend, **options):
    """nanoGPT's loop: wrap, compile, accumulate, clip; evaluate now and then. The model and the optimizer."""
    model = raw_model = GPT()
    base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if variant == "dcl":
        optimizer = DCLOptimizer(base, model, weight=1.0)
    else:
        optimizer = DCPOptimizer(base, model, weight=1.0, alpha=0.6, **options)
    if backend != "no compiler":
        model = torch.compile(model, backend=backend)
    scaler, ctx = torch.amp.GradScaler("cpu", enabled=False), contextlib.nullcontext()
    for step, (x, y) in enumerate(texts(6)):
        for part, labels in zip(x.chunk(STEPS), y.chunk(STEPS), strict=True):
            with ctx:
                logits, loss = model(idx=part, targets=labels)
                loss = loss / STEPS
            assert logits.shape == (3, TIME, VOCABULARY)
            scaler.scale(loss).backward()
            assert optimizer.logs()["loss_scale"] == pytest.approx(1 / STEPS)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 2:
            model.eval()
            with torch.no_grad():
                assert model(idx=x)[0].shape == (6, 1, VOCABULARY)
                assert model(idx=x, targets=y)[1].ndim == 0
            model.train()
    return raw_model, optimizer


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("variant", "backend"),
    cells(
        itertools.product(["dcl", "dcp"], BACKENDS), ("dcl", "no compiler"), ("dcl", "aot_eager"), ("dcp", "aot_eager")
    ),
)
def test_nanogpts_loop(variant, backend):
    """Equal to the loop with the penalty in the loss."""
    model, optimizer = nanogpt(variant, backend)
    expected = GPT()
    base = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9)
    companion = copy.deepcopy(expected)
    chasing = torch.optim.SGD(companion.parameters(), lr=0.2, momentum=0.9)
    prototypes, seen = torch.zeros(VOCABULARY, VOCABULARY), torch.zeros(VOCABULARY, dtype=torch.bool)
    for x, y in texts(6):
        rows = []
        for part, labels in zip(x.chunk(STEPS), y.chunk(STEPS), strict=True):
            z, loss = expected(part, labels)
            if variant == "dcl":
                c = companion(part, labels)[0]
                loss = loss + F.mse_loss(z, c.detach())
                (F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()) / STEPS).backward()
            else:
                flat, known = labels.flatten(), seen[labels.flatten()]
                difference = (z.flatten(0, 1) - prototypes[flat])[known]
                loss = loss + difference.square().sum() / (flat.numel() * VOCABULARY)
                rows.append((z.detach().flatten(0, 1), flat))
            (loss / STEPS).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        for each in (base, chasing) if variant == "dcl" else (base,):
            each.step()
            each.zero_grad()
        if variant == "dcp":
            z, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
            for k in labels.unique():
                mean = z[labels == k].mean(0)
                prototypes[k] = 0.6 * prototypes[k] + 0.4 * mean if seen[k] else mean
                seen[k] = True
    assert_same(model, expected, rtol=1e-4, atol=1e-6)
    if variant == "dcl":
        assert_same(optimizer.companion, companion, rtol=1e-4, atol=1e-6)
        assert optimizer.companion.wte.weight is optimizer.companion.lm_head.weight
    else:
        assert_same(optimizer.prototypes, prototypes, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", cells(BACKENDS, "no compiler", "aot_eager"))
def test_nanogpts_labels_are_read(backend):
    """Of a compiled model no gradient tells; they are the argument whose cross-entropy with the logits is the loss."""
    model, reading = nanogpt("dcp", backend)
    torch._dynamo.reset()
    expected, given = nanogpt("dcp", backend, **GIVEN)
    assert_same(model, expected, rtol=0, atol=0)
    assert_same(reading.prototypes, given.prototypes, rtol=0, atol=0)


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
def test_labels_hidden_in_a_compiled_models_own_loss_that_is_no_arguments_are_refused_at_the_first_backward():
    """All its rows have no gradient, as ignored ones have, and the loss is twice any argument's cross-entropy."""
    model = Returning(lambda logits, loss: (logits, 2 * loss))
    optimizer = DCPOptimizer(sgd(model), model)
    compiled = torch.compile(model, backend="aot_eager")
    x, y = next(texts(1))
    with pytest.raises(RuntimeError, match=r"compiled.*cannot be read.*targets=.*class_dim=-1.*set_targets"):
        compiled(idx=x, targets=y)[1].backward()
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.forecaster.seen.any()


class Doubled(GPT):
    """Gets the labels twice, the second time with one that differs, or as rows."""

    def forward(self, idx, targets, previous):
        return super().forward(idx, targets)


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
def test_labels_of_a_compiled_models_own_loss_are_told_from_other_arguments():
    x, y = next(texts(1))
    other = y.clone()
    other[0, 0] = (y[0, 0] + 1) % VOCABULARY
    for previous in (other, y.clone(), y.flatten()):
        model = Doubled()
        optimizer = DCPOptimizer(sgd(model), model)
        torch.compile(model, backend="aot_eager")(x, y, previous)[1].backward()
        optimizer.step()
        assert optimizer.forecaster.seen.tolist() == [bool((y == k).any()) for k in range(VOCABULARY)]


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
def test_labels_of_a_compiled_models_own_loss_are_not_guessed():
    """Of logits that are all the same every argument has the loss for its cross-entropy."""
    model = GPT()
    optimizer = DCPOptimizer(sgd(model), model)
    with torch.no_grad():
        model.wte.weight.zero_()
    with pytest.raises(RuntimeError, match="nor is there one argument"):
        torch.compile(model, backend="aot_eager")(*next(texts(1)))[1].backward()
    optimizer.detach()


class Shifted(GPT):
    """The loss of a causal language model of transformers: a position's logits are of the next one's label."""

    def forward(self, idx, labels):
        logits = self.lm_head(torch.tanh(self.mix(self.wte(idx))))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
def test_shifted_labels_of_a_compiled_models_own_loss_are_those_that_are_given():
    trained = []
    for options in (
        {},
        {"num_classes": VOCABULARY, "class_dim": -1, "targets": lambda args, kwargs: shifted(**kwargs)},
    ):
        model = Shifted()
        optimizer = DCPOptimizer(sgd(model), model, weight=1.0, **options)
        compiled = torch.compile(model, backend="aot_eager")
        for x, _ in texts(4):
            optimizer.zero_grad()
            compiled(idx=x, labels=x.where(x != 3, -100))["loss"].backward()
            optimizer.step()
        trained.append((model.state_dict(), optimizer.prototypes))
    assert_same(*trained, rtol=0, atol=0)


def shifted(idx, labels):
    return F.pad(labels[:, 1:], (0, 1), value=-100)


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_class_dimension_hidden_in_a_compiled_models_own_loss_is_asked_for():
    model = GPT()
    optimizer = DCLOptimizer(sgd(model), model, distance="kl")
    x, y = next(texts(1))
    with pytest.warns(UserWarning, match=r"class_dim was not given, and cannot be read"):
        torch.compile(model, backend="aot_eager")(idx=x, targets=y)[1].backward()
    optimizer.step()


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


OWN_LOSSES = {
    "cross-entropy": F.cross_entropy,
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype)),
}


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("loss", "form", "compiled"),
    cells(
        itertools.product(OWN_LOSSES, FORMS, [False, True]),
        *(("squares", form, False) for form in FORMS),
        *(("cross-entropy", "tuple", False), ("cross-entropy", "list", True), ("squares", "dict", True)),
    ),
)
def test_the_models_own_loss_in_any_form_of_output(loss, form, compiled):
    """Equal to a loss outside with the scale given; the caller gets the form that the model returned."""
    loss_of = OWN_LOSSES[loss]
    model, expected = WithLoss(loss_of, FORMS[form]), mlp()
    optimizer, reference = wrap(model), wrap(expected, loss_scale=0.25)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    for x, y in batches(4):
        optimizer.zero_grad()
        output = call(x, y)
        assert type(output) is type(FORMS[form](None, None))
        (loss,) = (part for part in tree_leaves(output) if isinstance(part, Tensor) and not part.ndim)
        loss *= 0.25  # in place, as some trainers do
        loss.backward()
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.25)
        optimizer.step()
        train(expected, reference, [(x, y)], lambda z, y: 0.25 * loss_of(z, y))
    assert_same(model.body, expected, rtol=1e-10, atol=1e-12)


class WithLoss(nn.Module):
    def __init__(self, loss_of, form) -> None:
        super().__init__()
        self.body, self.loss_of, self.form = mlp(), loss_of, form

    def forward(self, x, y):
        logits = self.body(x)
        return self.form(logits, self.loss_of(logits, y))


# ---- which of several tensors are the logits ------------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self, form) -> None:
        super().__init__()
        self.body, self.head, self.form = mlp(), nn.Linear(CLASSES, CLASSES).double(), form

    def forward(self, x):
        features = self.body(x)
        logits = self.head(features)
        return self.form(features, logits, F.cross_entropy(logits, torch.zeros(len(x)).long(), reduction="none"))


AMBIGUOUS = {  # the form, what is taken, what is named as well
    "features, logits": (lambda f, z, e: (f, z), r"a tuple .* is on item 0 of shape \(16, 5\), not on item 1 of"),
    "losses, logits": (
        lambda f, z, e: [e, z],
        r"a list .* is on item 1 of .*, not on item 0 of shape \(16,\)",
    ),
    "logits, losses": (lambda f, z, e: (z, e), r"is on item 0 of shape \(16, 5\), not on item 1 of shape \(16,\)"),
}


@pytest.mark.parametrize("form", AMBIGUOUS)
def test_a_choice_that_no_name_decides_is_said_once(form):
    make, message = AMBIGUOUS[form]
    model = Several(make)
    optimizer, (x, _) = wrap(model), one()
    with torch.no_grad():
        model(x)
    with pytest.warns(UserWarning, match=message + r".* pass logits=lambda output: output\[\.\.\.\] to choose"):
        output = model(x)
    find_logits(output).sum().backward()
    optimizer.step()
    model(x)  # nothing more is said
    optimizer = wrap(model, logits=lambda output: output[1])
    optimizer.model(x)


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
    "0-dim": (lambda z: z.mean(), r"is a scalar \(0-dim\), as a loss is; let the model return its logits too"),
    "only a loss": (lambda z: (z.mean(), None), r"is a scalar \(0-dim\)"),
    "complex": (lambda z: torch.complex(z, z), r"is complex \(torch.complex128\); let the model return real logits"),
    "integer": (lambda z: z.argmax(1), r"is of torch.int64, as labels are"),
    "bool": (lambda z: {"logits": z > 0}, r"is of torch.bool"),
    "nested": (lambda z: ((z, z), z), "no logits found in the model's output of type tuple"),
    "empty": (lambda z: (), "no logits found in the model's output of type tuple"),
}


@pytest.mark.parametrize("form", WRONG)
def test_what_cannot_be_logits_is_named(form):
    make, message = WRONG[form]
    model = Several(lambda f, z, e: make(z))
    optimizer = wrap(model)
    with pytest.raises(TypeError, match=message):
        optimizer.model(one()[0])


@pytest.mark.parametrize("chosen", [lambda z: z.mean(), lambda z: torch.complex(z, z), lambda z: z.argmax(1), tuple])
def test_what_logits_returns_is_checked(chosen):
    optimizer = wrap(mlp(), logits=chosen)
    with pytest.raises(TypeError, match=r"scalar|complex|torch\.int64|no logits found"):
        optimizer.model(one()[0])


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
def test_a_pre_hook_of_the_model_changes_the_inputs_once_and_those_of_a_script_that_calls_the_companion(training):
    model, (x, y) = mlp(), one()
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    optimizer = wrap(model.train(training), count_eval=True)
    backward(model, x, y)
    assert optimizer.penalty == 0.0
    assert torch.equal(optimizer.companion(x), model(x))


def test_count_eval_is_a_flag():
    with pytest.raises(TypeError, match="count_eval=1 must be True or False"):
        wrap(mlp(), count_eval=1)


class OwnCall(Network):
    """Runs no hooks, as classes may that override the call."""

    def __call__(self, x):
        return self.forward(x)


CALLS = {
    "eval mode": (lambda: Network().eval(), lambda model, x: model(x), r"eval mode \(pass count_eval=True"),
    "forward": (Network, lambda model, x: model.forward(x), r"model\.forward was called"),
    "own call": (OwnCall, lambda model, x: model(x), r"the model's class overrides __call__"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_does_not_count_is_named_at_the_first_step(case):
    make, call, message = CALLS[case]
    model, (x, y) = make(), one()
    optimizer = wrap(model)
    F.cross_entropy(call(model, x), y).backward()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


class RenamedByCopies(nn.Module):
    """As a Keras model: its copy's parameters have other names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, mlp())

    def forward(self, x):
        return next(self.children())(x)

    def __deepcopy__(self, memo):
        copied = RenamedByCopies("copied")
        copied.copied.load_state_dict(next(self.children()).state_dict())
        return copied


def test_a_copy_with_other_names_is_refused_and_one_of_the_scripts_works():
    model = RenamedByCopies("body")
    with pytest.raises(RuntimeError, match=r"parameter 'body.0.weight' is called 'copied.0.weight'.*companion="):
        train(model, wrap(model), batches(1))
    expected = mlp()
    train(model, wrap(model, companion=copy.deepcopy(model)), batches(4))
    train(expected, wrap(expected), batches(4))
    assert_same(model.body, expected)


# ---- differential privacy --------------------------------------------------------------------------------------------


def marked(model):
    """Mark the parameters as opacus' GradSampleModule does."""
    for parameter in model.parameters():
        parameter.grad_sample = None
    return model


@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_private_training_is_refused_before_and_after_wrapping(variant):
    make = wrap if variant == "dcl" else lambda m: DCPOptimizer(sgd(m), m, CLASSES)
    with pytest.raises(ValueError, match=r"per-sample gradients .* opacus.*privacy accounting would not hold"):
        make(marked(mlp()))
    model, (x, y) = mlp(), one()
    optimizer = make(model)
    marked(model)
    with pytest.raises(RuntimeError, match=r"was made private.* opacus.*; call detach\(\)"):
        model(x)
    optimizer.detach()
    backward(model, x, y)


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["hooks", "ew", "ghost"])
@pytest.mark.parametrize("wrapped_first", [False, True])
@pytest.mark.filterwarnings("ignore")  # opacus' own
def test_opacus_is_refused(wrapped_first, mode):
    import opacus

    model, criterion = mlp(dtype=torch.float32), nn.CrossEntropyLoss()
    data = torch.utils.data.TensorDataset(*next(iter(batches(1, dtype=torch.float32))))
    base = wrap(model) if wrapped_first else sgd(model)
    private, optimizer, *_ = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=base,
        data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=criterion,
        grad_sample_mode=mode,
    )
    if wrapped_first:
        with pytest.raises(RuntimeError, match="was made private"):
            private(data.tensors[0])
    else:
        for inner in (private, model):
            with pytest.raises(ValueError, match="opacus"):
                DCLOptimizer(optimizer, inner)
            with pytest.raises(ValueError, match="opacus"):
                DCLOptimizer(base, inner)


# ---- copies and pickles of a wrapped module --------------------------------------------------------------------------

SAFE = [Network, nn.Sequential, nn.Linear, nn.Tanh, nn.CrossEntropyLoss]
COPIES = {
    "torch.save, weights_only": lambda module: loaded(saved(module), weights_only=True),
    "torch.save": lambda module: loaded(saved(module), weights_only=False),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "deepcopy": copy.deepcopy,
}


def saved(module):
    stream = io.BytesIO()
    torch.save(module, stream)
    return stream.getvalue()


def loaded(data, **options):
    with torch.serialization.safe_globals(SAFE):
        return torch.load(io.BytesIO(data), **options)


def tables(module):
    return {name: dict(value) for name, value in vars(module).items() if "_hooks" in name}


def doubled(module, args, output):
    return 2 * output


@pytest.mark.parametrize("form", COPIES)
def test_a_copy_of_a_wrapped_module_has_no_hook_of_ours(form):
    model, criterion = Network(), nn.CrossEntropyLoss()
    plain = tables(Network())
    first = DCPOptimizer(sgd(model), model, CLASSES)
    second = DCPOptimizer(sgd(other := Network()), other, CLASSES)
    train(model, first, batches(2), criterion)
    copied = COPIES[form](model)
    assert {name: table for name, table in tables(copied).items() if table} == {}
    assert tables(copied).keys() == plain.keys()
    assert_same(copied, model)
    before = repr((first.logs(), second.logs()))  # nan is not equal to itself
    backward(copied, *one(9))
    assert repr((first.logs(), second.logs())) == before
    train(model, first, batches(1, seed=2), criterion)  # the originals go on
    train(other, second, batches(1, seed=2), criterion)
    again = wrap(copied)
    train(copied, again, batches(2))
    assert again.penalty > 0


@pytest.mark.parametrize("form", list(COPIES)[1:])
def test_hooks_of_the_script_are_copied_and_their_handles_hold(form):
    model = Network()
    before = model.register_forward_hook(doubled)
    optimizer = wrap(model)
    forwards = training_forwards(optimizer)
    after = model.register_forward_hook(doubled, always_call=True)
    copied, x = COPIES[form](model), one()[0]
    assert list(copied._forward_hooks.values()) == [doubled, doubled]
    assert torch.equal(copied(x), 4 * copied.body(x))
    before.remove()
    after.remove()
    assert torch.equal(model(x), model.body(x))
    assert len(forwards) == 1
    optimizer.detach()
    assert tables(COPIES[form](model)) == tables(Network())


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
