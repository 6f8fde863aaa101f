"""The figure of the page on logging: it draws each run."""

from __future__ import annotations

from examples.research import logging_curves


def test_each_run_is_drawn(tmp_path, capsys):
    logging_curves.main(["--epochs", "2", "--out", str(tmp_path / "logging.png")])
    printed = capsys.readouterr().out
    keys = {line.partition("dcl/")[2].split()[0]: float(line.split()[-1]) for line in printed.splitlines()}
    assert keys.keys() == {"penalty", "agreement", "norm"}
    assert 0.1 < keys["agreement"] <= 1  # above chance; the companion is slow
    assert (tmp_path / "logging.png").read_bytes().startswith(b"\x89PNG")
