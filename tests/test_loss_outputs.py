"""What a model returned: its logits, a loss that it computed itself, the tensor that logits were converted from."""

from __future__ import annotations

import contextlib
import copy
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.loss.outputs import conversion_source, find_logits, find_loss, find_shift
from tests.helpers import CLASSES, assert_same, batches, cells, mlp, one, sgd, train, wrap

# ---- logits and losses in what a model returned ----------------------------------------------------------------------


def test_find_shift():
    """Which labels have the loss: those of the position, those of the next one, neither."""
    torch.manual_seed(0)
    z, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    plain = F.cross_entropy(z.flatten(0, 1), labels.flatten())
    moved = F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert find_shift(labels, z, plain) is False
    assert find_shift(labels, z, moved) is True
    assert find_shift(labels, z, 2 * plain) is None
    assert find_shift(labels[:, 1:], z, moved) is None
    assert find_shift(labels.float(), z, plain) is None
    assert find_shift(labels, torch.zeros_like(z), torch.tensor(7.0).log()) is None, "both have that loss"
    assert find_shift(labels[0], z[0], F.cross_entropy(z[0], labels[0])) is False
    assert find_shift(labels[0], z[0], 1.1 * F.cross_entropy(z[0], labels[0])) is None


def test_conversion_source():
    leaf = torch.ones(2, 3, requires_grad=True)
    computed = leaf * 2
    assert conversion_source(computed) is None
    assert conversion_source(leaf.double()) is None, "nothing was computed before"
    node, index = conversion_source(computed.double().half())
    assert node is computed.grad_fn
    assert index == 0


def test_find_loss():
    loss = torch.ones(2, requires_grad=True).sum()
    assert find_loss({"loss": loss}) is loss
    assert find_loss({"loss": loss.detach()}) is None
    assert find_loss({"loss": torch.ones(2, requires_grad=True) * 2}) is None
    assert find_loss(loss) is None
    assert find_loss(({"loss": loss},)) is None


def test_of_two_scalars_neither_is_the_models_loss():
    first, second = (torch.ones(2, requires_grad=True).sum() for _ in range(2))
    assert find_loss((torch.ones(2, 3), first)) is first
    assert find_loss((torch.ones(2, 3), first, second.detach())) is first
    assert find_loss((torch.ones(2, 3), first, second)) is None


# ---- logits that were converted --------------------------------------------------------------------------------------


class Converting(nn.Module):
    """Takes its loss from its logits and returns converted ones, as accelerate's mixed precision makes models do."""

    def __init__(self, loss_of) -> None:
        super().__init__()
        self.body, self._loss_of = mlp(dtype=torch.float32), loss_of

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": self._loss_of(logits, labels), "logits": logits.double()}


LOSSES = {
    "cross-entropy": F.cross_entropy,
    "squares": lambda z, y: F.mse_loss(z, F.one_hot(y, CLASSES).to(z.dtype)),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("variant", ["dcl", "dcp"])
def test_a_loss_taken_before_the_logits_were_converted(variant, loss_of):
    """Equal to the plain loop on the body; the factor on the model's own loss is read where cross-entropy's is not."""
    model, plain = Converting(loss_of), mlp(dtype=torch.float32)
    if variant == "dcl":
        optimizer, expected = (
            DCLOptimizer(sgd(model), model, weight=1.0),
            DCLOptimizer(sgd(plain), plain, loss_scale=0.5, weight=1.0),
        )
    else:
        optimizer = DCPOptimizer(sgd(model), model, CLASSES, targets="labels", weight=1.0, alpha=0.6)
        expected = DCPOptimizer(sgd(plain), plain, CLASSES, loss_scale=0.5, weight=1.0, alpha=0.6)
    for x, y in batches(5, dtype=torch.float32):
        optimizer.zero_grad()
        (0.5 * model(x, labels=y)["loss"]).backward()
        optimizer.step()
        expected.zero_grad()
        if variant == "dcp":
            expected.set_targets(y)
        (0.5 * loss_of(plain(x), y)).backward()
        expected.step()
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.5, rel=1e-5)
    assert_same(model.body, plain, rtol=1e-4, atol=1e-6)


def test_a_loss_on_the_converted_logits_counts_once():
    model, plain = nn.Sequential(mlp(dtype=torch.float32), ToDouble()), mlp(dtype=torch.float32)
    train(model, DCLOptimizer(sgd(model), model, weight=1.0), batches(4, dtype=torch.float32))
    train(plain, DCLOptimizer(sgd(plain), plain, weight=1.0), batches(4, dtype=torch.float32))
    assert_same(model[0], plain, rtol=1e-4, atol=1e-6)


class ToDouble(nn.Module):
    def forward(self, x):
        return x.double()


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
    model, optimizer = nanogpt(variant, backend, **(GIVEN if (variant, backend) == ("dcp", "aot_eager") else {}))
    expected = GPT()
    base = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9)
    companion = copy.deepcopy(expected)
    chasing = torch.optim.SGD(companion.parameters(), lr=0.2, momentum=0.9)
    prototypes, numbers = torch.zeros(VOCABULARY, VOCABULARY), torch.zeros(VOCABULARY)
    for x, y in texts(6):
        rows = []
        for part, labels in zip(x.chunk(STEPS), y.chunk(STEPS), strict=True):
            z, loss = expected(part, labels)
            if variant == "dcl":
                c = companion(part, labels)[0]
                loss = loss + F.mse_loss(z, c.detach())
                (F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()) / STEPS).backward()
            else:
                flat, known = labels.flatten(), numbers[labels.flatten()] > 0
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
                mine = z[labels == k]
                numbers[k] = 0.6 * numbers[k] + len(mine)
                prototypes[k] += (mine - prototypes[k]).sum(0) / numbers[k]
    assert_same(model, expected, rtol=1e-4, atol=1e-6)
    if variant == "dcl":
        assert_same(optimizer.companion, companion, rtol=1e-4, atol=1e-6)
        assert optimizer.companion.wte.weight is optimizer.companion.lm_head.weight
    else:
        assert_same(optimizer.prototypes, prototypes, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", cells(BACKENDS[:2], "no compiler"))
def test_nanogpts_labels_are_read(backend):
    model, reading = nanogpt("dcp", backend)
    torch._dynamo.reset()
    expected, given = nanogpt("dcp", backend, **GIVEN)
    assert_same(model, expected, rtol=1e-5, atol=1e-7)
    assert_same(reading.prototypes, given.prototypes, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
def test_labels_hidden_in_a_compiled_models_own_loss_are_refused_at_the_first_backward():
    """All rows of its logits have no gradient, as ignored ones have."""
    model = GPT()
    optimizer = DCPOptimizer(sgd(model), model)
    compiled = torch.compile(model, backend="aot_eager")
    x, y = next(texts(1))
    with pytest.raises(RuntimeError, match=r"(?s)compiled.*cannot be read.*targets=.*class_dim=-1.*set_targets"):
        compiled(idx=x, targets=y)[1].backward()
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.forecaster.seen.any()


class Shifted(GPT):
    """The loss of a causal language model of transformers: a position's logits are of the next one's label."""

    def forward(self, idx, labels):
        logits = self.lm_head(torch.tanh(self.mix(self.wte(idx))))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Unshifted(GPT):
    """The loss of a token classifier: a position's logits are of its label."""

    def forward(self, idx, labels):
        logits = self.lm_head(torch.tanh(self.mix(self.wte(idx))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.filterwarnings(*IGNORED_BY_TORCH)
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("kind", [Shifted, Unshifted])
def test_the_keyword_labels_of_a_compiled_models_own_loss_holds_them(kind):
    trained = []
    for options in ({}, {"class_dim": -1, "targets": shifted if kind is Shifted else "labels"}):
        model = kind()
        optimizer = DCPOptimizer(sgd(model), model, weight=1.0, **options)
        compiled = torch.compile(model, backend="aot_eager")
        for x, _ in texts(4):
            optimizer.zero_grad()
            compiled(idx=x, labels=x.where(x != 3, -100))["loss"].backward()
            optimizer.step()
        trained.append((model.state_dict(), optimizer.prototypes))
    assert_same(*trained)


def shifted(args, kwargs):
    return F.pad(kwargs["labels"][:, 1:], (0, 1), value=-100)


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
    "0-dim": (
        lambda z: z.mean(),
        r"(?s)is of torch.float64, shape \(\).*return real .* as in \(logits, loss\)",
    ),
    "only a loss": (lambda z: (z.mean(), None), r"shape \(\)\.\n  Fix: return"),
    "complex": (lambda z: torch.complex(z, z), r"(?s)is of torch.complex128.*real floating-point logits"),
    "integer": (lambda z: z.argmax(1), r"is of torch.int64"),
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
    with pytest.raises(TypeError, match=r"shape \(\)|complex|torch\.int64|no logits found"):
        optimizer.model(one()[0])
