"""A trial of a script: what a step costs, that nothing of the script changes, and what methods gain."""

import copy
import json
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dcl_optim import DCLOptimizer, DCPOptimizer
from dcl_optim.demo.commands import main
from dcl_optim.trial import accuracy, compare, overhead
from dcl_optim.trial.comparison import Comparison
from dcl_optim.trial.figure import COLORS, draw
from dcl_optim.trial.paired import probability
from tests.helpers import PATIENCE, assert_same, sgd, train

ROWS = ["plain", "DCP, line", "DCP, term", "DCL, line", "DCL, term"]
SHORT = 0.05  # seconds


class Network(nn.Module):
    """Draws random numbers in its forward pass, counts batches, and changes its input in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=1.0):
        noise = random.random() + np.random.rand()  # noqa: NPY002
        return self.head(self.layers(x + 0)) * scale + 0 * noise


def script(seed=0):
    torch.manual_seed(seed)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(16, 6), torch.arange(16) % 3
    train(model, optimizer, [batch])  # so that there is a state to change
    return model, optimizer, batch


def everything(model, optimizer, batch):
    """What a measurement must leave alone."""
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    streams = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    found = model.state_dict(), optimizer.state_dict(), gradients, batch, modes, hooks, streams
    return copy.deepcopy(found)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_measurement_changes_nothing_bit_for_bit(is_training):
    model, optimizer, batch = script()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # it replaces the optimizer's step
    model.train(is_training)
    model.layers[2].eval()
    before = everything(model, optimizer, batch)
    measured = overhead(model, optimizer, batch, seconds=SHORT)
    assert_same(everything(model, optimizer, batch), before)
    assert [row.name for row in measured.rows] == ROWS
    assert scheduler.get_last_lr() == [0.1]


def test_the_table_has_times_ratios_and_bytes(capsys):
    model, optimizer, batch = script()
    measured = overhead(model, optimizer, batch, seconds=SHORT)
    plain, *others = measured.rows
    assert (plain.ratio, plain.lower, plain.upper, plain.state_bytes) == (1, 1, 1, 0)
    for row in others:
        assert row.lower <= row.ratio <= row.upper
        assert 0.2 < row.ratio / (row.milliseconds / plain.milliseconds) < 5
    prototypes = 3 * 3 * 4 + 3 * 4 + 2 * 4  # with the rows of each class and the running accuracy
    assert {row.state_bytes for row in others if row.name.startswith("DCP")} == {prototypes}
    wrapped = DCLOptimizer(optimizer, model, companion_fraction=1)
    parameters = sum(parameter.nbytes for parameter in wrapped.companion.parameters())
    assert all(row.state_bytes > 3 * parameters for row in others if row.name.startswith("DCL"))  # with Adam's moments
    assert {row.peak_bytes for row in measured.rows} == {None}  # a CPU does not tell it
    lines = str(measured).splitlines()
    assert repr(measured) == str(measured)
    assert [line.partition("  ")[0] for line in lines[2:7]] == ROWS
    assert re.fullmatch(r"cpu, \d+ threads; \d+ rounds of \d+ steps", lines[-1])
    assert re.fullmatch(r"overhead: measuring takes about \d+ s ...\n", capsys.readouterr().err)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_inputs_are_arguments_of_the_model(kind):
    model, optimizer, (x, y) = script()
    inputs = (x, 2.0) if kind is tuple else {"x": x, "scale": 2.0}
    measured = overhead(model, optimizer, (inputs, y), seconds=SHORT)
    assert [row.name for row in measured.rows] == ROWS


def test_a_loss_that_the_line_cannot_read_has_the_term_alone():
    model, optimizer, batch = script()
    measured = overhead(model, optimizer, batch, F.multi_margin_loss, seconds=SHORT)
    assert [row.name for row in measured.rows] == ["plain", "DCP, term", "DCL, term"]
    assert set(measured.refused) == {"DCP, line", "DCL, line"}
    assert "\nDCP, line: DCPOptimizer cannot read the labels" in str(measured)


def test_the_loss_gets_what_the_model_returned():
    class InDict(Network):
        def forward(self, x, scale=1.0):
            return {"scores": super().forward(x, scale)}

    torch.manual_seed(0)
    model = InDict()
    optimizer = sgd(model)
    batch = torch.randn(16, 6), torch.arange(16) % 3
    found = overhead(
        model,
        optimizer,
        batch,
        lambda output, y: F.cross_entropy(output["scores"], y),
        logits=lambda output: output["scores"],
        seconds=SHORT,
    )
    assert [row.name for row in found.rows] == ROWS


def test_a_faulty_script_has_its_own_error():
    model, optimizer, (x, y) = script()
    with pytest.raises(RuntimeError, match="shapes"):
        overhead(model, optimizer, (x[:, :5], y), seconds=SHORT)


def test_wrong_arguments_are_named():
    model, optimizer, batch = script()
    with pytest.raises(TypeError, match=r"batch must be a pair \(inputs, labels\), got Tensor"):
        overhead(model, optimizer, batch[0])
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        overhead(model, optimizer, batch, seconds=0)
    with pytest.raises(ValueError, match="optimizer is a DCPOptimizer already; pass the plain optimizer"):
        overhead(model, DCPOptimizer(optimizer, model), batch)


@pytest.mark.gpu
def test_on_a_gpu():
    model, _, (x, y) = script()
    model = model.cuda()
    optimizer = sgd(model)
    measured = overhead(model, optimizer, (x.cuda(), y.cuda()), seconds=0.5)
    assert all(row.milliseconds > 0 for row in measured.rows)
    assert all(row.peak_bytes is not None and row.peak_bytes > row.state_bytes for row in measured.rows)
    assert "peak memory" in str(measured)


# ---- the comparison --------------------------------------------------------------------------------------------------


METHODS = {"plain": 0, "DCP": "auto", "one": 1}


def noisy(weight, seed):
    """A gain of two points with the automatic weight, and none with 1."""
    torch.manual_seed(seed)
    level = 80 + 5 * torch.randn(()).item()
    return level + torch.randn(()).item() * (weight != 0) + 2 * (weight == "auto")


def test_the_table_is_that_of_paired_statistics():
    from scipy.stats import ttest_rel

    found = compare(noisy, METHODS, seeds=8)
    assert (list(found.curves), found.seeds, found.interrupted) == (list(METHODS), list(range(8)), False)
    plain, auto, one = (torch.tensor(figures, dtype=torch.float64) for figures in found.figures.values())
    assert plain.tolist() == [noisy(0, seed) for seed in range(8)]
    raw = [ttest_rel(other, plain).pvalue for other in (auto, one)]
    corrected = {"DCP": 2 * raw[0], "one": raw[1]}  # Holm's: the smaller one times two
    assert raw[0] < raw[1]
    assert found.p_values() == pytest.approx(corrected)
    difference = auto - plain
    error = (difference.std() / 8**0.5).item()
    lines = str(found).splitlines()
    assert lines[0].split() == ["method", "mean", "minus", "plain", "p"]
    assert lines[2].split() == ["plain", f"{plain.mean():.2f}", "±", f"{(plain.std() / 8**0.5):.2f}"]
    assert corrected["DCP"] < 0.001 < corrected["one"]
    cells = [f"{difference.mean():+.2f}", "±", f"{error:.2f}", "<", "0.001"]
    assert lines[3].split()[4:] == cells
    assert lines[5] == "seeds: 8; ± one standard error; p of the paired t-test with Holm's correction"


def test_it_says_whether_the_others_differ_from_one_another():
    """By the same test; the pairs of the methods beside the first are corrected together."""
    from scipy.stats import ttest_rel

    found = compare(lambda weight, seed: noisy(weight, seed) - 0.01 * noisy(0, seed + 9) * (weight == 1), METHODS, 8)
    difference = torch.tensor(found.gains("DCP", "one"))
    assert ttest_rel(found.figures["DCP"], found.figures["one"]).pvalue < 0.05
    said = f"DCP minus one: {difference.mean():+.4f} ± {difference.std() / 8**0.5:.4f}"
    assert str(found).splitlines()[6:] == ["Of the methods beside plain these differ (p < 0.05):", said]
    alike = compare(noisy, {"plain": 0, "a": 1, "b": 0.5, "c": 2}, seeds=8)  # b and c are a
    assert str(alike).splitlines()[7:] == ["No two of the methods beside plain differ (p >= 0.05)."]
    assert "differ" not in str(compare(noisy, (0, 1), seeds=8))


def test_many_pairs_are_corrected_together():
    """A pair with p = 0.03 differs among two methods, and does not among three."""
    runs = {"plain": [0.0] * 4, "a": [1.0, 2.0, 1.0, 2.0], "b": [1.0, 1.0, 0.5, 1.0], "c": [1.2, 1.4, 0.6, 1.5]}
    curves = {name: [[value] for value in values] for name, values in runs.items()}
    pair = {name: curves[name] for name in ("plain", "b", "c")}
    assert "differ (p < 0.05):\nb minus c" in str(Comparison(pair, [0, 1, 2, 3]))
    assert "No two of the methods" in str(Comparison(curves, [0, 1, 2, 3]))


def test_figures_that_are_all_alike_have_a_p_too():
    assert probability(0.0, 0.0, 8) == 1.0
    assert probability(0.5, 0.0, 8) == 0.0


def test_runs_of_a_seed_are_side_by_side_and_any_seeds_are_possible():
    asked = []
    found = compare(lambda weight, seed: asked.append((weight, seed)) or seed + len(asked), [0.1, 0.2], [7, 3])
    assert asked == [(0.1, 7), (0.2, 7), (0.1, 3), (0.2, 3)]
    assert found.seeds == [7, 3]
    assert found.gains("0.2", "0.1") == [1, 1]


def test_methods_are_values_by_their_names():
    """The dict's values go to the script; a list's values are their own names."""
    asked = []

    def train(method, seed):
        asked.append(method)
        return noisy(0, seed)

    settings = {"plain": {"lr": 0.1}, "slow": {"lr": 0.01}}
    assert list(compare(train, settings, 1).curves) == ["plain", "slow"]
    assert list(compare(train, ["plain", "DCP"], 1).curves) == ["plain", "DCP"]
    assert asked == [{"lr": 0.1}, {"lr": 0.01}, "plain", "DCP"]


def curve(weight, seed):
    """Three values as it trains, the last of which is noisy's."""
    yield 10.0
    yield 50.0 + seed
    yield noisy(weight, seed)


def test_the_last_value_of_a_curve_counts():
    yielded = compare(curve, METHODS, 3)
    assert yielded.figures == compare(noisy, METHODS, 3).figures
    assert yielded.curves["DCP"][2] == [10.0, 52.0, noisy("auto", 2)]
    listed = compare(lambda weight, seed: list(curve(weight, seed)), METHODS, 3)
    assert (listed.curves, str(listed)) == (yielded.curves, str(yielded))


def test_ctrl_c_keeps_the_finished_seeds():
    def train(weight, seed):
        if (weight, seed) == (1, 2):
            raise KeyboardInterrupt
        return noisy(weight, seed)

    found = compare(train)
    assert (found.seeds, found.interrupted) == ([0, 1], True)
    assert found.figures == compare(noisy, seeds=2).figures
    assert "interrupted; seeds: 2;" in str(found)
    with pytest.raises(KeyboardInterrupt):
        compare(train, seeds=[2])


def test_a_failure_shows_what_was_finished(capsys):
    def train(weight, seed):
        return noisy(weight, seed) / (seed < 2)

    with pytest.raises(ZeroDivisionError):
        compare(train)
    assert f"{noisy(0, 0) / 2 + noisy(0, 1) / 2:.2f} ± " in capsys.readouterr().err


def with_nan(weight, seed):
    return math.nan if (weight, seed) == (1, 3) else noisy(weight, seed)


@pytest.mark.parametrize(
    ("train", "notes"),
    [
        (with_nan, ["1 gave a value that is not finite (seed 3): not compared."]),
        (
            lambda weight, seed: 50.0 + weight,
            ["0 gave 50 in all 4 seeds: does train use its seed", "1 gave 51 in all 4 seeds"],
        ),
        (lambda weight, seed: noisy(0, seed), ["1 gave what 0 gave in all 4 seeds: its effect is too small"]),
        (noisy, []),
    ],
)
def test_doubtful_figures_are_said(train, notes, capsys):
    found = compare(train, (0, 1), 4)
    said = str(found).splitlines()[5:]
    assert len(said) == len(notes)
    for note, line in zip(notes, said, strict=True):
        assert note in line
    early = re.findall("in all 3 seeds", capsys.readouterr().err)
    assert len(early) == len([note for note in said if "in all 4 seeds" in note])  # after three seeds already


def test_what_is_not_finite_is_not_compared():
    found = compare(lambda weight, seed: math.inf if weight == 1 and seed == 1 else noisy(weight, seed), METHODS, 4)
    assert set(found.p_values()) == {"DCP"}
    assert found.p_values() == compare(noisy, {"plain": 0, "DCP": "auto"}, 4).p_values()
    assert "differ" not in str(found)
    baseline = compare(lambda weight, seed: noisy(weight, seed) if weight else math.nan, METHODS, 4)
    assert baseline.p_values() == {}
    assert "+" not in str(baseline).splitlines()[3]


@pytest.mark.parametrize("figure", [None, "80", (80.0, 0.1), True, torch.ones(2), torch.tensor(True), ["80"]])
def test_a_figure_is_a_number(figure):
    kind = type(figure[0] if isinstance(figure, list) else figure).__name__
    with pytest.raises(TypeError, match=rf"train returned {kind} for 'plain' and seed 0; it must return a number"):
        compare(lambda weight, seed: figure)


@pytest.mark.parametrize("figures", [[], iter(())])
def test_a_curve_has_a_value(figures):
    with pytest.raises(TypeError, match="train returned no number for 'plain' and seed 0"):
        compare(lambda weight, seed: figures)


def test_tensors_and_numpy_are_numbers():
    kinds = (torch.tensor(1.5), np.float32(2.5), 3)
    assert list(compare(lambda weight, seed: kinds[weight] + seed, (0, 1, 2), 1).figures.values()) == [
        [1.5],
        [2.5],
        [3.0],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"methods": (0,)}, r"methods has \['0'\], nothing to compare"),
        ({"methods": {"plain": 0}}, "nothing to compare"),
        ({"seeds": [0, 0, 1, 1]}, "seeds has .* none twice"),
        ({"seeds": 0}, "at least one seed"),
    ],
)
def test_there_is_something_to_compare(arguments, said):
    with pytest.raises(ValueError, match=said):
        compare(noisy, **arguments)


def test_one_seed_says_nothing_of_noise():
    found = compare(noisy, seeds=1)
    assert found.p_values() == {}
    assert str(found).splitlines()[-1] == "One seed says nothing of noise: take ten."
    diverged = compare(with_nan, (0, 1), seeds=[3])
    assert str(diverged).splitlines()[-1] == "1 gave a value that is not finite (seed 3): not compared."


@pytest.mark.parametrize(
    ("unit", "cells"),
    [
        (0.01, ["0.93000 ± 0.00577", "+0.01000 ± 0.00020"]),
        (1.0, ["93.000 ± 0.577", "+1.000 ± 0.020"]),
        (10.0, ["930.00 ± 5.77", "+10.00 ± 0.20"]),
    ],
)
def test_the_table_has_the_digits_that_its_smallest_error_needs(unit, cells):
    """Two of them. 3**-0.5 is the error of plain training, 0.02 that of the gain."""
    gains = [1 - 3**0.5 / 50, 1, 1 + 3**0.5 / 50]
    plain = [[unit * (93 + seed)] for seed in (-1, 0, 1)]
    other = [[value + unit * gain] for (value,), gain in zip(plain, reversed(gains), strict=True)]
    lines = str(Comparison({"plain": plain, "DCP": other}, [0, 1, 2])).splitlines()
    assert lines[2].endswith(cells[0])
    assert cells[1] in lines[3]


def test_without_an_error_the_table_has_four_digits(capsys):
    """One seed has none, and the error of differences that are the same is one of the arithmetic."""
    lines = str(compare(lambda weight, seed: 0.92342 + weight / 100, (0, 1), 1)).splitlines()
    assert lines[2].split()[1] == "0.9234"
    assert "seed 0, 1 0.9334" in capsys.readouterr().err
    same = Comparison({"plain": [[0.1], [0.1]], "DCP": [[0.1 + 0.2], [0.3]]}, [0, 1])
    assert str(same).splitlines()[3].split()[4:7] == ["+0.2000", "±", "0.0000"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_an_error_of_a_function_of_names_says_how_to_pass_them():
    def train(name, seed):
        return 80.0 + name.index("p")

    with pytest.raises(AttributeError) as raised:
        compare(train)
    (note,) = raised.value.__notes__
    assert note.startswith("compare: train failed with method 0 and seed 0, a weight of the default methods;")
    assert note.endswith("pass methods=[...], on the shell --methods")
    with pytest.raises(ValueError, match="substring") as raised_later:
        compare(train, ["plain", "DCL"])
    assert raised_later.value.__notes__ == ["compare: train failed with method 'DCL' and seed 0"]


@pytest.mark.parametrize("package", ["scipy.special", "tabulate", "tqdm", "matplotlib"])
def test_without_the_extra_an_error_names_it_before_the_training(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*pip install \"dcl-optim\[trial\]\""):
        compare(lambda weight, seed: pytest.fail("it trains"))
    if package == "tabulate":
        with pytest.raises(ImportError, match=r"dcl-optim\[trial\]"):
            overhead(*script())


def test_without_the_extra_the_package_and_accuracy_work():
    text = """
import sys
for name in ("matplotlib", "scipy", "sklearn", "tabulate", "tqdm"):
    sys.modules[name] = None
import torch, dcl_optim
from dcl_optim.trial import accuracy, compare, overhead
print(accuracy(torch.nn.Identity(), [(torch.eye(3), torch.arange(3))]))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("100.0\n", "")


def test_without_a_terminal_the_progress_is_a_line_a_minute(capsys, monkeypatch):
    minutes = iter(range(100))
    monkeypatch.setattr("dcl_optim.trial.comparison.time.monotonic", lambda: 25 * next(minutes))
    compare(noisy, (0, 1), 3)
    said = capsys.readouterr().err
    assert "\r" not in said
    assert [re.search(r"\d/6", line)[0] for line in said.splitlines()] == ["3/6", "6/6"]
    assert f"seed 2, 1 {noisy(1, 2):.4g}" in said.splitlines()[-1]


def test_the_file_is_json_and_has_every_value(tmp_path):
    found = compare(lambda weight, seed: [math.nan, with_nan(weight, seed)], (0, 1), 4)
    found.save(tmp_path / "results.json")
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    results = json.loads(text, parse_constant=pytest.fail)  # Python's own reader takes NaN too
    assert results["curves"]["0"] == [[None, noisy(0, seed)] for seed in range(4)]
    assert results["curves"]["1"][3] == [None, None]
    assert (results["seeds"], results["interrupted"], results["table"]) == (
        [0, 1, 2, 3],
        False,
        str(found).splitlines(),
    )


# ---- the figure ------------------------------------------------------------------------------------------------------


def runs(count, values=5, gain=0.0):
    """Run number i gains i times as much."""
    return [[50 + 8 * value + (1 + gain) * run for value in range(values)] for run in range(count)]


def figure_of(curves):
    found = Comparison(curves, list(range(len(curves["plain"]))))
    return draw(curves, {name: found.gains(name, "plain") for name in curves}, "digits")


def test_what_is_drawn():
    figure = figure_of({"plain": runs(3), "DCP": runs(3, gain=2), "DCL": runs(3, gain=-1)})
    curves, gains = figure.axes
    assert figure.get_suptitle() == "digits"
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["plain", "DCP", "DCL"]
    assert curves.lines[0].get_xdata().tolist() == [20, 40, 60, 80, 100]
    assert curves.lines[0].get_ydata().tolist() == pytest.approx([51, 59, 67, 75, 83])
    band = [y for x, y in curves.collections[0].get_paths()[0].vertices.tolist() if x == 20]
    assert (min(band), max(band)) == pytest.approx((51 - 3**-0.5, 51 + 3**-0.5))  # one standard error of 50, 51, 52
    assert gains.get_xlabel() == "gain over plain"
    assert [text.get_text() for text in gains.get_yticklabels()] == ["DCP", "DCL"]
    assert gains.get_ylim()[0] > gains.get_ylim()[1]  # the first one on top
    points = [list(line.get_xdata()) for line in gains.lines if len(line.get_xdata()) == 3]
    assert points == [[0, 2, 4], [0, -1, -2]]
    (dcp, _, (bar,)), (dcl, _, _) = (container.lines for container in gains.containers)
    assert (dcp.get_xdata(), dcl.get_xdata()) == ([2], [-1])
    left, right = bar.get_segments()[0][:, 0]
    assert (left, right) == pytest.approx((2 - 2 / 3**0.5, 2 + 2 / 3**0.5))
    assert [line.get_color() for line in curves.lines] == list(COLORS[:3])
    assert (dcp.get_color(), dcl.get_color()) == COLORS[1:3]


def test_a_value_that_is_not_finite_is_a_gap(tmp_path):
    curves = {"plain": runs(2), "DCP": runs(2)}
    curves["plain"][1][1] = math.nan
    figure = figure_of(curves)
    figure.savefig(tmp_path / "curves.png")
    drawn = figure.axes[0].lines[0].get_ydata().tolist()
    assert drawn == pytest.approx([50.5, math.nan, 66.5, 74.5, 82.5], nan_ok=True)


@pytest.mark.parametrize(
    ("plain", "other", "panels"),
    [
        (runs(1, 1), runs(1, 1), 1),
        (runs(2, 1), runs(2, 1), 1),
        (runs(2), runs(2, 4), 1),
        (runs(1, 2), runs(1, 2), 2),
        (runs(2, 2), runs(2, 2), 2),
    ],
)
def test_without_curves_of_one_length_there_are_gains_alone(plain, other, panels, tmp_path):
    figure = figure_of({"plain": plain, "DCP": other})
    figure.savefig(tmp_path / "gains.png")
    assert len(figure.axes) == panels
    assert figure.axes[-1].get_xlabel() == "gain over plain"


def test_the_plot_is_an_image_of_what_is_finite(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    compare(with_nan, METHODS, 4).plot(tmp_path / "gains.png")
    assert (tmp_path / "gains.png").read_bytes()[:4] == b"\x89PNG"
    assert ("matplotlib.pyplot" in sys.modules) == before
    with pytest.raises(ValueError, match="no method beside '0' has finite values"):
        compare(with_nan, (0, 1), 4).plot(tmp_path / "other.png")


# ---- the accuracy ----------------------------------------------------------------------------------------------------


def test_accuracy_is_measured_in_evaluation_mode_and_the_mode_comes_back():
    model, _, (x, y) = script()
    model.layers[2].eval()  # a frozen layer in a model that trains
    before = everything(model, sgd(model), (x, y))
    found = accuracy(model, [(x[:10], y[:10]), (x[10:], y[10:])])
    after = everything(model, sgd(model), (x, y))
    assert_same(after[4:6], before[4:6])
    assert_same(after[0], before[0])  # batch norm's statistics too
    model.eval()
    assert found == pytest.approx(100 * (model(x).argmax(1) == y).double().mean().item())


def test_accuracy_takes_what_a_model_takes_and_leaves_ignored_labels_out():
    model, _, (x, y) = script()
    expected = accuracy(model, [(x, y)])
    assert accuracy(model, [({"x": x, "scale": 2.0}, y)]) == accuracy(model, [((x, 2.0), y)]) == expected
    ignored = torch.cat([y, y.new_full((16,), -100)])
    assert accuracy(model, [(torch.cat([x, x]), ignored)]) == expected
    pixels = nn.Conv2d(2, 3, 1)
    images, labels = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    right = (pixels(images).argmax(1) == labels).double().mean().item()
    assert accuracy(pixels, [(images, labels)]) == pytest.approx(100 * right)


def test_accuracy_needs_class_indices():
    model, _, (x, y) = script()
    with pytest.raises(TypeError, match=r"labels must be class indices.* of torch\.float32; .*pass labels\.argmax"):
        accuracy(model, [(x, y.float())])
    with pytest.raises(
        TypeError, match=r"labels must be class indices of shape \(16,\), got \(16, 3\).*labels\.argmax"
    ):
        accuracy(model, [(x, F.one_hot(y, 3))])
    with pytest.raises(TypeError, match=r"got \(16, 1\) of .*labels\.squeeze\(1\)"):  # which torch would broadcast
        accuracy(model, [(x, y[:, None])])
    assert model.training
    with pytest.raises(ValueError, match="batches has no labels"):
        accuracy(model, [])


# ---- the command -----------------------------------------------------------------------------------------------------

COMMANDS = ["demo", "compare", "overhead"]
SCRIPT = """
import torch
from beside import classes

def make():
    model = torch.nn.Linear(4, classes)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.arange(8) % classes)

def wrong():
    return make()[0]

def train(weight, seed):
    torch.manual_seed(seed)
    return 80 + torch.randn(()).item() + (weight == "auto") + (0.5 if weight == 0.3 else 0)

if __name__ == "__main__":
    raise SystemExit("the script ran")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    (tmp_path / "my-script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("classes = 3")
    return tmp_path


def run(*words):
    # The oldest packages use what newer ones have deprecated since: .ci/matrix.
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-m", "dcl_optim", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def test_overhead_by_its_command(folder, capsys):
    assert main(["overhead", f"{folder / 'my-script.py'}:make", "--seconds", "0.05"]) == 0
    said = capsys.readouterr()
    assert [line.partition("  ")[0] for line in said.out.splitlines()[2:7]] == ROWS
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("my-script.py", "names no function; write file.py:function"),
        ("FOLDER/other.py:make", "there is no file FOLDER/other.py"),
        ("FOLDER/my-script.py:fit", "my-script.py has no function 'fit'"),
        ("FOLDER/my-script.py:wrong", "my-script.py:wrong must return (model, optimizer, batch)"),
        ("no_such_module:make", "No module named 'no_such_module'"),
    ],
)
def test_what_the_command_line_names_is_there(folder, place, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["overhead", place.replace("FOLDER", str(folder))])
    assert stopped.value.code == 2
    assert said.replace("FOLDER", str(folder)) in capsys.readouterr().err


def test_compare_from_the_shell(folder):
    out = folder / "deep" / "gains"
    words = ["--methods", "0", "auto", "0.3", "--seeds", "3", "--out", str(out)]
    done = run("compare", f"{folder / 'my-script.py'}:train", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["0", "auto", "0.3"]
    assert lines[-1] == f"Wrote {out / 'results.json'} and {out / 'curves.png'}."
    assert list(json.loads((out / "results.json").read_text())["curves"]) == ["0", "auto", "0.3"]
    assert (out / "curves.png").stat().st_size > 0


def test_ctrl_c_prints_what_is_done(folder, capsys):
    text = SCRIPT.replace(
        "torch.manual_seed(seed)", "torch.manual_seed(seed)\n    if seed == 2: raise KeyboardInterrupt"
    )
    (folder / "my-script.py").write_text(text)
    assert main(["compare", f"{folder / 'my-script.py'}:train"]) == 130
    assert "interrupted; seeds: 2;" in capsys.readouterr().out


def test_the_help_has_all_commands_and_a_misspelled_one_the_near_name(capsys):
    assert main([]) == 2
    helped = capsys.readouterr().out
    assert [line.split()[0] for line in helped.splitlines() if re.match("    [a-z]", line)] == COMMANDS
    with pytest.raises(SystemExit) as stopped:
        main(["compair", "my_script.py:train"])
    assert stopped.value.code == 2
    assert "'compair' is no command, they are demo, compare, overhead; did you mean compare?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train"])
    assert "did you mean" not in capsys.readouterr().err


def test_the_demo_by_its_command(tmp_path, capsys):
    assert main(["demo", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("digits: 50 training images, 1 epochs, 1 seeds\n")
