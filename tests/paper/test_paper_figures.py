"""The figures' command: what it sees after every epoch, and that its images and its file hold just that."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from dcl_optim import metrics
from examples.paper import __main__ as command
from examples.paper.configuration import Configuration, Experiment
from examples.paper.experiments import EXPERIMENTS
from examples.paper.figures import watch
from examples.paper.measures import spread
from examples.paper.trainer import Run

TINY = Configuration("digits", "small-cnn", "plain", epochs=4, train_size=60, batch_size=20, lr=0.05)
CPU = torch.device("cpu")


def test_a_watched_run_is_the_run_that_nobody_watches():
    watched = watch(Run(TINY, 3, CPU), "validation")
    run, logits = Run(TINY, 3, CPU), []
    for epoch in range(4):
        run.train_epoch()
        _, z, y = next(run.logits("validation"))
        logits.append(z)
        assert watched.accuracy[epoch] == pytest.approx(float((z.argmax(1) == y).float().mean()))
        assert watched.accuracy[epoch] == pytest.approx(run.figures("validation")["accuracy"]["model"])
        assert watched.spread["within"][epoch] == pytest.approx(spread(z, y)["within"])
        assert watched.consistency[epoch] == pytest.approx(run.figures("validation")["consistency"]["model"])
    distances = [(after - before).norm(dim=1).mean() for before, after in itertools.pairwise(logits)]
    assert watched.drift == pytest.approx([float(d) for d in distances], rel=1e-5)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    experiment = Experiment("a test", "validation", 1, "CE", {"CE": TINY, "DCL": replace(TINY, method="dcl")})
    monkeypatch.setitem(EXPERIMENTS, "small", experiment)
    folders = [f"--{name}={tmp_path / name}" for name in ("results", "images", "checkpoints")]
    command.main(["figures", "small", "--threads", "1", "--device", "cpu", *folders])
    return tmp_path


def test_the_command_draws_all_and_writes_the_figures_by_epoch(drawn, monkeypatch):
    names = ("curves", "spread")
    assert sorted(path.name for path in (drawn / "images").iterdir()) == [f"small-{name}.png" for name in names]
    assert all((drawn / "images" / f"small-{name}.png").read_bytes()[:4] == b"\x89PNG" for name in names)
    found = json.loads((drawn / "results" / "figures-small.json").read_text())
    run = Run(replace(TINY, method="dcl"), 0, CPU)
    for _ in range(4):
        run.train_epoch()
    _, z, y = next(run.logits("train"))
    last = found["runs"]["DCL"][0]["consistency"][-1]
    assert last == pytest.approx(float(metrics.top_non_target_consistency(z, y).nanmean()))
    monkeypatch.setattr("examples.paper.figures.watch", None)  # a second time nothing is trained
    for path in (drawn / "images").iterdir():
        path.unlink()
    folders = [f"--{name}={drawn / name}" for name in ("results", "images", "checkpoints")]
    command.main(["figures", "small", "--threads", "1", "--device", "cpu", *folders])
    assert len(list((drawn / "images").iterdir())) == len(names)
    assert {len(history["top"]) for history in found["runs"]["CE"]} == {4}
    assert {len(history["drift"]) for history in found["runs"]["CE"]} == {3}
    assert found["versions"]["torch"]
