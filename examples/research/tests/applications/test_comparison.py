"""The applications' runner: what is run, what is not run again, and the table by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from examples.research import records
from examples.research.applications.comparison import Application, Row, main, parser, run, table

CALLS: list[tuple[str, int]] = []
SCORES = {"KD": (60.0, 62.0, 64.0), "KD, DCL": (61.0, 64.0, 64.0), "CE": (50.0, 50.0, 50.0)}


def pretend(*, seed, device, progress, method, epochs):
    """A training of no time."""
    progress("epoch 1")
    CALLS.append((method, seed))
    return SCORES[method][seed] + epochs


ROWS = {
    "CE": Row({"method": "CE"}),
    "KD": Row({"method": "KD"}, against="CE"),
    "KD, DCL": Row({"method": "KD, DCL"}, against="KD"),
}
PRETENDED = Application("pretended", "accuracy, %", pretend, ROWS, {"epochs": 0})


@pytest.fixture
def options(tmp_path):
    CALLS.clear()

    def parsed(*arguments):
        return parser(PRETENDED, "A test.\nMore.").parse_args([*arguments, "--results", str(tmp_path)])

    return parsed


def test_rows_of_a_seed_come_together_and_are_made_once(options):
    found = run(PRETENDED, options("--seeds", "2"))
    assert [(label, seed) for seed in (0, 1) for label in ROWS] == CALLS
    assert [r["score"] for r in found] == [50.0, 60.0, 61.0, 50.0, 62.0, 64.0]
    assert run(PRETENDED, options("--seeds", "3"))[:6] == found
    assert len(CALLS) == 9


def test_runs_that_the_repository_has_are_read_from_there_and_fresh_trains_them(options, tmp_path, monkeypatch, capsys):
    first = run(PRETENDED, options("--seeds", "1"))
    (tmp_path / "committed").mkdir()
    (tmp_path / "application-pretended.jsonl").rename(tmp_path / "committed" / "application-pretended.jsonl")
    monkeypatch.setattr(records, "COMMITTED", tmp_path / "committed")
    found = run(PRETENDED, options("--seeds", "2"))
    assert found[:3] == first
    assert len(CALLS) == len(found) == 6
    assert found[3:] == records.read(tmp_path / "application-pretended.jsonl")
    capsys.readouterr()
    assert run(PRETENDED, options("--seeds", "2")) == found
    said = f"pretended: all 6 runs have results in {records.COMMITTED} or {tmp_path}; --fresh trains them again\n"
    assert (len(CALLS), capsys.readouterr().err) == (6, said)
    fresh = run(PRETENDED, options("--seeds", "1", "--fresh"))
    assert len(CALLS) == 9
    assert run(PRETENDED, options("--seeds", "1", "--fresh")) == fresh
    assert len(CALLS) == 9
    assert parser(PRETENDED, "A test.").parse_args([]).results == Path("runs/results")


def test_other_settings_are_other_runs(options):
    run(PRETENDED, options("--seeds", "1"))
    found = run(PRETENDED, options("--seeds", "1", "--epochs", "5", "--only", "KD"))
    assert [(r["label"], r["configuration"], r["score"]) for r in found] == [
        ("KD", {"epochs": 5, "method": "KD"}, 65.0)
    ]


def test_a_row_may_have_another_value_of_a_setting(options):
    rows = ROWS | {"long KD": Row({"method": "KD", "epochs": 7})}
    found = run(Application("pretended", "accuracy, %", pretend, rows, {"epochs": 0}), options("--seeds", "1"))
    assert [(r["label"], r["score"]) for r in found][-1] == ("long KD", 67.0)


def test_the_table_is_the_one_computed_by_hand(options):
    """KD, DCL minus KD: 1, 2, 0; their mean 1 ± 1/sqrt 3, t = sqrt 3 with 2 degrees of freedom: p = 0.225."""
    found = [r | {"seconds": 2.0 + r["seed"]} for r in run(PRETENDED, options())]
    assert table(PRETENDED, found).splitlines()[2:] == [
        "| CE | 50.00 ± 0.00 |  |  | 3 | 3 |",
        "| KD | 62.00 ± 1.15 | +12.00 ± 1.15 | 0.009 | 3 | 3 |",
        "| KD, DCL | 63.00 ± 1.00 | +1.00 ± 0.58 | 0.225 | 3 | 3 |",
    ]


def test_a_row_that_was_not_run_is_left_out(options):
    assert "KD, DCL" not in table(PRETENDED, run(PRETENDED, options("--only", "CE", "KD")))


def test_the_command_prints_the_table_and_names_errors(tmp_path, capsys):
    main(PRETENDED, "A test.", ["--seeds", "1", "--results", str(tmp_path)])
    assert "| KD, DCL | 61.00 | +1.00 |  |" in capsys.readouterr().out
    assert {r["torch"] for r in (r["versions"] for r in records.read(tmp_path / "application-pretended.jsonl"))}

    def fail(**_):
        raise ValueError("folder=/nowhere has no images")

    with pytest.raises(SystemExit):
        main(Application("failing", "accuracy, %", fail, ROWS, {}), "A test.", ["--results", str(tmp_path)])
    assert "folder=/nowhere has no images" in capsys.readouterr().err


BOUNDED = Application(
    "a-test", "%", pretend, ROWS, {"epochs": 1, "workers": 0, "lr": 0.1, "part": "test"}, {"workers": (0, 8)}
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seeds 0", "argument --seeds: 0 must be a finite number of at least 1"),
        ("--threads 0", "argument --threads: 0 must be a finite number of at least 1"),
        ("--epochs 0", "argument --epochs: 0 must be a finite number of at least 1"),
        ("--workers -1", "argument --workers: -1 must be a finite number of at least 0 and at most 8"),
        ("--lr -0.1", "argument --lr: -0.1 must be a finite number of at least 0"),
        ("--part dev", "argument --part: invalid choice: 'dev' (choose from "),
        ("--only CE DKD", "argument --only: invalid choice: 'DKD' (choose from "),
        ("--device abacus", "argument --device: 'abacus' cannot be used here ("),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(BOUNDED, "A test.", arguments.split())
    out, err = capsys.readouterr()
    assert (raised.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"python -m examples.research.applications.a_test: error: {message}")


def test_the_lowest_values_are_taken():
    found = parser(BOUNDED, "A test.").parse_args(["--epochs", "1", "--workers", "0", "--lr", "0", "--seeds", "1"])
    assert (found.epochs, found.workers, found.lr, found.part) == (1, 0, 0.0, "test")


MODULES = ("augmentations", "dense", "distillation.__main__", "fine_tuning", "masked_autoencoder.__main__")


@pytest.mark.parametrize("module", [*MODULES, "semi_supervised", "text"])
def test_the_defaults_are_within_the_bounds(module):
    application = importlib.import_module(f"examples.research.applications.{module}").APPLICATION
    assert application.name.replace("-", "_") == module.removesuffix(".__main__")
    assert set(application.bounds) <= set(application.settings)
    chosen = [
        f"--{name.replace('_', '-')}={value}" for name, value in application.settings.items() if value is not None
    ]
    found = vars(parser(application, "").parse_args(chosen))
    assert {name: found[name] for name in application.settings} == application.settings
