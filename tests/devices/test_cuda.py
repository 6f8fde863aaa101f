"""On a GPU: the values of the CPU, the promises that the other tests hold on it, and what only a GPU has.

No machine of the continuous integration has a GPU. ``python -m pytest -m gpu`` on one that has runs these and others.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW

from tests.devices import test_values as values
from tests.helpers import assert_same, batches, through_a_file
from tests.reference import EACH, EACH_WAY, assert_same_training, learned, term_of, wrap

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
STEPS = 20


@pytest.fixture(autouse=True)
def float32_as_it_is():
    """Convolutions are in TF32 by default, which has the 10 bits of float16."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.fixture
def repeatable(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---- the values of the CPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", values.WRAPPERS)
@pytest.mark.parametrize("name", values.CASES)
def test_a_gpu_computes_what_the_cpu_computes(name, method):
    case = values.CASES[name]
    there, here = (values.trained(case, method, device) for device in (torch.device("cuda"), CPU))
    weights, prototypes = values.TOLERANCES[case.dtype]
    assert values.apart(there[0], here[0]) < weights
    assert values.apart(there[1], here[1]) < prototypes


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("bad", values.BAD)
@pytest.mark.parametrize("name", values.FORECASTERS)
def test_the_term_learns_nothing_from_a_batch_that_is_not_finite(name, bad):
    method, mixed = values.FORECASTERS[name]
    left_out, found = (values.forecasts_after(how, method, mixed, torch.device("cuda")) for how in ("left out", bad))
    assert torch.equal(found, left_out)


# ---- loops -----------------------------------------------------------------------------------------------------------

BASES = {
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "SGD, fused": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "AdamW, fused": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "AdamW, capturable": lambda parameters: AdamW(parameters, lr=1e-2, capturable=True),
    "AdamW, foreach": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
}
HALVES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
EACH_BASE = pytest.mark.parametrize("base", BASES)
EACH_HALF = pytest.mark.parametrize("half", HALVES)


class Net(nn.Module):
    """Dropout draws from the GPU's own generator."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.LazyLinear(48), nn.ReLU(), nn.Dropout(dropout), nn.Linear(48, 5))
        self.net(next(batches(1, dtype=torch.float32))[0])

    def forward(self, x):
        return self.net(x)


def data(steps=STEPS):
    return [(x.cuda(), y.cuda()) for x, y in batches(steps, 64, dtype=torch.float32)]


def scaler_for(half):
    return torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=6, enabled=half == "float16")


def train(optimizer, steps, half="float32", way="line", call=None):
    """Train as torch's guide to mixed precision has it, and return the weights."""
    scaler, dtype = scaler_for(half), HALVES[half]
    term = term_of(optimizer, way)
    forward = optimizer.model if call is None else call
    for x, y in steps:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            z = forward(x)
            loss = F.cross_entropy(z, y) + term(z, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # as it does for a wrapper; a fused SGD divides in its kernel, with other roundings
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([parameter.detach().flatten() for parameter in optimizer.model.parameters()])


def wrapped(variant, base, dropout=0.0, **options):
    model = Net(dropout).cuda()
    return wrap(variant, model, BASES[base](model.parameters()), **options)


@pytest.mark.usefixtures("repeatable")
@EACH_HALF
@EACH_BASE
@EACH
def test_a_weight_of_zero_is_the_base_optimizer_bit_for_bit(variant, base, half):
    model = Net(0.3).cuda()
    plain = BASES[base](model.parameters())
    plain.model = model
    optimizer = wrapped(variant, base, 0.3, weight=0.0)
    found = []
    for each in (plain, optimizer):
        torch.cuda.manual_seed(1)
        found.append(train(each, data(), half))
    assert torch.equal(*found)


@EACH_HALF
@EACH_BASE
@EACH
def test_the_line_and_the_term_train_alike(variant, base, half):
    rounding = torch.finfo(HALVES[half] or torch.float32).eps
    start = torch.cat([parameter.flatten() for parameter in Net(0.0).cuda().parameters()]).detach()
    line, term = (train(wrapped(variant, base), data(), half, way) for way in ("line", "term"))
    plain = train(wrapped(variant, base, weight=0.0), data(), half)
    tolerance = 32 * rounding * (term - start).norm()
    assert (line - term).norm() < tolerance
    assert (plain - term).norm() > tolerance or half != "float32"


@pytest.mark.usefixtures("repeatable")
@EACH_BASE
@EACH
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(variant, base):
    torch.cuda.manual_seed(1)
    whole = wrapped(variant, base, 0.3)
    train(whole, data())

    torch.cuda.manual_seed(1)
    first = wrapped(variant, base, 0.3)
    train(first, data()[:9])
    saved = through_a_file(
        {"model": first.model.state_dict(), "optimizer": first.state_dict(), "draws": torch.cuda.get_rng_state()}
    )
    second = wrapped(variant, base, 0.3)
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    torch.cuda.set_rng_state(saved["draws"])
    train(second, data()[9:])
    assert_same_training(whole, second)


# ---- what only a GPU has ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
@EACH_WAY
@EACH
def test_a_compiled_model_trains_as_it_does_without(variant, way, mode):
    """Also in CUDA graphs, whose outputs the next replay overwrites."""
    torch._dynamo.reset()
    expected = wrapped(variant, "SGD")
    train(expected, data(), way=way)
    optimizer = wrapped(variant, "SGD")
    train(optimizer, data(), way=way, call=torch.compile(optimizer.model, mode=mode))
    assert_same_training(optimizer, expected, rtol=1e-3, atol=1e-4)


@EACH
def test_a_state_that_was_saved_on_a_gpu_is_loaded_on_the_cpu_and_back(variant):
    optimizer = wrapped(variant, "SGD")
    train(optimizer, data(6))
    model = copy.deepcopy(optimizer.model).cpu()
    here = wrap(variant, model, BASES["SGD"](model.parameters()))
    here.load_state_dict(optimizer.state_dict())
    assert all(not tensor.is_cuda for tensor in learned(here).values())
    assert_same(learned(here), {name: tensor.cpu() for name, tensor in learned(optimizer).items()})
    there = wrapped(variant, "SGD")
    there.load_state_dict(here.state_dict())
    assert_same(learned(there), learned(optimizer))
