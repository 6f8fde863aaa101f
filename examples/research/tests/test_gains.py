"""Gains over a baseline by hand, and the plots drawn from results alone."""

import math
from dataclasses import replace

import pytest

from dcl_optim.trial.paired import holm
from examples.research import __main__ as command
from examples.research import evidence, records
from examples.research.experiments import EXPERIMENTS
from examples.research.gain_tables import by_experiment, by_measure, by_setting
from examples.research.gains import MEASURES, Row, by_gain, gain, gain_in_all, values
from examples.research.plots import forest, length_curves, size_curves, steps

EMA = "EMA over 100 steps"


def record(label, seed, accuracy, average=0.0, nll=1.0):
    return {
        "label": label,
        "seed": seed,
        "accuracy": {"model": accuracy, EMA: average},
        "train_accuracy": {"model": 1.0},
        "quality": {"model": {"nll": nll, "nll_scaled": nll / 2, "ece": 0.05, "ece_scaled": 0.04}},
    }


CE = [record("CE", seed, value, value + 0.01) for seed, value in enumerate((0.80, 0.82, 0.84))]
DCP = [record("DCP", seed, value, nll=0.9) for seed, value in enumerate((0.81, 0.84, 0.84, 0.99))]


def test_a_gain_is_paired_by_the_seed():
    """Differences of 1, 2 and 0 points; the fourth seed has no partner."""
    found = gain(CE + DCP, Row("DCP"), Row("CE"))
    assert (found.mean, found.error, found.pairs) == (pytest.approx(1.0), pytest.approx(1 / math.sqrt(3)), 3)
    assert found.p == pytest.approx(1 - math.sqrt(3 / 5))  # t = sqrt 3 with 2 degrees of freedom: 1 - t / sqrt(2 + t²)


def test_a_predictor_of_the_baseline_has_a_gain_of_its_own_and_no_p_without_a_spread():
    found = gain(CE, Row("CE", EMA), Row("CE"))
    assert (found.mean, found.p) == (pytest.approx(1.0), None)
    assert gain(CE, Row("DCP"), Row("CE")) is None


def test_the_pairs_of_several_experiments_count_together():
    """Differences of 1, 2, 0 and again 1, 2, 0 points: the same mean, with the variance of six."""
    found = gain_in_all([CE + DCP, CE, CE + DCP], Row("DCP"), Row("CE"))
    assert (found.mean, found.error, found.pairs) == (pytest.approx(1.0), pytest.approx(math.sqrt(0.8 / 6)), 6)


def test_measures_by_hand():
    expected = (80.0, 1.0, 0.5, 5.0, 4.0, 100.0)
    assert [values(CE, Row("CE"), name)[0] for name in MEASURES] == pytest.approx(expected)
    assert gain(CE + DCP, Row("DCP"), Row("CE"), "NLL").mean == pytest.approx(-0.1)


def test_holm_by_hand():
    """0.01 x 4; 0.02 x 3; 0.025 x 2 would be smaller than that; 0.9 x 1."""
    assert holm({"a": 0.02, "b": 0.9, "c": 0.01, "d": 0.025}) == pytest.approx(
        {"c": 0.04, "a": 0.06, "d": 0.06, "b": 0.9}
    )
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_steps_are_those_of_the_lengths():
    of_length = {"1k": 1_000, "4k": 4_000, "16k": 16_000, "64k": 64_000}
    for setting, lengths in evidence.LENGTHS.items():
        for length in lengths:
            assert steps(EXPERIMENTS[f"length-{setting}-{length}"].runs["CE"]) == of_length[length]
    assert steps(replace(evidence.KANJI, train_size=801)) == 160 * 25  # a lone last image is dropped


def lines(axes):
    return {container.get_label(): container.lines[0].get_xydata().tolist() for container in axes.containers}


def test_the_curves_are_the_gains():
    experiments = [EXPERIMENTS[f"length-kanji-{length}"] for length in ("1k", "4k")]
    rows = {"ours": Row("DCP"), "average": Row("CE", EMA), "missing": Row("DCL")}
    (axes,) = length_curves(experiments, [CE + DCP, CE], rows, "a title").axes
    drawn = lines(axes)
    assert drawn["ours"] == [[pytest.approx(1_000, rel=0.1), pytest.approx(1.0)]]
    assert [y for _, y in drawn["average"]] == pytest.approx([1.0, 1.0])
    assert drawn["missing"] == []
    assert axes.figure.get_suptitle() == "a title"


def test_the_curves_over_the_size_of_the_network():
    """Each gain is drawn at its number of parameters, which the axis names beside the training accuracy of CE."""
    (axes,) = size_curves({28_000: CE + DCP, 320_000: CE}, {"ours": Row("DCP")}, "a title").axes
    assert lines(axes) == {"ours": [[pytest.approx(28_000), pytest.approx(1.0)]]}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["28 k\nCE fits\n100 %", "320 k\nCE fits\n100 %"]


def test_the_forest_has_a_line_for_each_setting():
    better = [one | {"accuracy": {"model": one["accuracy"]["model"] + 0.01}} for one in DCP]
    settings = {"none": CE, "some, 5 images": CE + DCP, "more": CE + better}
    (axes,) = forest({"some, 5 images": CE + DCP, "none": CE}, {"ours": Row("DCP")}, "a title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["some,\n5 images", "none"]
    ((x, y),) = lines(axes)["ours"]
    assert (x, y) == (pytest.approx(1.0), 1.0)
    (bar,) = axes.containers[0].lines[2][0].get_segments()
    assert bar[:, 0].tolist() == pytest.approx([1 - 2 / math.sqrt(3), 1 + 2 / math.sqrt(3)])
    assert by_gain(settings, Row("DCP")) == ["more", "some, 5 images", "none"]


def test_the_command_draws_what_has_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "committed")
    for name in ("length-kanji-4k", "pays-debian", "size-scripts-xs"):
        for one in CE + DCP:
            records.append(one, tmp_path / f"{name}.jsonl")
    command.main(["plot", "--results", str(tmp_path), "--images", str(tmp_path / "images")])
    drawn = [tmp_path / "images" / f"{name}.png" for name in ("length-kanji", "size-scripts", "pays")]
    assert sorted((tmp_path / "images").iterdir()) == sorted(drawn)
    assert capsys.readouterr().out.split() == [str(path) for path in drawn]


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_table_over_experiments_by_hand():
    head, _, *lines = cells(by_experiment({"4k": CE + DCP, "16k": CE, "64k": []}, {"ours": Row("DCP")}))
    assert head == ["", "4k", "16k", "64k"]
    assert lines == [
        ["CE, training images, %", "100.00 ± 0.00", "100.00 ± 0.00", ""],
        ["CE, test images, %", "82.00 ± 1.15", "82.00 ± 1.15", ""],
        ["ours, minus CE", "+1.00 ± 0.58", "", ""],
    ]


def test_a_column_of_all_pairs_has_p_values_for_the_rows():
    """Two rows, of which one has no spread and so no p: nothing to correct."""
    rows = {"ours": Row("DCP"), "average": Row("CE", EMA)}
    head, _, *lines = cells(by_experiment({"4k": CE + DCP}, rows, {"both": [CE + DCP, CE + DCP]}))
    assert head == ["", "4k", "both", "p"]
    p = gain_in_all([CE + DCP, CE + DCP], Row("DCP"), Row("CE")).p
    assert [line[2:] for line in lines] == [["", ""], ["", ""], ["+1.00 ± 0.37", f"{p:.3f}"], ["+1.00 ± 0.00", ""]]


def test_the_p_values_of_a_table_are_corrected_for_all_of_it():
    """Without correction each is 0.2254: of two, both count twice. Without a spread there is no p to correct."""
    rows = {"ours": Row("DCP"), "average": Row("CE", EMA)}
    head, _, *lines = cells(by_setting({"some": CE + DCP, "same": CE + DCP}, rows))
    assert head == ["", "CE, %", "ours, minus CE", "p", "average, minus CE", "p", "seeds"]
    p = 2 * (1 - math.sqrt(3 / 5))
    for title, line in zip(("some", "same"), lines, strict=True):
        assert line == [title, "82.00 ± 1.15", "+1.00 ± 0.58", f"{p:.3f}", "+1.00 ± 0.00", "", "3"]


def test_bold_gains_count_as_shown():
    better = [record("DCP", seed, 0.01 * seed + 0.9) for seed in range(3)] + [
        record("CE", seed, 0.01 * seed + 0.0001 * seed**2) for seed in range(3)
    ]
    _, _, *lines = cells(by_setting({"some": CE + DCP, "more": better}, {"ours": Row("DCP")}, bold=True))
    assert [line[2:] for line in lines] == [["+1.00 ± 0.58", "3"], ["**+89.98 ± 0.01**", "3"]]


def test_the_table_over_measures_by_hand():
    _, _, *lines = cells(by_measure(CE + DCP, {"ours": Row("DCP")}, ["NLL", "ECE, %"]))
    assert lines == [["CE", "1.000 ± 0.000", "5.00 ± 0.00"], ["ours, minus CE", "-0.100 ± 0.000", "+0.00 ± 0.00"]]
