"""The public names, those that PAGES document, and their signatures change only on purpose.

After a change on purpose, replace ``FROZEN`` by what ``python -m tests.project.test_public_api`` prints.
"""

import inspect
import itertools
import re
import textwrap
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from pkgutil import resolve_name

import dcl_optim
from tests.project.typing import user_script

PAGES = [Path(__file__).parents[2] / "docs" / f"{name}.md" for name in ("api", "api-trial", "dev/building-blocks")]
DIRECTIVE = re.compile(r"^::: ([\w.]+)(?:\n    options: .*?(?<!inherited_)members: \[(.*?)\])?", re.MULTILINE)

FROZEN = """\
dcl_optim: AutoWeight, DCLOptimizer, DCPOptimizer, __version__
dcl_optim.DCPOptimizer(base_optimizer, model, *, weight='auto', num_classes=None, logits=None, process_group='auto',
        alpha=0.97, update='rows', distance='mse', strict=True)
    .penalty(self, logits, labels, *, ignore_index=-100)
    .prototypes
dcl_optim.DCLOptimizer(base_optimizer, model, *, weight=0.1, logits=None, process_group='auto', companion=None,
        companion_optimizer=None, companion_lr_scale=1.0, companion_fraction=None, alpha=0.99, distance='mse',
        strict=True)
    .companion
    .companion_optimizer
    .penalty(self, logits, labels=None, *, ignore_index=-100)
    .reset_companion(self)
dcl_optim.AutoWeight(floor=0.1, power=6.0, classes=100.0)
    .at(self, accuracy, num_classes)
    .classes = 100.0
    .constant_up_to
    .floor = 0.1
    .power = 6.0
dcl_optim.distances.mse(z, c)
dcl_optim.distances.squared(z, c)
dcl_optim.distances.l1(z, c)
dcl_optim.distances.kl(z, c, temperature=4.0)
dcl_optim.distances.infonce(z, c, temperature=0.1)
dcl_optim.outputs.find_logits(output, given=None)
dcl_optim.trial.accuracy(model, batches, *, ignore_index=-100)
dcl_optim.trial.compare(train, methods={'plain': 0, 'DCP': 'auto', 'DCP, weight=1': 1}, seeds=10)
dcl_optim.trial.overhead(model, optimizer, batch, loss=cross_entropy, *, logits=None, seconds=10.0)
dcl_optim.trial.comparison.Comparison(curves, seeds, interrupted=False)
    .figures
    .first
    .gains(self, name, over)
    .interrupted = False
    .notes(self)
    .p_values(self)
    .plot(self, path, title='Gain of each seed')
    .save(self, path)
dcl_optim.demo.main(argv=None)
dcl_optim.optimizer.ForecastOptimizer(base_optimizer, model, forecaster, *, weight, alpha, logits=None, strict=True)
    .add_param_group(self, param_group)
    .alpha
    .defaults
    .detach(self)
    .load_state_dict(self, state_dict)
    .logs(self, prefix='')
    .param_groups
    .state
    .state_dict(self)
    .step(self, closure=None)
    .weight
    .zero_grad(self, set_to_none=True)
dcl_optim.forecaster.Forecaster()
    .before_forward(self, args, kwargs, step_number)
    .check_values(self)
    .create_state(self)
    .end_backward(self)
    .forget(self)
    .given_num_classes = None
    .learn(self, alpha)
    .load_state_dict(self, state)
    .logs(self)
    .measure_accuracy(self, from_classes)
    .num_classes = 0
    .observe(self, forward, pull, labels, scale, alpha)
    .pass_over(self, forward)
    .predict(self, forward, args, kwargs)
    .predicts = True
    .pull(self, forward, labels)
    .reads_labels = False
    .state_dict(self)
    .switch(self, mode)
    .train_accuracy(self)
dcl_optim.pull.Pull(value, slope, factor, weights=None, norms=None, radius=inf, lesson=None, drawn=None)
    .gradient(self, shape, dtype, class_dim, scale, weight=1.0, *, added_to=None, overwrites=False)
dcl_optim.pull.pull_of(distance, z, c, weights=None, number=None)
dcl_optim.forecaster.Labels(rows, number)
dcl_optim.progress.Forward(logits, step_number, class_dim=1, copies=True)
    .lay_out(self, class_dim)
    .logits
    .release(self)
dcl_optim.companion.replay.Replay()
    .arguments(self, args, kwargs)
    .before_forward(self, args, kwargs, device)
    .call(self, network, arguments)
dcl_optim.layout.to_rows(tensor, class_dim=1)
dcl_optim.layout.from_rows(rows, shape, class_dim=1)
dcl_optim.layout.wide(tensor)
"""


def documented():
    """The full names on the page: of modules the members that are named, or all functions and classes of their own."""
    for name, members in DIRECTIVE.findall("".join(page.read_text(encoding="utf-8") for page in PAGES)):
        found = resolve_name(name)
        if inspect.ismodule(found):
            yield from (f"{name}.{member}" for member in (members.split(", ") if members else own(found)))
        else:
            yield name


def own(module):
    """What a module exports: its ``__all__``, or the public functions and classes that it defines."""
    defined = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return getattr(module, "__all__", [name for name in defined if name[0] != "_"])


class Default:
    """A default as a script would write it: a function by its name."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return self.value.__qualname__ if inspect.isfunction(self.value) else repr(self.value)


def signature(name, function):
    """Names, kinds and defaults of the parameters; types are tests/project/typing's matter."""
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else Default(parameter.default),
        )
        for parameter in inspect.signature(function).parameters.values()
    ]
    return f"{name}{inspect.Signature(parameters)}"


def members(kind, others):
    """A class's public methods and attributes, without those of bases that have lines of their own or are torch's."""
    bases = itertools.takewhile(lambda base: base not in others and base.__module__.startswith("dcl_optim"), kind.mro())
    for name in sorted({name for base in bases for name in vars(base) if name[0] != "_" or name == "__call__"}):
        value = inspect.getattr_static(kind, name)
        if type(value).__name__ == "_tuplegetter":  # a field of a named tuple, whose signature has it
            continue
        if inspect.isfunction(value):
            yield "    " + signature(f".{name}", value)
        else:
            yield f"    .{name}" + ("" if isinstance(value, property) else f" = {value!r}")


def lines():
    yield f"dcl_optim: {', '.join(dcl_optim.__all__)}"
    public = {name: resolve_name(name) for name in documented()}
    classes = {value for value in public.values() if isinstance(value, type)}
    for name, value in public.items():
        yield signature(name, value) if callable(value) else f"{name} = {value!r}"
        if isinstance(value, type):
            yield from members(value, classes - {value})


def api():
    wrapped = (textwrap.fill(line, 116, subsequent_indent=" " * 8, break_on_hyphens=False) for line in lines())
    return "".join(line + "\n" for line in wrapped)


def test_public_names_and_signatures_are_the_frozen_ones():
    """In a process of its own: a step that was wrapped for a profiler is an attribute of the class ever after."""
    with ProcessPoolExecutor(1, get_context("forkserver")) as fresh:
        assert fresh.submit(api).result().splitlines() == FROZEN.splitlines()


def test_what_the_package_exports_is_documented():
    on_page = [resolve_name(name) for name in documented()]
    assert [name for name in dcl_optim.__all__ if getattr(dcl_optim, name) not in on_page] == ["__version__"]


def test_the_typed_script_runs(tmp_path, capsys):
    user_script.main(tmp_path)
    assert capsys.readouterr().out.startswith(dcl_optim.__version__)


if __name__ == "__main__":
    print(api(), end="")
