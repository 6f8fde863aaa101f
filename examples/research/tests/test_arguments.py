"""What the scripts' command lines have in common."""

from __future__ import annotations

import pytest
import torch

from examples.research.arguments import Parser, add_device, number


@pytest.fixture
def parser():
    parser = Parser(prog="some")
    parser.add_argument("--count", type=number(int, 1))
    parser.add_argument("--share", type=number(float, 0, 1))
    parser.add_argument("--method", choices=("a", "b"))
    add_device(parser)
    return parser


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--count 0", "argument --count: 0 must be a finite number of at least 1"),
        ("--count 1.5", "argument --count: invalid int value: '1.5'"),
        ("--share 1.1", "argument --share: 1.1 must be a finite number of at least 0 and at most 1"),
        ("--share nan", "argument --share: nan must be a finite number of at least 0 and at most 1"),
        ("--share x", "argument --share: invalid float value: 'x'"),
        ("--other", "unrecognized arguments: --other"),
    ],
)
def test_errors_are_one_line(parser, capsys, arguments, message):
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(arguments.split())
    assert (raised.value.code, capsys.readouterr()) == (2, ("", f"some: error: {message}\n"))


def test_numbers_within_their_bounds_are_taken(parser):
    options = parser.parse_args(["--count", "1", "--share", "1"])
    assert (options.count, options.share) == (1, 1.0)
    assert (type(options.count), type(options.share)) == (int, float)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_device_that_is_not_there_is_an_error_of_one_line(parser, capsys, monkeypatch, error):
    def refuse(*size, device):
        raise error(f"no {device} here\nC++ stack")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--device", "cuda"])
    message = "some: error: argument --device: 'cuda' cannot be used here (no cuda here); cpu can\n"
    assert (raised.value.code, capsys.readouterr().err) == (2, message)
