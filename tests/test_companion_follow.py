"""What a script does to the model in the middle of a run, and the companion follows: place, mode, frozen layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import CLASSES, FEATURES, MODELS, assert_same, batch_norm_net, batches, mlp, sgd, train, wrap

CPU, META = torch.device("cpu"), torch.device("meta")
DATA = list(batches(5))


def small() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def devices(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


# ---- device, dtype and mode ------------------------------------------------------------------------------------------


@pytest.fixture
def _parameters_keep_their_identity() -> Iterator[None]:
    """As they do on their way to a GPU, where their data alone is exchanged."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_parameters_keep_their_identity")
def test_a_copy_goes_with_the_model_and_its_optimizer_with_it() -> None:
    model = mlp()
    optimizer = wrap(model)
    assert devices(optimizer.companion) == {CPU}
    model.to(META)
    optimizer.forecaster._network.follower.follow()
    assert devices(optimizer.companion) == {META}
    assert {parameter.device for parameter in optimizer.companion_optimizer.param_groups[0]["params"]} == {META}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_takes_the_models_dtype(dtype: torch.dtype) -> None:
    model = mlp()
    optimizer = wrap(model)
    train(model, optimizer, batches(2))
    model.to(dtype)
    model(torch.zeros(2, FEATURES, dtype=dtype))
    assert {parameter.dtype for parameter in optimizer.companion.parameters()} == {dtype}
    states = optimizer.companion_optimizer.state.values()
    assert {state["momentum_buffer"].dtype for state in states} == {dtype}


def test_the_state_is_not_loaded_anew_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = wrap(model)
    loads: list[Any] = []
    own = optimizer.companion_optimizer
    monkeypatch.setattr(own, "load_state_dict", lambda state, load=own.load_state_dict: (loads.append(1), load(state)))
    train(model, optimizer, batches(5))
    assert loads == []


def test_modes_are_mirrored_module_by_module():
    model = batch_norm_net()
    optimizer = wrap(model)
    model[1].eval()  # the frozen batch norm of fine-tuning scripts
    train(model, optimizer, batches(2))
    assert optimizer.companion[0].training
    assert not optimizer.companion[1].training
    assert optimizer.companion[1].num_batches_tracked == 0
    model[1].train()
    train(model, optimizer, batches(2))
    assert optimizer.companion[1].num_batches_tracked == 2


# ---- a companion that was given stays --------------------------------------------------------------------------------


@pytest.mark.parametrize("companion", [small, small()], ids=["callable", "module"])
def test_a_given_companion_stays_where_it_is_and_keeps_its_dtype(companion: Any) -> None:
    model = mlp()
    optimizer = wrap(model, companion=companion, loss_scale=1.0)
    model.to(META).float()
    optimizer.forecaster._network.follower.follow()
    assert devices(optimizer.companion) == {CPU}
    assert optimizer.companion.weight.dtype == torch.float64


def test_frozen_parameters_that_a_given_companion_shares_stay() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    companion = nn.Sequential(model[0], nn.Tanh(), nn.Linear(12, CLASSES).double())
    optimizer = wrap(model, companion=companion)
    train(model, optimizer, batches(2))
    assert optimizer.companion[0] is model[0]


class Elsewhere(nn.Module):
    """A companion on another device or of another dtype, which moves its inputs itself."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(x.to(next(self.network.parameters())))
        return logits


@pytest.mark.parametrize("name", ["mlp", "batch_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_given_companion_of_its_own_dtype_is_the_loop_written_by_hand(name: str, dtype: torch.dtype) -> None:
    model, hand = MODELS[name](), MODELS[name]()
    companion = copy.deepcopy(hand).to(dtype)
    optimizer = wrap(model, companion=Elsewhere(copy.deepcopy(companion)))
    base, second = sgd(hand), sgd(companion)
    train(model, optimizer, batches(20))
    for x, y in batches(20):
        z, c = hand(x), companion(x.to(dtype))
        base.zero_grad()
        (F.cross_entropy(z, y) + F.mse_loss(z, c.detach().double())).backward()
        base.step()
        second.zero_grad()
        wide = c.detach().float()
        target = torch.lerp(z.detach(), c.detach().double(), 0.6).float()
        c.backward((2 / c.numel() * (wide - target)).to(dtype))
        second.step()
    assert next(optimizer.companion.parameters()).dtype == dtype
    assert_same(model, hand, rtol=1e-3, atol=1e-4)
    ours, by_hand, start = (flat(module) for module in (optimizer.companion, companion, MODELS[name]()))
    assert (ours - by_hand).norm() < 0.1 * (by_hand - start).norm()


@pytest.mark.gpu
def test_a_given_companion_on_a_gpu_beside_a_model_on_the_cpu() -> None:
    model, hand = mlp(), mlp()
    optimizer = wrap(model, companion=Elsewhere(copy.deepcopy(model).cuda()))
    other = wrap(hand, companion=copy.deepcopy(hand))
    train(model, optimizer, batches(10))
    train(hand, other, batches(10))
    assert_same(model, hand, rtol=1e-9, atol=1e-12)
    assert_same(optimizer.companion.network.cpu(), other.companion, rtol=1e-9, atol=1e-12)


# ---- frozen parameters -----------------------------------------------------------------------------------------------


def test_frozen_parameters_are_shared_and_not_saved():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    assert optimizer.companion[0].weight is model[0].weight
    train(model, optimizer, batches(3))
    assert model[0].weight.grad is None
    saved = optimizer.state_dict()["dcl_optim.DCLOptimizer"]["forecaster"]["model"]
    assert set(saved) == {"2.weight", "2.bias"}
    optimizer.load_state_dict(optimizer.state_dict())


def test_frozen_parameters_that_train_later_are_copied_then():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)  # the whole model is in the optimizer, as many scripts have it
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    reference = mlp()
    train(model, optimizer, batches(3))
    assert optimizer.companion[0].weight is not model[0].weight
    assert not torch.equal(optimizer.companion[0].weight, reference[0].weight)
    assert not torch.equal(optimizer.companion[0].weight, model[0].weight)


def test_add_param_group_unfreezes_in_both():
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = DCLOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model, weight=1.0)
    assert optimizer.companion[0].weight is model[0].weight
    train(model, optimizer, batches(2))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.03})
    own = optimizer.companion[0].weight
    assert own is not model[0].weight
    assert torch.equal(own, model[0].weight)
    before = own.detach().clone()
    train(model, optimizer, batches(2))
    assert not torch.equal(optimizer.companion[0].weight, before)
    assert [group["lr"] for group in optimizer.companion_optimizer.param_groups] == [0.1, 0.03]


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_layer_that_was_unfrozen_and_frozen_again_resumes_exactly(momentum: float) -> None:
    def started() -> tuple[nn.Module, DCLOptimizer]:
        model = mlp()
        model[0].requires_grad_(False)
        return model, DCLOptimizer(sgd(model, momentum=momentum), model, weight=1.0)

    model, optimizer = started()
    train(model, optimizer, DATA[:1])
    model[0].requires_grad_(True)
    train(model, optimizer, DATA[1:2])
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    train(model, optimizer, DATA[2:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again, other = started()
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[0])
    train(model, optimizer, DATA[3:])
    train(again, other, DATA[3:])
    assert_same(again, model)
    assert_same(other.companion, optimizer.companion)
    assert not torch.equal(other.companion[0].weight, again[0].weight)


def test_a_state_from_before_a_layer_was_unfrozen_is_refused_with_the_fix() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = wrap(model)
    train(model, optimizer, DATA[:1])
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(True)
    train(model, optimizer, DATA[1:2])
    with pytest.raises(ValueError, match=r"does not fit: missing.*reset_companion\(\)"):
        optimizer.load_state_dict(saved)
    model[0].requires_grad_(False)
    optimizer.reset_companion()
    optimizer.load_state_dict(saved)


# ---- frozen parameters that the forward pass writes to ---------------------------------------------------------------


class Queue(nn.Module):
    """As MoCo: logits against a queue of keys, and a key encoder that follows the encoder."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.keys, self.in_place = mlp(), mlp(), in_place
        self.keys.requires_grad_(False)
        self.queue = nn.Parameter(torch.randn(CLASSES, 8, dtype=torch.float64), requires_grad=False)
        self.still = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        with torch.no_grad():
            for slow, fast in zip(self.keys.parameters(), self.net.parameters(), strict=True):
                if self.in_place:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
                else:
                    slow.data = 0.9 * slow.data + 0.1 * fast.data
            keys, queue = self.keys(x), self.queue.clone()
            self.queue.copy_(keys[:8].T)
        return z + (z @ queue).mean(1, keepdim=True) + keys * self.still


@pytest.mark.parametrize("in_place", [True, False])
def test_frozen_parameters_that_the_forward_writes_to_are_named_and_refused(in_place: bool) -> None:
    model = Queue(in_place)
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match=r"frozen parameters \['queue', 'keys.0.weight'.*pass companion="):
        train(model, optimizer, DATA)
    assert optimizer.companion.still is model.still


def test_a_given_companion_has_a_queue_and_a_teacher() -> None:
    model, hand = Queue(), Queue()
    companion = copy.deepcopy(hand)
    optimizer = wrap(model, companion=copy.deepcopy(model))
    base, second = sgd(hand), sgd(companion)
    for x, y in DATA:
        z, c = hand(x), companion(x)
        base.zero_grad()
        second.zero_grad()
        (F.cross_entropy(z, y) + F.mse_loss(z, c.detach())).backward()
        F.mse_loss(c, 0.6 * c.detach() + 0.4 * z.detach()).backward()
        base.step()
        second.step()
    train(model, optimizer, DATA)
    assert_same(model, hand, rtol=1e-9, atol=1e-11)
    assert_same(optimizer.companion, companion, rtol=1e-9, atol=1e-11)


def test_a_teacher_that_the_script_updates_after_its_step_stays_shared() -> None:
    model = Queue()
    model.forward = model.net.forward
    optimizer = wrap(model)
    for batch in DATA:
        train(model, optimizer, [batch])
        with torch.no_grad():
            model.queue.add_(1)
    assert optimizer.companion.queue is model.queue


class Listed(nn.Module):
    """As a MAML script: ``parameters`` gives those of the inner loop, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.eye(CLASSES, FEATURES).double())])
        self.statistics = nn.ParameterList([nn.Parameter(torch.zeros(CLASSES).double(), requires_grad=False)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.vars[0]) + self.statistics[0]

    def parameters(self, recurse: bool = True) -> Any:
        return self.vars


@pytest.mark.parametrize("wrapper", [DCPOptimizer, DCLOptimizer])
def test_a_model_whose_parameters_are_another_list_trains(wrapper: Any) -> None:
    model = Listed()
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, batches(3))
    assert optimizer.logs()["penalty"] > 0
