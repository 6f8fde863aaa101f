"""What is public is documented: every argument, with an example that runs (as a doctest) or a reference to one."""

import inspect
import re
from pkgutil import resolve_name

from dcl_optim.distances import mse
from tests.project.test_public_api import documented

# Abstract, or what a forecaster gets and does not make; docs/dev/extending.md shows them.
WITHOUT_EXAMPLE = {"ForecastOptimizer", "Forecaster", "Forward", "Labels", "Pull"}


PUBLIC = {
    name.rpartition(".")[2]: found
    for name, found in ((name, resolve_name(name)) for name in documented())
    if inspect.isclass(found) or inspect.isfunction(found) or isinstance(found, type(mse))
}


def document(name):
    """The docstring, and with it those that it refers to for its arguments."""
    text = inspect.getdoc(PUBLIC[name])
    assert text, name
    referred = [other for other in re.findall(r":\w+:`~?[\w.]*?(\w+)`", text) if other in PUBLIC]
    return "\n".join([text, *(inspect.getdoc(PUBLIC[other]) for other in referred)])


def test_every_argument_is_documented():
    missing = []
    for name, found in PUBLIC.items():
        entries = re.findall(r"^ +([\w, ]+): ", document(name), re.MULTILINE)
        words = {word for entry in entries for word in entry.split(", ")}
        missing += [f"{name}({key})" for key in inspect.signature(found).parameters if key not in words]
    assert missing == []


def test_there_is_an_example():
    assert [name for name in PUBLIC.keys() - WITHOUT_EXAMPLE if ">>> " not in document(name)] == []


def test_every_public_method_says_what_it_does():
    silent = [
        f"{name}.{key}"
        for name, found in PUBLIC.items()
        if inspect.isclass(found)
        for key, member in vars(found).items()
        if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
        if not inspect.getdoc(getattr(found, key))
    ]
    assert silent == []
