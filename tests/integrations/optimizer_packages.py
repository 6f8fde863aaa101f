"""Try every optimizer of many packages as the base of both wrappers, and print a table for docs/frameworks.md.

    pip install --no-deps heavyball==3.2.1 torch-optimi==0.3.3 torch-optimizer==0.3.0 ...
    python -m tests.integrations.optimizer_packages                      # those that are installed
    python -m tests.integrations.optimizer_packages heavyball optimi     # some of them

Each optimizer trains a small network for 14 steps: alone, in DCPOptimizer and DCLOptimizer with weight 0, and in
DCLOptimizer beside a loop that is written out, in float64 if it can. It is

- right: with weight 0 the weights are those of the base alone bit for bit, and with a weight both networks are those of
  the loop up to rounding;
- refused: an error that names a fix comes at wrapping or in a step;
- not compared: right with weight 0, and the companion has the size of the model, but two runs of the loop differ, since
  its steps draw or are ill-conditioned;
- silent: none of these;
- no base: it does not train this network alone, by ``step()`` without a closure.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import signal
import sys
import warnings
from collections import defaultdict

import torch

from dcl_optim import DCLOptimizer, DCPOptimizer
from tests.helpers import batches, mlp, train
from tests.integrations import in_training_mode
from tests.reference import train_by_hand

STEPS = 14
SECONDS = 120  # for one optimizer
CLOSE = 1e-4  # a share of the largest weight
SETTINGS = {"weight": 0.3, "alpha": 0.6}

OPTIONS = {
    "optimi.StableAdamW": {"lr": 1e-3, "triton": False},
    "optimi": {"lr": 1e-3},
    "ranger21.Ranger21": {"lr": 1e-3, "num_epochs": 3, "num_batches_per_epoch": 10},
    "came_pytorch.CAME": {"lr": 1e-3},
    "torch_optimizer": {"lr": 1e-3},
    "bitsandbytes.optim": {"lr": 1e-3},
}
MODULES = {  # of each package, by the module that has its optimizers
    "heavyball": "heavyball",
    "torch-optimi": "optimi",
    "torch-optimizer": "torch_optimizer",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "adan-pytorch": "adan_pytorch",
    "came-pytorch": "came_pytorch",
    "lion-pytorch": "lion_pytorch",
    "madgrad": "madgrad",
    "adabelief-pytorch": "adabelief_pytorch",
    "galore-torch": "galore_torch",
    "apollo-torch": "apollo_torch",
    "ranger21": "ranger21",
}


class TooSlow(Exception):
    """An optimizer took more than SECONDS."""


def optimizers_of(package):
    """The names and makers of the optimizers of a package."""
    if package == "pytorch_optimizer":
        from tests.integrations.test_other_optimizers import build

        names = importlib.import_module("pytorch_optimizer").get_supported_optimizers()
        yield from ((name, lambda model, name=name: build(name, model)) for name in names)
    elif package == "timm":
        timm = importlib.import_module("timm.optim")
        for name in timm.list_optimizers():
            yield name, lambda model, name=name: timm.create_optimizer_v2(model, name, lr=1e-3)
    else:
        module = importlib.import_module(MODULES[package])
        if package == "heavyball":
            module.utils.compile_mode = None
        for name, kind in sorted(vars(module).items()):
            is_class = inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
            if is_class and not kind.__module__.startswith("torch.optim") and not name.startswith("_"):
                options = OPTIONS.get(f"{module.__name__}.{name}", OPTIONS.get(module.__name__, {}))
                yield name, lambda model, kind=kind, options=options: kind(model.parameters(), **options)


def network(dtype=torch.float32):
    return mlp(width=64, dtype=dtype)


def trained(make, wrap, dtype=torch.float32):
    torch.manual_seed(7)
    model = network(dtype)
    torch.manual_seed(7)
    optimizer = in_training_mode(wrap(make(model), model))
    train(model, optimizer, batches(STEPS, dtype=dtype))
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


def distance(first, second):
    """The largest difference, as a share of the largest number."""
    differences = [float((a - b).abs().max()) for a, b in zip(first, second, strict=True)]
    size = max(float(b.abs().max()) for b in second)
    return max(differences) / size


def by_hand(make, dtype, factor=1.0, seed=7):
    """The loop; the first weights are multiplied by a factor, and the seed is that of draws in steps."""
    torch.manual_seed(7)
    model = network(dtype)
    for parameter in model.parameters():
        parameter.data *= factor
    torch.manual_seed(seed)
    return train_by_hand(model, lambda one: in_training_mode(make(one)), batches(STEPS, dtype=dtype), **SETTINGS)


def spread(make, dtype):
    """How far two loops come apart whose first weights differ by rounding, and whose steps have other draws."""
    loops = [by_hand(make, dtype), by_hand(make, dtype, 1.0 + 4 * torch.finfo(dtype).eps, seed=8)]
    first, second = ([parameter.detach() for one in loop for parameter in one.parameters()] for loop in loops)
    return distance(first, second)


def names_a_fix(error):
    text = str(error) + " ".join(getattr(error, "__notes__", []))
    return any(part in text for part in ("companion_optimizer=", "Fix:", "wrap ", "create_graph"))


def judge(make):
    """What a base is, and why."""
    try:
        alone, _ = trained(make, lambda base, model: base)
        if distance(alone, [parameter.detach() for parameter in network().parameters()]) == 0:
            return "no base", "it moves nothing"
    except TooSlow:
        raise
    except Exception as error:
        return "no base", f"{type(error).__name__}: {error}"
    again, _ = trained(make, lambda base, model: base)
    draws = distance(again, alone) > 0
    found = []
    for wrapper in (DCPOptimizer, DCLOptimizer):
        try:
            weights, _ = trained(make, lambda base, model, wrapper=wrapper: wrapper(base, model, weight=0.0))
        except TooSlow:
            raise
        except Exception as error:
            found.append(("refused" if names_a_fix(error) else "silent", f"{wrapper.__name__}: {error}"))
            continue
        if not draws and distance(weights, alone) > 0:
            found.append(("silent", f"{wrapper.__name__} with weight 0: {distance(weights, alone):.1e}"))
    if not found:
        found += [*of_companion(make)]
    return found[0] if found else ("right", "")


def of_companion(make):
    dtype = torch.float64
    try:
        trained(make, lambda base, model: base, dtype)
    except TooSlow:
        raise
    except Exception:  # as kernels for float32 alone
        dtype = torch.float32
    weights, optimizer = trained(
        make, lambda base, model: DCLOptimizer(base, model, **SETTINGS, companion_fraction=1), dtype
    )
    companion = [parameter.detach() for parameter in optimizer.companion.parameters()]
    hand, second = ([parameter.detach() for parameter in one.parameters()] for one in by_hand(make, dtype))
    differences = (distance(weights, hand), distance(companion, second))
    sizes = [max(float(one.abs().max()) for one in network) for network in (companion, weights)]
    if not sizes[0] < 10 * sizes[1]:
        yield "silent", f"weights of {sizes[0]:.1e} in the companion, {sizes[1]:.1e} in the model"
    elif max(differences) > CLOSE:
        kind = "not compared" if spread(make, dtype) > max(differences) / 100 else "silent"
        yield kind, f"model {differences[0]:.0e}, companion {differences[1]:.0e}, loop {spread(make, dtype):.0e}"


def stop(*_):
    raise TooSlow(f"more than {SECONDS} s")


def main(packages):
    signal.signal(signal.SIGALRM, stop)
    warnings.simplefilter("ignore")
    print("| package | version | right | refused | silent | not compared | no base |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for package in packages or ["pytorch_optimizer", "timm", *MODULES]:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = defaultdict(list)
        for name, make in optimizers_of(package):
            signal.alarm(SECONDS)
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # in which some packages greet
                    kind, why = judge(make)
            except TooSlow as error:
                kind, why = "no base", str(error)
            signal.alarm(0)
            found[kind].append(name)
            if kind != "right":
                print(f"{package}.{name}: {kind}: {' '.join(why.split())[:300]}", file=sys.stderr, flush=True)
        kinds = ("right", "refused", "silent", "not compared", "no base")
        print(f"| {package} | {version} | {' | '.join(str(len(found[kind])) for kind in kinds)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
