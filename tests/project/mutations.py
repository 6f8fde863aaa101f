"""Deliberate faults of the package, each a behavior that a change might break: does a test of the default suite fail?

``python -m tests.project.mutations`` makes them one at a time in a copy of the working tree and runs the test files
that a fault names, then the whole default suite if those pass; in the end the tests that failed have to pass without a
fault. ``--list`` shows the faults; names, or parts of them, choose some.

A fault is made in the syntax tree of one function, found by its name, so the text around it may change.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from dcl_optim.guards import Guards
from tests.conftest import DEFAULT

HERE = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", DEFAULT)
LIMIT = 1800  # seconds for a run; a test that hangs is red, too
Change = Callable[[ast.FunctionDef], None]


# ---- what can be done to a function ----------------------------------------------------------------------------------


def begin(statement):
    """Run a statement first."""

    def change(function):
        function.body.insert(1 if ast.get_docstring(function) is not None else 0, ast.parse(statement).body[0])

    return change


def result(expression):
    """Return another value, made of ``result`` and the ``arguments`` of the call."""
    decorator = f"lambda f: lambda *arguments: (lambda result: {expression})(f(*arguments))"
    return lambda function: function.decorator_list.append(ast.parse(decorator, mode="eval").body)


def replace(old, new):
    """Put an expression in the place of another, wherever that is in the function."""
    there, then = (ast.parse(text, mode="eval").body for text in (old, new))
    return lambda function: _exchange(function, ast.expr, there, then)


def drop(statement):
    """Leave a statement out."""
    return lambda function: _exchange(function, ast.stmt, ast.parse(statement).body[0], ast.Pass())


def _exchange(function, kind, old, new):
    text = ast.unparse(old)

    class Exchange(ast.NodeTransformer):
        found = 0

        def visit(self, node):
            is_target = isinstance(getattr(node, "ctx", None), ast.Store)
            if isinstance(node, kind) and not is_target and ast.unparse(node) == text:
                self.found += 1
                return new
            return self.generic_visit(node)

    exchange = Exchange()
    exchange.visit(function)
    if not exchange.found:
        raise ValueError(f"{function.name} has no {text!r}")


@dataclass(frozen=True)
class Fault:
    """One fault: of the function ``where`` (module:qualified name).

    ``tests`` names the test files that look at it, ``step`` for test_step.py, or folders, ``term/``.
    """

    behavior: str
    where: str
    change: Change
    tests: str

    @property
    def file(self):
        return f"dcl_optim/{self.where.partition(':')[0].replace('.', '/')}.py"

    @property
    def paths(self):
        named = (f"{name}test_*" if name.endswith("/") else f"*/test_{name}" for name in self.tests.split())
        found = (sorted(HERE.glob(f"tests/{pattern}.py")) for pattern in named)
        return [str(path.relative_to(HERE)) for paths in found for path in paths]

    def made_in(self, root):
        """The file's text with the fault; ValueError if it cannot be made."""
        tree = ast.parse((root / self.file).read_text(encoding="utf-8"))
        node = tree
        for name in self.where.partition(":")[2].split("."):
            inner = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name]
            if len(inner) != 1:
                raise ValueError(f"{self.file} has no {self.where}")
            node = inner[0]
        assert isinstance(node, ast.FunctionDef)
        self.change(node)
        return ast.unparse(ast.fix_missing_locations(tree))


NOTHING = begin("return None")
GUARDS = [name for name, _ in inspect.getmembers(Guards, inspect.isfunction) if name[0] != "_"]
FAULTS = [
    # the penalty and its factors
    Fault("no penalty", "penalty.pull:Pull.gradient", begin("self = self._replace(factor=0.0)"),
          "reference dcp_optimizer"),
    Fault("weight left out", "algorithm:Algorithm.on_gradient", replace("weight", "1.0"),
          "weight_and_alpha step automatic_weight"),
    Fault("scale left out", "algorithm:Algorithm.on_gradient", replace("reading.scale", "1.0"),
          "loss_reader mixed_precision"),
    Fault("schedules a step late", "algorithm:Algorithm.on_gradient",
          replace("forward.step_number", "(forward.step_number - 1)"), "weight_and_alpha step"),
    Fault("the term ignores factors", "algorithm:Algorithm.on_term", begin("s = torch.ones_like(s)"), "term/"),
    Fault("hooks add in a step with a term", "algorithm:Algorithm.on_gradient",
          replace("self.uses_term", "False"), "term/"),
    Fault("a step without a term is not counted", "algorithm:Algorithm.before_step",
          drop("self.reader.num_skipped += 1"), "guards/"),
    Fault("a kept loss keeps tensors", "progress:Progress.end", NOTHING, "overhead since_the_last_step guards/"),
    Fault("other factors than 0 weigh equally", "algorithm:Algorithm._learn_from_term",
          replace("torch.hypot(s, constant(LEAST_SCALE, s.device))", "torch.ones_like(s)"), "weighting"),
    Fault("labels of the term off by one", "prototypes.labels:labels_of",
          result("result._replace(rows=(result.rows + 1) % arguments[1].shape[1])"), "term/ dcp_optimizer"),
    Fault("mean over ignored rows", "prototypes.labels:labels_of",
          result("result._replace(number=len(result.rows))"), "term/ prototypes/"),
    # which passes count
    Fault("forward passes in eval mode count", "algorithm:Algorithm.before_forward",
          replace("not module.training", "False"), "copying first_use"),
    Fault("a call without gradients ends a forward pass", "algorithm:Algorithm.before_forward",
          begin("self.progress.running.clear()"), "calls_of_the_model"),
    Fault("an attack's backward pass counts", "algorithm:Algorithm._is_of_training",
          replace("reaches_parameters(forward.nodes, self._base)", "True"), "backward_passes"),
    Fault("learned twice", "algorithm:Algorithm._learn",
          replace("forward.outcome is not Outcome.LEARNED", "True"), "accumulation backward_passes"),
    Fault("not forgotten after a skipped step", "progress:Progress.gradients_cleared", NOTHING, "skipped_steps"),
    Fault("learns from a term that is not finite", "algorithm:Algorithm._learn_from_term",
          replace("bool(is_finite)", "True"), "term/ not_finite"),
    Fault("learns at every evaluation", "algorithm:Algorithm._learn",
          replace("self.progress.learns", "True"), "closures"),
    Fault("wrapped twice", "algorithm:Algorithm.replaced", NOTHING, "copies*"),
    # reading the line
    Fault("labels off by one", "loss.cross_entropy:read",
          result("result._replace(labels=(result.labels + 1) % arguments[1].shape[1])"), "loss_* dcp_optimizer"),
    Fault("smoothing not read", "loss.cross_entropy:read",
          begin("form = form._replace(smoothing=min(form.smoothing, 0.0))"), "loss_*"),
    Fault("rows with other factors fit", "loss.cross_entropy:read",
          result("result._replace(fits=result.num_live > 0)"), "loss_* unreadable_losses"),
    Fault("last scale not kept", "loss.reader:LossReader.read", drop("self.scale = reading.scale"), "loss_*"),
    Fault("classes always along dimension 1", "loss.reader:LossReader._choose",
          replace("range(1, max(gradient.ndim, 2))", "(1,)"), "loss_reader companion"),
    Fault("every step waits for the device", "pytorch.synchronization:may_sync", begin("return True"), "kernels"),
    # the companion
    Fault("no chase", "companion.companion:Companion.observe", NOTHING, "reference"),
    Fault("alpha swapped", "penalty.pull:pull_towards_target", replace("1.0 - alpha", "alpha"), "reference"),
    Fault("RNG not replayed", "companion.replay:Replay.call", drop("torch.set_rng_state(of_cpu)"),
          "companion extending"),
    Fault("RNG not restored", "companion.replay:forked_rng", result("nullcontext()"), "companion zero_weight"),
    Fault("companion's gradients pile up", "companion.network:Network.step",
          drop("self.optimizer.zero_grad()"), "reference"),
    Fault("first rows instead of drawn ones", "companion.rows:Rows.draw",
          replace("torch.randperm(length, generator=self.generator, device='cpu')", "torch.arange(length)"),
          "fraction"),
    Fault("rows cut untried", "companion.rows:_is_same_by_rows", begin("return True"), "fraction"),
    Fault("options not followed", "companion.network:Network._follow_options", NOTHING,
          "learning_rate_schedulers"),
    Fault("not copied again", "companion.network:Network.has_changed",
          begin("return False"), "model_structure companion/"),
    # the prototypes
    Fault("unseen prototypes pull", "prototypes.prototypes:Prototypes.pull",
          result("result._replace(weights=None)"), "prototypes/"),
    Fault("absent classes forget", "prototypes.tally:learn_",
          replace("torch.where(ages, numbers, state.numbers, out=state.numbers)", "state.numbers.copy_(numbers)"),
          "prototypes/ automatic_weight"),
    Fault("masked classes pull and are learned", "prototypes.prototypes:Prototypes.pull",
          replace("self._masks.left_out(z)", "z"), "masked_classes"),
    Fault("masked entries of soft labels count as 0", "prototypes.tally:Tally.add_shares",
          replace("has_masks", "False"), "masked_classes"),
    # the state and the ranks
    Fault("steps not saved", "optimizer:ForecastOptimizer._own_state", result("result | {'steps': 0}"), "resumption*"),
    Fault("accuracy not saved", "prototypes.prototypes:Prototypes.state_dict",
          result("result | {'fit': torch.ones(2)}"), "automatic_weight resumption*"),
    Fault("momentum not loaded", "companion.network:Network.load_state_dict",
          drop("self.optimizer.load_state_dict(saved)"), "resumption*"),
    Fault("ranks not averaged", "pytorch.ranks:DataParallelGroup.average", NOTHING, "distributed"),
    Fault("all ranks are those of the model", "pytorch.ranks:_group_of", result("result or dist.group.WORLD"),
          "distributed meshes"),
    # the guards: each method does nothing
    *(Fault(f"the guards' {name}", f"guards.guards:Guards.{name}", NOTHING, "guards/ hooks copies") for name in GUARDS),
]  # fmt: skip


# ---- making and running them -----------------------------------------------------------------------------------------


def copied(root, folder):
    """Copy a working tree, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def failing_test(tree, *arguments):
    """Run pytest up to the first test that fails, and give it; None if all pass."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT}
    try:
        done = subprocess.run([*PYTEST, *arguments], check=False, **options)
    except subprocess.TimeoutExpired as error:
        return (re.findall(r"[^ ]+::[^ ]+", (error.stdout or b"").decode()) or ["pytest"])[-1]
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1, 2) or (done.returncode and found is None):
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return found[1] if done.returncode and found else None


def caught_by(fault, tree):
    """Make the fault in a tree, and undo it again; give the test that fails."""
    file = tree / fault.file
    former = file.read_text(encoding="utf-8")
    file.write_text(fault.made_in(tree), encoding="utf-8")
    try:
        # No fault can be made twice, which test_mutations.py would take for a catch.
        others = ("-n", "2", "--ignore=tests/project/test_mutations.py", "tests")
        return failing_test(tree, *fault.paths) or failing_test(tree, *others)
    finally:
        file.write_text(former, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of faults, or parts of them; all without")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once, each in a copy of its own")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or any(name in fault.behavior for name in args.names)]
    if not chosen:
        parser.error(f"no fault has a name like {' or '.join(args.names)}")
    if args.list:
        print("\n".join(f"{fault.behavior} ({fault.where})" for fault in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trees = SimpleQueue()
        for number in range(args.jobs):
            trees.put(copied(HERE, Path(folder, str(number))))

        def run(fault):
            tree = trees.get()
            start = time.monotonic()
            try:
                found = caught_by(fault, tree)
            finally:
                trees.put(tree)
            print(f"{fault.behavior}: {found or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)", flush=True)
            return found

        with ThreadPoolExecutor(args.jobs) as pool:
            caught = [found for found in pool.map(run, chosen) if found]
        red = failing_test(trees.get(), *sorted(set(caught))) if caught else None
    if red:
        print(f"{red} fails without a fault, too")
    print(f"{len(caught)} of {len(chosen)} faults caught")
    return 0 if len(caught) == len(chosen) and not red else 1


if __name__ == "__main__":
    sys.exit(main())
