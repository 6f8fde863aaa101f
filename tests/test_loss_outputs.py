"""What a model returned: its logits, the loss that it took from them, the tensor that logits were converted from."""

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
from dcl_optim.loss.outputs import conversion_source, find_logits
from tests.helpers import CLASSES, assert_same, batches, cells, mlp, one, sgd, train, wrap

# ---- logits that were converted --------------------------------------------------------------------------------------


def test_conversion_source():
    leaf = torch.ones(2, 3, requires_grad=True)
    computed = leaf * 2
    assert conversion_source(computed) is None
    assert conversion_source(leaf.double()) is None, "nothing was computed before"
    node, index = conversion_source(computed.double().half())
    assert node is computed.grad_fn
    assert index == 0


class Converting(nn.Module):
    """Returns converted logits, and the loss of them before; accelerate's mixed precision makes models do so."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(dtype=torch.float32)

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits.double()}


@pytest.mark.parametrize("own_loss", [True, False])
@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
def test_a_loss_of_logits_that_were_converted_counts_once(kind, own_loss):
    """Whether it was taken before or after: equal to the plain loop on the body."""
    model, plain = Converting(), mlp(dtype=torch.float32)
    optimizer, expected = kind(sgd(model), model, weight=1.0), kind(sgd(plain), plain, weight=1.0)
    for x, y in batches(5, dtype=torch.float32):
        optimizer.zero_grad()
        output = model(x, y)
        (0.5 * (output["loss"] if own_loss else F.cross_entropy(output["logits"], y))).backward()
        optimizer.step()
        train(plain, expected, [(x, y)], lambda z, y: 0.5 * F.cross_entropy(z, y))
        assert optimizer.logs()["loss_scale"] == pytest.approx(0.5, rel=1e-5)
    assert_same(model.body, plain, rtol=1e-4, atol=1e-6)


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


def texts(steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(VOCABULARY, (6, TIME + 1), generator=generator)
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()


def nanogpt(variant, backend):
    """nanoGPT's loop: wrap, compile, accumulate, clip; evaluate now and then. The model and the optimizer.

    A compiler hides the gradient of the logits where the loss is inside: the penalty is a term then.
    """
    model = raw_model = GPT()
    base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if variant == "dcl":
        optimizer = DCLOptimizer(base, model, weight=1.0)
    else:
        optimizer = DCPOptimizer(base, model, weight=1.0, alpha=0.6)
    if backend != "no compiler":
        model = torch.compile(model, backend=backend)
    scaler, ctx = torch.amp.GradScaler("cpu", enabled=False), contextlib.nullcontext()
    for step, (x, y) in enumerate(texts(6)):
        for part, labels in zip(x.chunk(STEPS), y.chunk(STEPS), strict=True):
            with ctx:
                logits, loss = model(idx=part, targets=labels)
                if backend == "aot_eager":
                    given = (logits,) if variant == "dcl" else (logits.flatten(0, 1), labels.flatten())
                    loss = loss + optimizer.penalty(*given)
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
    cells(itertools.product(["dcl", "dcp"], BACKENDS), ("dcl", "no compiler"), ("dcp", "eager"), ("dcp", "aot_eager")),
)
def test_nanogpts_loop(variant, backend):
    """Equal to the loop with the penalty in the loss."""
    model, optimizer = nanogpt(variant, backend)
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
@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
def test_a_loss_that_a_compiled_model_hides_is_refused_at_the_first_step(kind):
    model = GPT()
    optimizer = kind(sgd(model), model)
    x, y = next(texts(1))
    torch.compile(model, backend="aot_eager")(idx=x, targets=y)[1].backward()
    with pytest.raises(RuntimeError, match=r"did not come through the logits.*\n  Fix: .*loss \+ optimizer\.penalty\("):
        optimizer.step()
    assert_same(model, GPT())


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
    def __init__(self, form) -> None:
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
        train(expected, reference, [(x, y)], lambda z, y: 0.25 * F.cross_entropy(z, y))
    assert_same(model.body, expected, rtol=1e-10, atol=1e-12)


# ---- which of several tensors are the logits ------------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self, form) -> None:
        super().__init__()
        self.body, self.head, self.form = mlp(), nn.Linear(CLASSES, CLASSES).double(), form

    def forward(self, x):
        features = self.body(x)
        logits = self.head(features)
        return self.form(features, logits, F.cross_entropy(logits, torch.zeros(len(x)).long(), reduction="none"))


@pytest.mark.parametrize("kind", [DCLOptimizer, DCPOptimizer])
def test_the_error_of_logits_that_are_another_tensor_of_the_output_names_the_argument(kind):
    """The first tensor with rows and classes is taken; its gradient is that of the head after it."""
    model = Several(lambda f, z, e: (f, z))
    optimizer, (x, y) = kind(sgd(model), model), one()
    loss = F.cross_entropy(model(x)[1], y)
    with pytest.raises(RuntimeError, match=r"Fix: add the penalty.*pass logits=lambda output: output\[1\]"):
        loss.backward()
    assert optimizer.logs()["step"] == 0
    optimizer = kind(sgd(model), model, logits=lambda output: output[1])
    with pytest.raises(RuntimeError, match=r"optimizer\.penalty\([a-z, ]*\); for the gradient"):  # it was chosen
        model(x)[1].square().mean().backward()
    F.cross_entropy(model(x)[1], y).backward()
    assert optimizer.logs()["loss_scale"] == pytest.approx(1.0)


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
    model = Several(lambda f, z, e: make(z))
    optimizer = wrap(model)
    with pytest.raises(TypeError, match=message):
        optimizer.model(one()[0])


@pytest.mark.parametrize("chosen", [lambda z: z.mean(), lambda z: torch.complex(z, z), lambda z: z.argmax(1), tuple])
def test_what_logits_returns_is_checked(chosen):
    optimizer = wrap(mlp(), logits=chosen)
    with pytest.raises(TypeError, match=r"shape \(\)|complex|torch\.int64|no logits found"):
        optimizer.model(one()[0])
