"""Small models, batches and comparisons that the tests share."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dcl_optim
import dcl_optim.algorithm
from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.progress import Forward
from dcl_optim.pytorch import synchronization

CLASSES, FEATURES = 5, 6
PATIENCE = 300.0  # seconds after which what has not come never will: no machine is that slow
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
needs_fsdp2 = pytest.mark.skipif(  # which asks for it, and torch 2.6 has it on accelerators only
    not hasattr(torch.cpu.Stream(), "record_event"), reason="needs a torch whose FSDP2 runs on the CPU"
)


def mlp(seed: int = 0, width: int = 12, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES)).to(dtype)


def batch_norm_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, CLASSES))
    return nn.Sequential(*layers).double()


def dropout_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, CLASSES)).double()


def matrices_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of two groups that many recipes have: weights, and biases and factors of norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return matrices, [parameter for parameter in model.parameters() if parameter.ndim != 2]


class Returning(nn.Module):
    """Returns what a function makes of the logits."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.make = mlp(), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.body(x))


@contextmanager
def all_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect every warning that comes inside."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def linear_growth(step: int, value: float = 1.0, steps: int = 8) -> float:
    """λ that grows to a value over a number of steps, and stays."""
    return value * min(1.0, step / steps)


def running_average(step: int) -> float:
    """The paper's α with which every past model has the same weight (Section 3.2)."""
    return (step - 1) / step


class Network(nn.Module):
    """A class of the script's, as most are: torch.compile keeps its hooks outside of the graph."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        self.body = mlp() if body is None else body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class TwoHeads(nn.Module):
    """A model that returns the logits and an auxiliary head's."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = mlp(), mlp(seed=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.side(x)


class Logits(nn.Module):
    """Gives its input as logits, plus a parameter that stays 0 with a learning rate of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.zero


def huber(z: Tensor, c: Tensor) -> Tensor:
    """A distance of a script's own."""
    return F.huber_loss(z, c, delta=0.3, reduction="none").mean(1)


MODELS = {"mlp": mlp, "batch_norm": batch_norm_net, "dropout": dropout_net}


def batches(
    steps: int, size: int = 16, seed: int = 1, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches for the same seed, independent of torch's global stream."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        yield x, torch.randint(CLASSES, (size,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, loss: Any = F.cross_entropy) -> None:
    """The plain loop, as every script has it."""
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def fit(optimizer: Any, data: Any, loss: Any = F.cross_entropy) -> None:
    """The same with an optimizer that knows its model."""
    train(optimizer.model, optimizer, data, loss)


@contextmanager
def gradients_put_back(model: nn.Module) -> Iterator[None]:
    """What is done inside leaves the gradients of the model's parameters as they were."""
    before = [parameter.grad.clone() for parameter in model.parameters()]
    yield
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad.copy_(gradient)


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | options))


def wrap(model: nn.Module, base: torch.optim.Optimizer | None = None, **options: Any) -> DCLOptimizer:
    """DCL with a companion that gets all rows, and a penalty large enough to be seen."""
    base = sgd(model) if base is None else base
    return DCLOptimizer(base, model, **{"weight": 1.0, "companion_fraction": 1} | options)


def nested_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Rows in a nested tensor of two parts, the same rows in a plain one, and labels."""
    x = torch.randn(8, FEATURES)
    return torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged), x, torch.arange(8) % CLASSES


def one(x_seed: int = 1) -> tuple[Tensor, Tensor]:
    """A single batch."""
    return next(iter(batches(1, seed=x_seed)))


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def cells(table: Iterable[Any], *chosen: Any) -> list[Any]:
    """Give parametrize a whole table: the chosen cells run wherever the test does, the others are marked stress.

    A cell of several arguments is a tuple.
    """
    table = list(table)
    missing = set(chosen) - set(table)
    assert not missing, f"the table has no {missing}"
    marks = [() if cell in chosen else pytest.mark.stress for cell in table]
    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=mark)
        for cell, mark in zip(table, marks, strict=True)
    ]


def every(number: int, table: Iterable[Any]) -> list[Any]:
    """The same with each number-th cell of a table; a number that divides no axis meets all values of each."""
    table = list(table)
    return cells(table, *table[::number])


def assert_same(first: Any, second: Any, **tolerance: float) -> None:
    """Compare two modules' or two nested states' tensors: bit for bit without a tolerance."""
    if isinstance(first, nn.Module):
        first, second = first.state_dict(), second.state_dict()
    if isinstance(first, Tensor):
        if tolerance:
            torch.testing.assert_close(first, second, **{"rtol": 0.0, "atol": 0.0} | tolerance)
        else:
            assert torch.equal(first, second), (first - second).abs().max()
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key], **tolerance)
    elif isinstance(first, (list, tuple, deque)):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            assert_same(a, b, **tolerance)
    elif first != second and getattr(first, "__dict__", None):  # an object that some optimizers keep in their state
        assert type(first) is type(second)
        assert_same(vars(first), vars(second), **tolerance)
    else:
        assert first == second


def assert_same_networks(first: DCLOptimizer, second: DCLOptimizer) -> None:
    """Compare models, companions and the state of the companions' optimizers, bit for bit."""
    assert_same(first.model, second.model)
    assert_same(first.companion, second.companion)
    assert_same(first.companion_optimizer.state_dict(), second.companion_optimizer.state_dict())


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state in which tensors that are sharded over ranks are put together."""
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def through_pickle(saved: Any) -> Any:
    return pickle.loads(pickle.dumps(saved))


def through_a_file(saved: Any, weights_only: bool = True) -> Any:
    """What torch.load gives of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def resume(again: Any, optimizer: Any) -> None:
    """Load the model and the state of an optimizer into another one and its model."""
    again.model.load_state_dict(optimizer.model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def read_values_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps 1, 2, 4, 8, ... and 100, 200, ... alone."""
    monkeypatch.setattr(synchronization, "may_sync", lambda step, tensor: synchronization.is_sync_step(step))


def _do_nothing(*arguments: Any) -> None:
    """Stand for each method of the guards."""


_METHODS = [name for name, _ in inspect.getmembers(dcl_optim.algorithm.Guards, inspect.isfunction)]
NoGuards = type("NoGuards", (), dict.fromkeys(_METHODS, _do_nothing))  # for dcl_optim.algorithm.Guards


# The ranks fork from a server that has these imported, which takes 3 s, and has run nothing.
multiprocessing.set_forkserver_preload(["tests.helpers", "torch._dynamo"])


def same_on_both(folder: Path, name: str) -> Any:
    """What two ranks have written, which has to be the same."""
    first, second = (torch.load(folder / f"{name} {rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same(first, second)
    return first


def on_two_ranks(function: Callable[..., None], folder: Path, *args: Any) -> None:
    """Call function(rank, folder, *args) in two processes that are joined by gloo."""
    on_ranks(2, function, folder, *args)


def on_ranks(number: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    """The same in another number of processes."""
    with tempfile.TemporaryDirectory() as meeting:
        settings = (number, function, folder, Path(meeting), args, dcl_optim.algorithm.Guards)
        mp.start_processes(_rank, settings, nprocs=number, start_method="forkserver")


def _rank(
    rank: int,
    number: int,
    function: Callable[..., None],
    folder: Path,
    meeting: Path,
    args: tuple[Any, ...],
    guards: Any,
) -> None:
    torch.set_num_threads(1)
    dcl_optim.algorithm.Guards = guards
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=number)
    function(rank, folder, *args)
    dist.barrier()
    (meeting / str(rank)).touch()
    while not all((meeting / str(other)).exists() for other in range(number)):  # one that leaves early can break
        time.sleep(0.01)  # the others' barrier
    # With any optimizer: torch 2.6 can wait for good in destroy_process_group, and gloo's threads, which outlive the
    # group where DDP was in it, now and then abort the interpreter's exit (pytorch#179291).
    os._exit(0)


# ---- instruments of tests/devices/test_overhead.py -------------------------------------------------------------------

PACKAGE = str(Path(dcl_optim.__file__).parent)
# The work of networks and optimizers, which the wrapper has them do: not its own.
OF_OTHERS = {"_wrapped_call_impl": "torch/nn/modules/module.py", "wrapper": "torch/optim/optimizer.py"}
OF_OTHERS |= {"_call_impl": "torch/nn/modules/module.py", "zero_grad": "torch/optim/optimizer.py"}


class WrappersWork:
    """Counts, by place, the lines and calls of Python in the package and in what it calls, but for ``OF_OTHERS``.

    A turn of a loop, of a comprehension and of a generator expression is a line or a call; one in C is none.
    """

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._stack: list[str | None] = [None]  # for each call the place of the package that it is on behalf of

    def _on_call(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        of_others = name.endswith(OF_OTHERS.get(frame.f_code.co_name, "\0"))
        frame.f_trace_lines = name.startswith(PACKAGE) or (self._stack[-1] is not None and not of_others)
        self._stack.append(self._stack[-1] if frame.f_trace_lines else None)
        return self._on_line(frame, "line", None)

    def _on_line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_trace_lines:
            if frame.f_code.co_filename.startswith(PACKAGE):
                self._stack[-1] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self.places[self._stack[-1]] += 1
        elif event == "return":
            self._stack.pop()
        return self._on_line

    def __enter__(self) -> WrappersWork:
        self._previous = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._previous)


@contextmanager
def two_processes() -> Iterator[None]:
    """A group of two whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Storages(TorchDispatchMode):
    """Follows the memory of every tensor that is computed inside, also of those that only autograd holds."""

    def __init__(self) -> None:
        super().__init__()
        self._followed: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                # A weak reference holds its address, so no other storage can come to have it.
                self._followed.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    def live(self) -> tuple[int, int]:
        """The number and the bytes of what is alive."""
        self._followed = {address: entry for address, entry in self._followed.items() if not entry[0].expired()}
        return len(self._followed), sum(size for _, size in self._followed.values())


def skip_smoothing_of_torch_2_6(dtype: torch.dtype, smoothing: float) -> None:
    """Whose gradients in half precision are rounded otherwise on a CPU: docs/supported.md says so."""
    if smoothing and dtype.itemsize < 4 and torch.__version__ < (2, 7):
        pytest.skip("PyTorch 2.6 rounds the gradient of a label smoothing in half precision otherwise")


def live_tensors() -> tuple[int, int]:
    """The number and the elements of the tensors that Python holds, without what the fixture older_objects froze."""
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return len(tensors), sum(tensor.numel() for tensor in tensors)


def items_in_containers(objects: Iterable[Any]) -> int:
    return sum(len(found) for found in objects if type(found) in (list, dict, set, tuple, deque))


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def training_forwards(optimizer: Any) -> list[weakref.ref[Forward]]:
    """A list to which each training forward of the model is added from now on."""
    forwards: list[weakref.ref[Forward]] = []
    algorithm = optimizer._algorithm
    after_forward = algorithm.after_forward

    def noted(*arguments: Any) -> None:
        before = set(algorithm.progress.forwards)
        after_forward(*arguments)
        forwards.extend(weakref.ref(forward) for forward in algorithm.progress.forwards if forward not in before)

    algorithm.after_forward = noted
    return forwards


def snapshot(optimizer: DCLOptimizer) -> dict[str, Any]:
    """All that training has changed: both networks, both optimizers, the script's random stream."""
    networks = {"model": optimizer.model.state_dict(), "companion": optimizer.companion.state_dict()}
    optimizers = {"optimizer": optimizer.state_dict(), "chasing": optimizer.companion_optimizer.state_dict()}
    return copy.deepcopy(networks | optimizers | {"random": torch.get_rng_state()})


def seen(optimizer: DCPOptimizer) -> Tensor:
    """Which classes have a prototype."""
    return optimizer.state_dict()["dcl_optim.DCPOptimizer"]["forecaster"]["numbers"] > 0
