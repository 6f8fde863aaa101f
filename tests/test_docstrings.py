"""What is public is documented: every argument, with an example that runs (as a doctest) or a reference to one."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
WITHOUT_EXAMPLE = {"ForecastOptimizer", "Forecaster", "Stream"}  # abstract: docs/extending.md, and their subclasses


def named_on_the_page():
    """Objects of the API page: single ones, and all that a module has of its own."""
    for target, members in re.findall(r"^::: dcl_optim\.([\w.]*)(?:\n    options: \{(.*)\})?", PAGE, re.MULTILINE):
        path, _, name = f"dcl_optim.{target}".rpartition(".")
        single = getattr(importlib.import_module(path), name, None)
        if single is not None and not inspect.ismodule(single):
            yield single
            continue
        module = importlib.import_module(f"dcl_optim.{target}")
        chosen = re.search(r"members: \[([^\]]*)\]", members)
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = chosen.group(1).split(", ") if chosen else getattr(module, "__all__", own)
        yield from (getattr(module, key) for key in names if not key.startswith("_"))


PUBLIC = {found.__name__: found for found in named_on_the_page() if inspect.isclass(found) or inspect.isfunction(found)}


def document(name):
    """The docstring, and with it those that it refers to for its arguments."""
    text = inspect.getdoc(PUBLIC[name])
    assert text, name
    referred = [other for other in re.findall(r":\w+:`~?[\w.]*?(\w+)`", text) if other in PUBLIC]
    return "\n".join([text, *(inspect.getdoc(PUBLIC[other]) for other in referred)])


def test_the_page_has_what_the_package_exports():
    assert {"DCLOptimizer", "DCPOptimizer", "mse", "dcl_step", "training_curves", "RunningAverage"} <= PUBLIC.keys()
    assert len(PUBLIC) > 35


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_documented(name):
    entries = re.findall(r"^ +([\w, ]+): ", document(name), re.MULTILINE)
    assert set(inspect.signature(PUBLIC[name]).parameters) <= {word for entry in entries for word in entry.split(", ")}


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - WITHOUT_EXAMPLE))
def test_there_is_an_example(name):
    assert ">>> " in document(name)


@pytest.mark.parametrize("name", [name for name, found in PUBLIC.items() if inspect.isclass(found)])
def test_every_public_method_says_what_it_does(name):
    for key, member in vars(PUBLIC[name]).items():
        if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(getattr(PUBLIC[name], key)), key
