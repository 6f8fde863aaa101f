"""The experiments' runner: runs that resume, results that are read back, tables that are computed by hand here."""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcl_optim import DCLOptimizer, DCPOptimizer
from examples.research import __main__ as command
from examples.research import datasets, jobs, methods, networks, records
from examples.research.configuration import DCL, DCP, Configuration, Experiment
from examples.research.experiments import EXPERIMENTS
from examples.research.table import markdown, paired, probability
from examples.research.trainer import Run, train
from tests.helpers import assert_same

TINY = Configuration("digits", "small-cnn", "plain", epochs=3, train_size=60, batch_size=20, lr=0.05)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_names_what_there_is(name):
    experiment = EXPERIMENTS[name]
    assert experiment.baseline in experiment.runs
    assert experiment.part in ("validation", "test", "both")
    for configuration in experiment.runs.values():
        assert configuration.data in datasets.NAMES
        assert configuration.network in networks.NAMES
        known = methods.METHODS[configuration.method].options()
        assert set(configuration.options) <= set(known)
        assert configuration.options.get("companion", "cnn") in networks.NAMES
        assert json.loads(json.dumps(configuration.as_dict())) == configuration.as_dict()


def test_the_rows_dcl_and_dcp_are_the_wrappers_defaults():
    """DCL's was run by the paper's distance, of which the default is the near part, and by the default alpha before."""
    for written, kind in ((DCL | {"distance": "mse", "alpha": 0.99}, DCLOptimizer), (DCP, DCPOptimizer)):
        arguments = inspect.signature(kind).parameters
        assert written == {name: arguments[name].default for name in written}


@pytest.mark.parametrize("method", ["plain", "dcl", "dcp", "cs-kd"])
def test_an_interrupted_run_ends_as_the_uninterrupted_one(method, tmp_path):
    configuration = replace(TINY, method=method, augmentation="crop", averages=(0.5, 0.9))
    whole = Run(configuration, 1, CPU)
    train(whole, tmp_path / "whole.pt")
    half = Run(configuration, 1, CPU)
    for _ in range(2):
        half.train_epoch()
    half.save(tmp_path / "half.pt")
    other = Run(configuration, 1, CPU)
    torch.manual_seed(99)
    train(other, tmp_path / "half.pt")
    assert_same(other.method.state_dict()["parts"], whole.method.state_dict()["parts"])
    assert_same(other.averages.state_dict(), whole.averages.state_dict())
    assert other.losses == whole.losses
    assert len(whole.losses) == 3


@pytest.mark.parametrize("method", ["plain", "dcl", "dcp"])
def test_a_network_in_bfloat16_has_the_same_weights_and_rounded_logits(method):
    wide, half = (Run(replace(TINY, method=method, precision=name), 0, CPU) for name in ("float32", "bfloat16"))
    assert_same(half.method.main.network.network, wide.method.main.network)
    (_, theirs, _), (_, ours, _) = (next(run.logits("validation")) for run in (wide, half))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)
    assert not torch.equal(ours, theirs)
    half.train_epoch()
    assert {parameter.dtype for parameter in half.method.main.network.parameters()} == {torch.float32}


def test_a_companion_is_named_and_a_schedule_too():
    options = {"companion": "cnn", "alpha": "running-average"}
    run = Run(replace(TINY, method="dcl", options=options), 0, CPU)
    run.train_epoch()
    assert sum(p.numel() for p in run.method.networks()["companion"].parameters()) == sum(
        p.numel() for p in networks.build("cnn", 10, (1, 8, 8)).parameters()
    )
    assert run.method.main.optimizer.logs()["alpha"] == 2 / 3  # (t-1)/t of the third step


def test_prototypes_are_frozen_after_the_first_epoch():
    run = Run(replace(TINY, method="dcp", options={"alpha": "frozen-after-first-epoch", "update": "batch"}), 0, CPU)
    alphas, held = [], []
    for _ in range(3):
        run.train_epoch()
        alphas.append(run.method.main.optimizer.logs()["alpha"])
        held.append(run.method.main.optimizer.prototypes)
    assert alphas == [0.97, 1.0, 1.0]
    assert held[0].any()
    assert torch.equal(held[0], held[1])
    assert torch.equal(held[0], held[2])


DRAWING = [("dcp", {"random_prototypes": 1.0}), ("plain", {"mixup": 0.2}), ("dcl", {"mixup": 0.2})]


@pytest.mark.parametrize(("method", "options"), [*((name, {}) for name in methods.NAMES), *DRAWING])
def test_runs_of_a_seed_start_from_the_same_weights_and_see_the_same_batches(method, options, monkeypatch):
    tiny = replace(TINY, augmentation="crop")
    plain, other = Run(tiny, 3, CPU), Run(replace(tiny, method=method, options=options), 3, CPU)
    assert_same(other.method.main.network.state_dict(), plain.method.main.network.state_dict())
    for run in (plain, other):
        step = run.method.step
        run.seen = []

        def recorded(*batch, step=step, seen=run.seen):
            seen.append([tensor.clone() for tensor in batch])
            return step(*batch)

        monkeypatch.setattr(run.method, "step", recorded)
        run.train_epoch()
        run.train_epoch()
    assert len(plain.seen) == 6
    assert_same(other.seen, plain.seen)


def test_figures_are_those_of_the_predictions():
    run = Run(replace(TINY, method="dcl"), 0, CPU)
    run.train_epoch()
    found = run.figures("validation")
    x, y = (torch.cat(column) for column in zip(*run.data.fixed("validation"), strict=True))
    for name in ("model", "companion"):
        network = run.method.networks()[name].eval()
        with torch.no_grad():
            assert found["accuracy"][name] == pytest.approx(float((network(x).argmax(1) == y).float().mean()))
    assert list(found["accuracy"]) == list(found["quality"]) == list(found["train_accuracy"])
    assert list(found["accuracy"]) == ["model", "companion", "mean of both"]
    assert 0 < found["consistency"]["model"] <= 1 <= found["perplexity"]["model"]


@pytest.mark.parametrize("method", ["plain", "dcl", "dcp"])
def test_averages_of_the_weights_are_predictors_and_leave_the_training_alone(method):
    tiny = replace(TINY, method=method, batch_size=60, epochs=6)  # a step an epoch: the first and the last are averaged
    run, without = Run(replace(tiny, averages=(0.0, 0.9)), 0, CPU), Run(tiny, 0, CPU)
    for _ in range(6):
        run.train_epoch()
        without.train_epoch()
    assert_same(run.method.state_dict()["parts"], without.method.state_dict()["parts"])
    found = {name: z for name, z, _ in run.logits("validation")}
    assert [name for name in found if "companion" not in name and "both" not in name] == [
        *("model", "EMA over 1 steps", "EMA over 10 steps")
    ]
    assert torch.equal(found["EMA over 1 steps"], found["model"])
    assert not torch.equal(found["EMA over 10 steps"], found["model"])


def test_averages_of_the_weights_are_updated_at_every_fifth_step_of_the_whole_training():
    run = Run(replace(TINY, averages=(0.9,)), 0, CPU)  # three steps an epoch
    counts = []
    for _ in range(3):
        run.train_epoch()
        counts.append(int(run.averages["EMA over 10 steps"].n_averaged))
    assert counts == [1, 2, 2]  # after the first and the sixth of nine


def test_label_noise_is_the_same_for_every_seed_and_of_the_training_part_alone():
    clean, *noisy = (Run(replace(TINY, label_noise=share), seed, CPU) for share, seed in ((0.0, 0), (0.3, 0), (0.3, 1)))
    labels = [torch.cat([y for _, y in run.data.fixed("train")]) for run in (clean, *noisy)]
    assert int((labels[0] != labels[1]).sum()) == 18  # of 60
    assert torch.equal(labels[1], labels[2])
    for part in ("validation", "test"):
        assert_same(list(clean.data.fixed(part)), list(noisy[0].data.fixed(part)))


def test_shots_and_their_wrong_labels_are_drawn_by_the_seed():
    drawn = replace(TINY, train_size=None, shots=3, label_noise=0.4)
    first, again, other = (Run(drawn, seed, CPU).data for seed in (0, 0, 1))
    (x, y), (_, same), (others, _) = (next(iter(data.fixed("train"))) for data in (first, again, other))
    assert first.train_size() == 3 * 10
    assert torch.equal(y, same)
    assert not torch.equal(x, others)
    right = torch.arange(10).repeat_interleave(3)
    wrong = [(next(iter(data.fixed("train")))[1] != right).nonzero().flatten().tolist() for data in (first, other)]
    assert len(wrong[0]) == len(wrong[1]) == 12
    assert wrong[0] != wrong[1]
    assert torch.equal(*(next(iter(data.fixed("test")))[0] for data in (first, other)))


def test_both_parts_are_those_that_are_measured_alone():
    run = Run(TINY, 0, CPU)
    run.train_epoch()
    both, *alone = (run.figures(part) for part in ("both", "validation", "test"))
    assert both["validation_accuracy"] == alone[0]["accuracy"] != alone[1]["accuracy"]
    assert both["accuracy"] == alone[1]["accuracy"]
    assert both.keys() == {"accuracy", "validation_accuracy", "seconds"}, "all that is published of such runs"
    assert "validation_accuracy" not in alone[0]
    assert "validation_accuracy" not in alone[1]


def test_label_noise_needs_a_data_set_in_memory(monkeypatch):
    monkeypatch.setattr(datasets, "load", lambda *arguments, **options: object())
    with pytest.raises(
        ValueError, match=r"label_noise=0.1, shots=None, pretrained=False are for data sets in memory, not digits"
    ):
        Run(replace(TINY, label_noise=0.1), 0, CPU)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"averages": (0.9, 1.0)}, r"averages=\(0.9, 1.0\) are decays in \[0, 1\), which 1.0 is not"),
        ({"averages": (-0.1,)}, r"which -0.1 is not"),
        ({"label_noise": 1.5}, r"label_noise=1.5 must be in \[0, 1\]"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown; choose one of sgd, adamw"),
        ({"pretrained": True}, "pretrained=True needs network='efficientnet-lite0', not 'small-cnn'"),
        ({"precision": "half"}, "precision='half' is unknown; choose one of float32, bfloat16"),
    ],
)
def test_what_a_run_cannot_have_is_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        Run(replace(TINY, **changed), 0, CPU)


# ---- the command ----------------------------------------------------------------------------------------------------

SMALL = Experiment("a test", "validation", 2, "CE", {"CE": TINY, "DCL": replace(TINY, method="dcl")})


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setitem(EXPERIMENTS, "small", SMALL)
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "committed")
    folders = ["--results", str(tmp_path / "results"), "--checkpoints", str(tmp_path / "runs"), "--threads", "1"]

    def execute(*arguments):
        command.main([*arguments, *folders, "--device", "cpu"])
        return records.read(tmp_path / "results" / f"{arguments[1]}.jsonl")

    return execute


def test_a_finished_run_is_not_made_again(small, monkeypatch):
    first = small("run", "small", "--only", "CE")
    assert [(r["label"], r["seed"], r["part"]) for r in first] == [("CE", 0, "validation"), ("CE", 1, "validation")]
    both = small("run", "small")
    assert both[:2] == first
    assert [(r["label"], r["seed"]) for r in both[2:]] == [("DCL", 0), ("DCL", 1)]
    monkeypatch.setattr(jobs, "finish", None)
    assert small("run", "small") == both


def test_a_run_whose_record_could_not_be_written_is_not_trained_again(small, monkeypatch, tmp_path):
    with monkeypatch.context() as broken:
        broken.setattr(records, "append", lambda record, path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            small("run", "small", "--only", "CE", "--seeds", "1")
    monkeypatch.setattr(Run, "train_epoch", None)
    assert [r["label"] for r in small("run", "small", "--only", "CE", "--seeds", "1")] == ["CE"]
    assert not [path for path in tmp_path.rglob("*.pt") if "data" not in path.parts]


def test_what_another_experiment_has_run_is_taken_from_there(small, tmp_path, monkeypatch):
    first = small("run", "small", "--only", "DCL")
    runs = {"plain": TINY, "the same": replace(TINY, method="dcl"), "other": replace(TINY, method="dcl", lr=0.01)}
    monkeypatch.setitem(EXPERIMENTS, "second", replace(SMALL, runs=runs))
    monkeypatch.setitem(EXPERIMENTS, "tested", replace(SMALL, part="test", runs=runs))
    made = []

    def finish(job, quiet):
        made.append((job.label, job.seed))
        return {"label": job.label, "seed": job.seed, "part": job.part, "configuration": job.configuration.as_dict()}

    monkeypatch.setattr(jobs, "finish", finish)
    found = small("run", "second")
    assert made == [("plain", 0), ("other", 0), ("plain", 1), ("other", 1)]
    assert [r for r in found if r["label"] == "the same"] == [r | {"label": "the same"} for r in first]
    made.clear()
    (tmp_path / "results" / "application-some.jsonl").write_text('{"label": "of no experiment"}\n')
    small("run", "tested")
    assert len(made) == 6


def test_a_run_that_the_repository_has_is_read_from_there_and_not_made_again(small, tmp_path, monkeypatch, capsys):
    first = small("run", "small", "--only", "CE")
    (tmp_path / "results").rename(tmp_path / "committed")
    assert [(r["label"], r["seed"]) for r in small("run", "small")] == [("DCL", 0), ("DCL", 1)]
    committed = records.read(tmp_path / "committed" / "small.jsonl")
    assert committed == first, "it is only read"
    command.main(["table", "small", "--results", str(tmp_path / "results")])
    rows = capsys.readouterr().out.splitlines()
    assert [(row.split(" | ")[0], row.split(" | ")[-1]) for row in rows[2:]] == [("| CE", "2 |"), ("| DCL", "2 |")]
    monkeypatch.setitem(EXPERIMENTS, "second", replace(SMALL, runs={"plain": TINY}))
    monkeypatch.setattr(jobs, "finish", None)
    assert small("run", "second") == [record | {"label": "plain"} for record in first]
    assert records.finished(tmp_path / "committed", "small.jsonl") == committed, "a folder that is both counts once"


def test_a_run_that_does_nothing_is_said_and_fresh_trains_what_is_committed(small, tmp_path, monkeypatch, capsys):
    small("run", "small")
    (tmp_path / "results").rename(tmp_path / "committed")
    capsys.readouterr()
    small("run", "small")
    assert re.search(
        r"small: all \d+ runs have results in .*committed or .*; --fresh trains them again", capsys.readouterr().err
    )
    assert not (tmp_path / "results").exists()
    assert len(small("run", "small", "--fresh")) == 4
    capsys.readouterr()
    monkeypatch.setattr(jobs, "finish", None)
    small("run", "small", "--fresh")
    assert "all 4 runs have results in" in capsys.readouterr().err


def test_nothing_is_written_into_the_pages_folders_unless_asked():
    options = command.parser().parse_args(["run", "length-kanji-4k"])
    assert {folder.parts[0] for folder in (options.results, options.checkpoints)} == {"runs"}
    assert command.parser().parse_args(["plot"]).images == Path("runs/images")


def test_two_processes_find_what_one_finds(small, tmp_path):
    one = small("run", "small", "--seeds", "1")
    (tmp_path / "results" / "small.jsonl").unlink()
    two = small("run", "small", "--seeds", "1", "--jobs", "2")
    keep = ("label", "seed", "accuracy", "quality")
    ordered = [sorted(([r[k] for k in keep] for r in found), key=str) for found in (one, two)]
    assert ordered[0] == ordered[1]


def test_results_of_another_configuration_are_not_mixed_in(small, monkeypatch, capsys):
    small("run", "small", "--seeds", "1", "--only", "CE")
    changed = replace(SMALL, runs={"CE": replace(TINY, lr=0.01)})
    monkeypatch.setitem(EXPERIMENTS, "small", changed)
    with pytest.raises(SystemExit):
        small("run", "small")
    assert "'CE', seed 0, are of another configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run", "the following arguments are required: experiment"),
        ("run smal", "unknown experiment 'smal'; did you mean small? `python -m examples.research list` names all"),
        ("table xyz", "unknown experiment 'xyz'; `python -m examples.research list` names all"),
        ("run small --seeds 0", "argument --seeds: 0 must be a finite number of at least 1"),
        ("run small --jobs 0", "argument --jobs: 0 must be a finite number of at least 1"),
        ("run small --threads 0", "argument --threads: 0 must be a finite number of at least 1"),
        ("run small --only CE DC", "argument --only: 'DC' is no row of small; choose from 'CE', 'DCL'"),
        ("run small --device abacus", "argument --device: 'abacus' cannot be used here"),
        ("table small --jobs 2", "unrecognized arguments: --jobs 2"),
        (
            "publish small",
            "small has no results yet; `python -m examples.research run small` makes them",
        ),
    ],
)
def test_errors_are_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setitem(EXPERIMENTS, "small", SMALL)
    with pytest.raises(SystemExit) as raised:
        command.main(arguments.split())
    out, err = capsys.readouterr()
    assert (raised.value.code, out, err.count("\n")) == (2, "", 1)
    assert f"error: {message}" in err or f"error: argument experiment: {message}" in err


def test_the_list_names_all(capsys):
    command.main(["list"])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(EXPERIMENTS)


# ---- the files and the tables ---------------------------------------------------------------------------------------


def test_a_line_cut_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "some.jsonl"
    records.append({"seed": 0}, path)
    with path.open("a") as file:
        file.write('{"seed": 1, "acc')
    assert records.read(path) == [{"seed": 0}]
    records.append({"seed": 2}, path)
    assert records.read(path) == [{"seed": 0}, {"seed": 2}]


def test_what_is_published_has_no_losses_and_one_average_and_counts_as_the_run(small, tmp_path, monkeypatch, capsys):
    averaged = {"model": 0.9, "EMA over 100 steps": 0.8, "EMA over 1000 steps": 0.7}
    record = {"label": "CE", "seed": 0, "part": "test", "configuration": TINY.as_dict(), "accuracy": averaged}
    records.append(record | {"losses": [1.0], "corrupted": {"blur": averaged}}, tmp_path / "results" / "small.jsonl")
    (tmp_path / "committed").mkdir()
    for _ in range(2):  # again, from both folders
        command.main(["publish", "small", "--results", str(tmp_path / "results")])
        (found,) = records.read(tmp_path / "committed" / "small.jsonl")
        kept = {"model": 0.9, "EMA over 100 steps": 0.8}
        assert found == record | {"accuracy": kept, "corrupted": {"blur": kept}}
        assert capsys.readouterr().out.strip() == str(tmp_path / "committed" / "small.jsonl")
    (tmp_path / "results" / "small.jsonl").unlink()
    monkeypatch.setattr(jobs, "finish", None)
    assert small("run", "small", "--only", "CE", "--seeds", "1") == []


def test_runs_that_choose_values_are_published_into_one_compressed_file(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "committed")
    records.COMMITTED.mkdir()
    made = {name: [{"label": name, "seed": seed, "part": "both"} for seed in (0, 1)] for name in ("a", "b")}
    for name, both in made.items():
        for one in both:
            records.append(one, tmp_path / f"{name}.jsonl")
        assert records.publish(tmp_path, f"{name}.jsonl") == records.COMMITTED / records.CHOICES
    again = made["a"][0] | {"seed": 2}
    records.append(again, tmp_path / "a.jsonl")
    records.publish(tmp_path, "a.jsonl")
    assert [path.name for path in records.COMMITTED.iterdir()] == [records.CHOICES]
    assert records.read(records.COMMITTED / "a.jsonl") == [*made["a"], again]
    assert records.finished(tmp_path / "none", "b.jsonl") == made["b"]


def test_of_runs_that_choose_values_the_accuracies_are_published():
    record = {"label": "CE", "part": "both", "accuracy": {"model": 0.9}, "validation_accuracy": {"model": 0.8}}
    assert records.as_published(record | {"quality": {"nll": 1.0}, "perplexity": {}}) == record
    other = record | {"part": "test", "quality": {"nll": 1.0}}
    assert records.as_published(other) == other


def test_a_broken_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"seed": 0}\n{"see\n{"seed": 2}\n')
    with pytest.raises(ValueError, match="line 2: no record"):
        records.read(path)


def record(label, seed, accuracy, **others):
    figures = {"accuracy": {"model": accuracy, **others}, "consistency": {"model": 0.5}, "perplexity": {"model": 2.0}}
    return {"label": label, "seed": seed, "seconds": 10.0 + seed, **figures}


def test_the_table_is_the_one_computed_by_hand():
    """CE 80, 82, 84; DCL 81, 84, 84: differences 1, 2, 0, their mean 1 ± 1/sqrt 3, t = sqrt 3 with 2 degrees."""
    found = [record("CE", seed, value) for seed, value in enumerate((0.80, 0.82, 0.84))]
    found += [record("DCL", seed, value, companion=0.5) for seed, value in enumerate((0.81, 0.84, 0.84))]
    rows = markdown(SMALL, found).splitlines()
    assert rows[0].split(" | ")[1] == "accuracy, %"
    assert rows[2] == "| CE | 82.00 ± 1.15 |  |  |  | 0.500 | 2.00 | 11 | 3 |"
    p = 1 - math.sqrt(3 / 5)  # of a t of sqrt 3 with 2 degrees of freedom, both tails: 1 - t / sqrt(2 + t²)
    assert rows[3] == f"| DCL | 83.00 ± 1.00 | +1.00 ± 0.58 | {p:.3f} | companion 50.00 | 0.500 | 2.00 | 11 | 3 |"


def test_equal_differences_have_no_p():
    """0.3 more each time, but for rounding: without a spread the test has nothing to say."""
    theirs = {seed: record("CE", seed, value) for seed, value in enumerate((0.1, 0.7, 0.9))}
    ours = {seed: record("DCL", seed, value + 0.003) for seed, value in enumerate((0.1, 0.7, 0.9))}
    assert probability(paired(ours, theirs)) is None
