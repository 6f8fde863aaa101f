"""Deliberate faults of the package, each a change that a contributor might make: does a test of the default suite fail?

``python -m tests.mutations`` makes them one at a time in a copy of the working tree, runs the test files that a fault
names, and the whole default suite if those pass; in the end the tests that failed have to pass without a fault.
``--list`` shows the faults; names, or parts of them, choose some.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.conftest import DEFAULT

HERE = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "-p", "no:randomly")
HANGS, HANGS_AFTER = ", which hangs", 240  # seconds without a line


@dataclass(frozen=True)
class Fault:
    """One change: in a file of the package the text ``old``, which is there once, becomes ``new``.

    ``tests`` are the files that should see it, tests/test_*.py of the default suite, without what all names share.
    """

    name: str
    file: str
    old: str
    new: str
    effect: str
    tests: str

    @property
    def paths(self) -> list[str]:
        return [f"tests/test_{name}.py" for name in self.tests.split()]

    def made_in(self, root: Path) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text is not there, or several times.
        """
        text = (root / "dcl_optim" / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: dcl_optim/{self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)


FAULTS = [
    # ---- the penalty at the logits -----------------------------------------------------------------------------------
    Fault(
        "penalty-sign",
        "regularizer.py",
        "return _plus(gradient, record.unrows(slope), factor)",
        "return _plus(gradient, record.unrows(slope), -factor)",
        "the penalty pushes the model away from the forecast",
        "reference",
    ),
    Fault(
        "weight-squared",
        "regularizer.py",
        "factor = scale * weight",
        "factor = scale * weight**2",
        "λ counts twice",
        "reference",
    ),
    Fault(
        "loss-scale-left-out",
        "regularizer.py",
        "factor = scale * weight",
        "factor = weight",
        "a scaled loss has an unscaled penalty",
        "loss_scale",
    ),
    Fault(
        "loss-scale-squared",
        "regularizer.py",
        "factor = scale * weight",
        "factor = scale * scale * weight",
        "the penalty carries the loss's factor twice",
        "loss_scale",
    ),
    Fault(
        "weight-of-the-last-step",
        "regularizer.py",
        "self.weight(self.steps + 1),",
        "self.weight(self.steps),",
        "λ's schedule is a step late",
        "regularizer settings",
    ),
    Fault(
        "penalty-added-twice",
        "regularizer.py",
        "not self.attached or record.added_in == backward",
        "not self.attached",
        "logits that were converted get the penalty at both places",
        "faults",
    ),
    Fault(
        "attack-gets-the-penalty",
        "regularizer.py",
        "if not teaches(record.nodes_below, self._parameters):",
        "if False:",
        "a backward for the gradient of the inputs carries the penalty",
        "backwards",
    ),
    Fault(
        "learned-at-every-backward",
        "regularizer.py",
        "if state.observing and not record.counted:",
        "if state.observing:",
        "two backwards of one forward teach the forecaster twice",
        "backwards",
    ),
    Fault(
        "penalty-in-half-precision",
        "regularizer.py",
        "return torch.add(gradient.to(slope.dtype), slope, alpha=factor).to(gradient.dtype)",
        "return torch.add(gradient, slope.to(gradient.dtype), alpha=factor)",
        "the penalty's gradient underflows in float16",
        "amp",
    ),
    # ---- which forwards and backwards count --------------------------------------------------------------------------
    Fault(
        "evaluation-counted",
        "regularizer.py",
        "if not (training or self._count_eval) or not torch.is_grad_enabled():",
        "if not torch.is_grad_enabled():",
        "forwards in eval mode are regularised",
        "regularizer",
    ),
    Fault(
        "recomputation-counted",
        "regularizer.py",
        "if backward != -1 and backward == self.state.backward:",
        "if False:",
        "a checkpoint's recomputation is a forward of its own",
        "checkpointing",
    ),
    Fault(
        "skipped-step-not-forgotten",
        "regularizer.py",
        "if not self.state.backwards or not self.state.observing:",
        "if True:",
        "a batch whose step a gradient scaler skipped is learned from",
        "amp",
    ),
    Fault(
        "cleared-before-step",
        "optimizer.py",
        "                regularizer.forget_cleared_batches()\n",
        "",
        "the companion learns from a batch whose gradients were cleared",
        "faults",
    ),
    Fault(
        "not-finite-batch-learned",
        "regularizer.py",
        "            if finite is False:\n                self.forecaster.skip(record, alpha)\n            else:\n",
        "            if True:\n",
        "the companion learns from logits that are not finite",
        "not_finite",
    ),
    Fault(
        "not-finite-unsaid",
        "regularizer.py",
        "if self.state.left_out and not self._has_told:",
        "if False:",
        "no warning that batches are left out",
        "not_finite",
    ),
    Fault(
        "strict-check-gone",
        "optimizer.py",
        "if not (self._strict and regularizer.attached):",
        "if True:",
        "a step without a training forward passes silently",
        "regularizer",
    ),
    # ---- the step: order, closures, errors ---------------------------------------------------------------------------
    Fault(
        "companion-steps-first",
        "optimizer.py",
        "                regularizer.begin_base_step()\n",
        "                self.forecaster.step()\n                regularizer.begin_base_step()\n",
        "the companion has stepped if the base's step raises",
        "accidents",
    ),
    Fault(
        "companion-backward-last",
        "optimizer.py",
        "                self.forecaster.backward()  # ω's gradients",
        "                # ω's gradients",
        "the companion's backward comes after the base's step",
        "accidents schedulers",
    ),
    Fault(
        "closure-called-twice",
        "optimizer.py",
        "        loss = closure()\n",
        "        closure()\n        loss = closure()\n",
        "gradients of a closure pile up",
        "optimizer reference",
    ),
    Fault(
        "learned-at-every-evaluation",
        "optimizer.py",
        "                self.forecaster.backward()\n                regularizer.stop_observing()\n",
        "                self.forecaster.backward()\n",
        "LBFGS's later evaluations teach the companion too",
        "optimizer",
    ),
    # ---- the wrapper -------------------------------------------------------------------------------------------------
    Fault(
        "groups-copied",
        "_wrapper.py",
        "lambda self: getattr(self.base, name),",
        "lambda self: type(getattr(self.base, name))(getattr(self.base, name)),",
        "param_groups and state are copies of the base's",
        "wrapper",
    ),
    Fault(
        "zero-grad-keeps-tensors",
        "optimizer.py",
        "self.base.zero_grad(set_to_none)",
        "self.base.zero_grad()",
        "set_to_none=False is ignored",
        "wrapper",
    ),
    Fault(
        "added-group-not-followed",
        "optimizer.py",
        "            self.forecaster.base_changed()\n",
        "            pass\n",
        "the companion does not train a group that was added",
        "wrapper structure",
    ),
    Fault(
        "mode-not-followed",
        "optimizer.py",
        "        self.forecaster.set_mode(mode)\n",
        "",
        "the companion's optimizer stays in train mode (Schedule-Free)",
        "wrapper",
    ),
    Fault(
        "half-loaded",
        "_wrapper.py",
        "with all_or_nothing(self.base):",
        "if True:",
        "a state that cannot be loaded has changed the base",
        "resume",
    ),
    Fault(
        "superseded-goes-on",
        "hooks/module_hooks.py",
        "                listener.replaced()\n",
        "                pass\n",
        "a model that was wrapped again is regularised twice",
        "neighbours",
    ),
    Fault(
        "hooks-left",
        "regularizer.py",
        "            self._hooks.remove()\n",
        "            pass\n",
        "detach leaves the hooks on the model",
        "copies",
    ),
    # ---- checkpoints -------------------------------------------------------------------------------------------------
    Fault(
        "steps-not-saved",
        "optimizer.py",
        'own = {"steps": regularizer.steps,',
        'own = {"steps": 0,',
        "a resumed run begins the schedules anew",
        "resume",
    ),
    Fault(
        "class-dim-not-saved",
        "optimizer.py",
        'return own if regularizer.class_dim is None else own | {"class_dim": regularizer.class_dim}',
        "return own",
        "a resumed run looks for the class dimension anew",
        "reading",
    ),
    Fault(
        "companion-optimizer-not-loaded",
        "companion/companion.py",
        '            self._optimizer.load_state_dict(state["optimizer"])\n',
        "",
        "a resumed companion has no momentum",
        "resume",
    ),
    Fault(
        "scheduler-not-saved",
        "companion/companion.py",
        "        self._optimizer.follow_options()  # what the script has changed since",
        "        # what the script has changed since",
        "a state that is saved after a scheduler's step has the former learning rate",
        "resume",
    ),
    Fault(
        "seen-not-saved",
        "prototypes/prototypes.py",
        '"seen": self.seen.clone()',
        '"seen": torch.ones_like(self.seen)',
        "after resuming, classes not yet seen have a prototype of zero",
        "prototypes resume",
    ),
    # ---- distances and the companion's target ------------------------------------------------------------------------
    Fault(
        "alpha-turned-round",
        "distances.py",
        "(2.0 * (1.0 - alpha) / c.numel()",
        "(2.0 * alpha / c.numel()",
        "mse: the companion moves by α and not 1 - α",
        "reference",
    ),
    Fault(
        "alpha-turned-round-in-target",
        "distances.py",
        "torch.lerp(c, z, 1.0 - alpha)",
        "torch.lerp(c, z, alpha)",
        "other distances: the target is (1 - α) c + α z",
        "reference",
    ),
    Fault(
        "kl-direction",
        "distances.py",
        "    log_p = F.log_softmax(c / temperature, dim=1)\n    log_q = F.log_softmax(z / temperature, dim=1)\n",
        "    log_p = F.log_softmax(z / temperature, dim=1)\n    log_q = F.log_softmax(c / temperature, dim=1)\n",
        "KL(z || c) for KL(c || z)",
        "distances",
    ),
    Fault(
        "kl-temperature-squared",
        "distances.py",
        "masked_fill(log_p == -torch.inf, 0.0)).sum() / len(z)",
        "masked_fill(log_p == -torch.inf, 0.0)).sum() * temperature**2 / len(z)",
        "kl has distillation's factor T²",
        "distances",
    ),
    Fault(
        "infonce-direction",
        "distances.py",
        "return F.cross_entropy(similarity, torch",
        "return F.cross_entropy(similarity.T, torch",
        "rows of c look for rows of z",
        "distances",
    ),
    Fault(
        "target-not-detached",
        "distances.py",
        "    if rows.requires_grad:\n        rows = rows.detach()\n",
        "",
        "the companion's target keeps its graph",
        "distances",
    ),
    # ---- λ and α over time -------------------------------------------------------------------------------------------
    Fault(
        "warmup-late",
        "schedules.py",
        "return self.value * min(1.0, step / self.steps)",
        "return self.value * min(1.0, (step - 1) / self.steps)",
        "the warmup is a step late",
        "schedules",
    ),
    # ---- the companion -----------------------------------------------------------------------------------------------
    Fault(
        "stale-forecast",
        "companion/companion.py",
        "        record.forecast = forecast.to(record.logits.device)\n",
        '        record.forecast = getattr(self, "_former", forecast)\n        self._former = forecast\n',
        "the model is held to the forecast of the batch before",
        "reference",
    ),
    Fault(
        "draws-not-replayed",
        "companion/companion.py",
        "with replayed(rng_state), inputs.outside_checkpoints():",
        "with inputs.outside_checkpoints():",
        "the companion has dropout masks of its own",
        "regularizer",
    ),
    Fault(
        "generator-not-put-back",
        "_rng.py",
        "        restore(now)\n",
        "        pass\n",
        "the script's random stream is the companion's",
        "regularizer",
    ),
    Fault(
        "companion-gradients-pile-up",
        "companion/companion.py",
        "            self._optimizer.optimizer.zero_grad()\n",
        "            pass\n",
        "the companion learns from former batches again",
        "reference",
    ),
    Fault(
        "every-off-by-one",
        "companion/companion.py",
        "step % self._every == 0",
        "(step - 1) % self._every == 0",
        "with companion_every=k the companion learns at the first of k steps",
        "companion_costs",
    ),
    Fault(
        "fraction-of-other-rows",
        "companion/companion.py",
        "record.logits[: len(c)]",
        "record.logits[-len(c) :]",
        "the companion learns rows' logits from others",
        "companion companion_costs",
    ),
    Fault(
        "sum-for-mean",
        "companion/weighting.py",
        "if gradients and (self.count > 1 or self.half):",
        "if gradients and self.half:",
        "the companion learns from the sum of a step's forwards",
        "weighting reference",
    ),
    Fault(
        "overflow-stepped-on",
        "companion/weighting.py",
        "return self.half and not bool(",
        "return False and not bool(",
        "the companion steps on gradients that overflowed in float16",
        "companion_half amp",
    ),
    Fault(
        "frozen-not-shared",
        "companion/copying.py",
        "[p for p in model.parameters() if not p.requires_grad]",
        "[]",
        "the companion has frozen parameters of its own",
        "companion",
    ),
    Fault(
        "mode-not-mirrored",
        "companion/sync.py",
        "                ours.training = theirs.training\n",
        "                pass\n",
        "the companion's layers stay in the mode that they were copied in",
        "companion",
    ),
    Fault(
        "options-not-followed",
        "companion/optimizer.py",
        "                    _put(ours, key, self._option(key, value))\n",
        "                    pass\n",
        "a scheduler does not reach the companion's optimizer",
        "schedulers",
    ),
    Fault(
        "counts-followed",
        "companion/optimizer.py",
        "if key not in NO_OPTIONS and not (key in seen and _is_same(value, seen[key], versions.get(key, 0))):",
        "if key not in NO_OPTIONS:",
        "what the base counts in its groups overwrites the companion's",
        "wrapper",
    ),
    Fault(
        "companion-optimizer-draws",
        "companion/optimizer.py",
        "                _rng.restore(state)\n",
        "                pass\n",
        "an optimizer that draws (for the companion) changes the script's random stream",
        "zero_weight",
    ),
    Fault(
        "inputs-not-detached",
        "companion/inputs.py",
        "return tensor.detach().requires_grad_() if tensor.requires_grad else tensor",
        "return tensor",
        "the companion's backward goes on into what made the inputs",
        "regularizer inputs",
    ),
    Fault(
        "first-forecast-unchecked",
        "companion/companion.py",
        "            checks.require_equal(record.logits, record.forecast, self._module)\n",
        "            pass\n",
        "no warning that the copy is another network",
        "first_forward",
    ),
    Fault(
        "loaded-weights-unsaid",
        "companion/companion.py",
        "            self._tell_of_loaded_weights()\n",
        "            pass\n",
        "no warning that the companion does not have weights loaded in the run",
        "first_forward",
    ),
    Fault(
        "nan-gradients-stepped-on",
        "companion/companion.py",
        "            if not mean.half:\n                deque(",
        "            if False:\n                deque(",
        "a gradient of nan behind masked logits reaches the companion",
        "not_finite infinities",
    ),
    # ---- the prototypes ----------------------------------------------------------------------------------------------
    Fault(
        "first-mean-shrunk",
        "prototypes/prototypes.py",
        "            weights = torch.where(self._seen, weights, counts.clamp(min=1e-30).reciprocal())\n",
        "",
        "the first mean does not become the prototype but a part of it",
        "reference",
    ),
    Fault(
        "ignored-rows-in-the-mean",
        "prototypes/prototypes.py",
        "labelled = max(len(classes), 1) if record.all_labelled else self._count_labelled(classes)",
        "labelled = max(len(classes), 1)",
        "the penalty's mean counts rows that the loss ignores",
        "dcp",
    ),
    Fault(
        "mixture-of-unseen",
        "prototypes/prototypes.py",
        "~self._seen.index_select(0, columns)).any(1)",
        "~self._seen.index_select(0, columns)).all(1)",
        "soft labels are held to classes not yet seen",
        "dcp",
    ),
    # ---- labels, loss scale, class dimension -------------------------------------------------------------------------
    Fault(
        "given-labels-kept",
        "hooks/labels.py",
        "self._of_this_forward, self.of_next_forward = self.of_next_forward, None",
        "self._of_this_forward = self.of_next_forward",
        "labels of one forward are taken for the next one's",
        "labels",
    ),
    Fault(
        "labels-of-few-rows",
        "hooks/cross_entropy.py",
        "LEAST_READ = 0.75",
        "LEAST_READ = 0.1",
        "another loss passes for a cross-entropy where a few rows fit",
        "reading",
    ),
    Fault(
        "label-is-lowest",
        "hooks/cross_entropy.py",
        "labels = torch.where(sure, top, lowest)",
        "labels = lowest",
        "sure rows get a wrong label, from rounding",
        "reading",
    ),
    Fault(
        "two-classes-ambiguous",
        "hooks/cross_entropy.py",
        "    return told & falls\n",
        "    return told\n",
        "mixed labels of two classes pass for hard ones",
        "reading",
    ),
    Fault(
        "class-dim-not-laid-out",
        "regularizer.py",
        "                record.lay_out(self._class_dim)\n",
        "                pass\n",
        "the first batch has time for classes",
        "reading",
    ),
    Fault(
        "class-dim-first",
        "hooks/cross_entropy.py",
        "for dim in range(1, z.ndim):",
        "for dim in range(1, 2):",
        "the class dimension is always taken for 1",
        "reading",
    ),
    # ---- several ranks -----------------------------------------------------------------------------------------------
    Fault(
        "companion-not-averaged",
        "companion/companion.py",
        "self._ranks.average([*gradients, lost])",
        "self._ranks.average([lost])",
        "each rank's companion learns from its own batch",
        "distributed",
    ),
    Fault(
        "ranks-summed",
        "distributed.py",
        "_torch.unflattened(flat.div_(self.count), together)",
        "_torch.unflattened(flat, together)",
        "the companion learns from the sum over the ranks",
        "distributed",
    ),
    Fault(
        "unused-parameters",
        "companion/companion.py",
        "  # every rank must bring the same tensors to the reduction\n            self._optimizer.fill_gradients()\n",
        "\n            pass\n",
        "ranks that use other layers reduce other tensors",
        "distributed",
    ),
    Fault(
        "buffers-not-synced",
        "companion/sync.py",
        "        self._ranks.broadcast(self._companion.buffers())\n",
        "",
        "the companions' batch norm differs between ranks",
        "distributed",
    ),
    Fault(
        "weights-not-synced",
        "companion/sync.py",
        "        self._ranks.broadcast(p.data for p in self._companion.parameters() if p.requires_grad)\n",
        "",
        "the companions' weights differ between ranks",
        "distributed",
    ),
    Fault(
        "prototype-counts-not-added",
        "prototypes/prototypes.py",
        "            self._ranks.add_up(counts)\n",
        "",
        "class means divide by one rank's rows",
        "dcp_distributed",
    ),
    Fault(
        "rank-left-waiting",
        "companion/companion.py",
        "            self._mean.count += 1\n",
        "            pass\n",
        "a rank whose batch is not finite leaves the others waiting",
        "not_finite",
    ),
    # ---- metrics, plots, demo ----------------------------------------------------------------------------------------
    Fault(
        "perplexity-base",
        "metrics/non_targets.py",
        ".sum(1).exp(), counts)",
        ".sum(1).exp2(), counts)",
        "the perplexity has base 2 in one place and e in the other",
        "metrics",
    ),
    Fault(
        "drift-unweighted",
        "metrics/streaming.py",
        "distances=mean * samples",
        "distances=mean",
        "batches of a stream are added up without their sizes",
        "metrics_streaming",
    ),
    Fault(
        "band-is-deviation",
        "plots/curves.py",
        "statistics.stdev(c) / math.sqrt(len(c))",
        "statistics.stdev(c)",
        "the band is the standard deviation",
        "plots",
    ),
    Fault(
        "best-epoch-reported",
        "demo/report.py",
        '100 * run["accuracy"][-1]',
        '100 * max(run["accuracy"])',
        "the demo reports the best epoch by the test images",
        "demo",
    ),
    Fault(
        "one-standard-error",
        "demo/report.py",
        "abs(row.minus_plain) <= 2 * row.minus_plain_error",
        "abs(row.minus_plain) <= row.minus_plain_error",
        "the demo calls a win what is within two standard errors",
        "demo",
    ),
]


def copied(root: Path, folder: Path) -> Path:
    """Copy a working tree, without what git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def failing_test(tree: Path, *arguments: str) -> str | None:
    """Run pytest up to the first test that fails, and give it; None if all pass.

    A test that hangs is red in CI, too, and is given as one: pytest, which prints a line for each, has been silent for
    long. The whole run may take any time, since the machine may be busy.

    Raises:
        RuntimeError: pytest itself did not get as far.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # a fault of the same length and second would pass for compiled
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*PYTEST, *arguments], cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        size, since = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since < HANGS_AFTER:
            time.sleep(0.2)
            if os.fstat(log.fileno()).st_size > size:
                size, since = os.fstat(log.fileno()).st_size, time.monotonic()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
        status = process.wait()
        log.seek(0)
        output = log.read()
    if status == 0:
        return None
    if status == -signal.SIGKILL:
        return f"{(re.findall(r'[^ ]+::[^ ]+', output) or ['pytest'])[-1]}{HANGS}"
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status not in (1, 2) or found is None:  # a test failed, or a file could not be imported
        raise RuntimeError(f"pytest {' '.join(arguments)} in {tree} ended with {status}:\n{output}")
    return found[1]


def caught_by(fault: Fault, tree: Path) -> str | None:
    """Make the fault in a tree, and undo it again; give the test that fails."""
    file = tree / "dcl_optim" / fault.file
    former = file.read_text(encoding="utf-8")
    file.write_text(fault.made_in(tree), encoding="utf-8")
    try:
        has_markers = "stress:" in (tree / "pyproject.toml").read_text(encoding="utf-8")  # not an early --root
        files = [*fault.paths, "-m", DEFAULT] if has_markers else fault.paths
        return failing_test(tree, *files) or failing_test(tree, "-n", "2")
    finally:
        file.write_text(former, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of faults, or parts of them; all without")
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once, each in a copy of its own")
    parser.add_argument("--root", type=Path, default=HERE, help="another working tree, with the same faults to make")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or any(name in fault.name for name in args.names)]
    if not chosen:
        parser.error(f"no fault has a name like {' or '.join(args.names)}")
    if args.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.effect} ({fault.file})")
        return 0
    for fault in chosen:
        fault.made_in(args.root)  # all texts are there, before the first is run
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            trees.put(copied(args.root, Path(folder, str(number))))

        def run(fault: Fault) -> str | None:
            tree, start = trees.get(), time.monotonic()
            try:
                found = caught_by(fault, tree)
            finally:
                trees.put(tree)
            print(f"{fault.name}: {found or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)", flush=True)
            return found

        with ThreadPoolExecutor(args.jobs) as pool:
            caught = [found for found in pool.map(run, chosen) if found]
        tests = sorted({found.removesuffix(HANGS) for found in caught})
        red = failing_test(trees.get(), *tests) if tests else None
    if red:
        print(f"{red} fails without a fault, too")
    print(f"{len(caught)} of {len(chosen)} faults caught")
    return 0 if len(caught) == len(chosen) and not red else 1


if __name__ == "__main__":
    sys.exit(main())
