"""An accelerator that is none: its tensors hold CPU memory, and what CUDA would launch for them is counted.

``register()`` adds the device to torch for good, so tests that use it start a process. To import this changes nothing.
The device is a PrivateUse1 backend with plain tensors, which autograd and ``torch.optim`` treat as they treat a GPU's.
An operation that reaches it runs on CPU tensors over the same memory; composite ones have fallen apart by then, as on
CUDA. It lacks streams, autocast, ``torch.save``, and a GPU's rounding and speed. Draws come from the CPU's generator.
An exception that leaves a hook during backward ends the process, so try on the CPU first what may raise.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration

# ---- what CUDA would do: kernels that it launches, and how often the host waits --------------------------------------

# Kernels and synchronizations; (1, 0) for all other operations.
COSTS = {
    **dict.fromkeys(("alias", "empty", "empty_strided", "resize_", "split", "unbind"), (0, 0)),
    **dict.fromkeys(("_foreach_norm", "convolution_overrideable", "count_nonzero", "dot", "mse_loss", "sort"), (2, 0)),
    "max_pool2d_with_indices_backward": (2, 0),
    "convolution_backward_overrideable": (3, 0),
    "_local_scalar_dense": (0, 1),
    "repeat_interleave": (1, 1),
    "equal": (3, 1),
    "nonzero": (3, 1),
    "masked_select": (4, 1),
    "bincount": (4, 2),
    "unique_consecutive": (5, 1),
    "_unique2": (6, 1),
}
# Out of place these copy first.
COPYING = ("index_add", "index_copy", "index_fill", "masked_scatter", "scatter", "scatter_add")
INDEXING = ("index", "index_put_", "_index_put_impl_")


class Counts(NamedTuple):
    """Kernels and synchronizations by the operation's name."""

    kernels: Counter[str]
    synchronizations: Counter[str]


_counting: list[Counts] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what is launched inside the block."""
    _counting.append(Counts(Counter(), Counter()))
    try:
        yield _counting[-1]
    finally:
        _counting.pop()


def _note(name: str, kernels: int, synchronizations: int) -> None:
    """Add to what is being counted."""
    for counts in _counting:
        counts.kernels[name] += kernels
        counts.synchronizations[name] += synchronizations


def _note_operation(op: Any, name: str, args: Any, kwargs: Any, on_host: bool) -> None:
    """Add what an operation costs; ``on_host`` says that some of its operands are on the CPU."""
    if op.is_view:
        return
    kernels, synchronizations = COSTS.get(name, (1, 0))
    if name in INDEXING:
        synchronizations += on_host
        if name != "index" and args[2].numel() > 1:  # of one value torch makes a masked_fill_; index has asked nonzero
            masks = sum(isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1])
            kernels, synchronizations = kernels + 3 * masks, synchronizations + masks
    kernels += name in COPYING and kwargs.get("out") is not args[0]
    _note(name, kernels, synchronizations)


# ---- the device ------------------------------------------------------------------------------------------------------

NAME, KEY, CPU = "mockgpu", "PrivateUse1", torch.device("cpu")
CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
VIEWS = ("aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold")
# One kernel on CUDA, which torch would take apart, or refuse, on a device that does not implement it.
WHOLE = ("aten::_foreach_", "aten::native_dropout", "aten::convolution_over", "aten::convolution_backward_over")

_registered: list[torch.library.Library] = []
_memory: dict[int, tuple[StorageWeakRef, UntypedStorage]] = {}  # by address: the device's storage and the CPU's


def available() -> bool:
    """Whether this torch lets Python register a device; torch 2.6 does not."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def register() -> torch.device:
    """Add the device to torch, once, and return it; before the first backward, which counts the devices for good."""
    if not _registered:
        # which the CPU's mse_loss says of the result that torch has made on this device
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        module: Any = backend_registration._DummyBackendModule()
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
        clone = UntypedStorage.clone  # by which copy.deepcopy copies buffers; torch cannot allocate on this device
        UntypedStorage.clone = lambda own: _storage(_cpu(own).clone()) if own.device.type == NAME else clone(own)
        hook = Tensor.register_hook
        Tensor.register_hook = lambda own, function: hook(own, partial(_said, function))
        _registered.extend((torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")))
        _registered[0].fallback(_run, KEY)
        _registered[1].impl("set_.source_Storage_storage_offset", _place, KEY)
        for name in torch._C._dispatch_get_all_op_names():
            if name in VIEWS:
                _registered[1].impl(name, partial(_op(name).redispatch, CPU_KEY), KEY)
            elif name.startswith(WHOLE) and not name.endswith("out"):
                _registered[1].impl(name, partial(_run, _op(name)), KEY)
    return torch.device(NAME, 0)


def _said(hook: Any, gradient: Tensor) -> Any:
    try:
        return hook(gradient)
    except BaseException:
        traceback.print_exc()  # the process ends, and would say nothing
        raise


def _op(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cpu(storage: UntypedStorage) -> UntypedStorage:
    return _memory[storage.data_ptr()][1]


def _storage(cpu: UntypedStorage) -> UntypedStorage:
    """The device's storage over the memory of a CPU storage: the one that exists, or a new one."""
    cpu = cpu if cpu.nbytes() else torch.empty(1).untyped_storage()  # an address to be found by
    address = cpu.data_ptr()
    if address in _memory and not _memory[address][0].expired():
        return UntypedStorage._new_with_weak_ptr(_memory[address][0].cdata)
    if len(_memory) % 1000 == 999:
        for gone in [key for key, (storage, _) in _memory.items() if storage.expired()]:
            del _memory[gone]
    made = torch._C._construct_storage_from_data_pointer(address, torch.device(NAME, 0), cpu.nbytes())
    _memory[address] = StorageWeakRef(made), cpu
    return made


def _place(tensor: Tensor, storage: UntypedStorage, *layout: Any) -> Tensor:
    return _op("set_.source_Storage_storage_offset").redispatch(CPU_KEY, tensor, storage, *layout)


def _to_cpu(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """An argument with CPU tensors, which are noted: the same one for a tensor that comes twice."""
    if isinstance(value, (list, tuple)):
        return [_to_cpu(part, pairs) for part in value]
    if not isinstance(value, Tensor):
        return CPU if isinstance(value, torch.device) else value
    for tensor, alias in pairs:
        if tensor is value:
            return alias
    alias = value
    if value.device.type == NAME:
        layout = value.storage_offset(), value.shape, value.stride()
        alias = torch.empty(0, dtype=value.dtype).set_(_cpu(value.untyped_storage()), *layout)
    pairs.append((value, alias))
    return alias


def _to_device(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """A result with the device's tensors: the argument that it is, or one over its memory."""
    if isinstance(value, (list, tuple)):
        return type(value)([_to_device(part, pairs) for part in value])
    if not isinstance(value, Tensor):
        return value
    given = [tensor for tensor, alias in pairs if alias is value]
    made = given[0] if given else torch._C._acc.create_empty_tensor([0], value.dtype)
    if made.shape != value.shape or not given:  # or an out= that was too small
        _place(made, _storage(value.untyped_storage()), value.storage_offset(), value.shape, value.stride())
    return made


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    name, pairs = op._schema.name.removeprefix("aten::"), []
    mine, options = _to_cpu(args, pairs), {key: _to_cpu(value, pairs) for key, value in kwargs.items()}
    if name == "_copy_from":  # source, target, whether the host goes on, which from pageable memory it does not
        within = args[0].device == args[1].device
        _note("copy", within, not within and not any(args[2:]))
        mine[1].copy_(mine[0])
        return args[1]
    on_host = any(tensor is alias and tensor.ndim for tensor, alias in pairs)
    if on_host and name not in INDEXING and any(tensor is not alias for tensor, alias in pairs):
        raise RuntimeError(f"{op}: expected all tensors to be on the same device, found {NAME} and cpu")
    _note_operation(op, name, args, kwargs, on_host)
    if name == "convolution_overrideable":
        op = torch.ops.aten.convolution.default
    elif name == "convolution_backward_overrideable":
        mine.insert(3, [args[0].shape[1]] if args[-1][2] else None)  # the length of the bias
        op = torch.ops.aten.convolution_backward.default
    for place, argument in enumerate(op._schema.arguments[: len(mine)]):
        if type(mine[place]) is bool and str(argument.type) == "Tensor":  # the one number that torch does not take back
            mine[place] = torch.tensor(mine[place])
    return _to_device(op(*mine, **options), pairs)
