"""Who imports what: the layers of the package, and what is private in torch, CPython or here."""

import ast
import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path

from tests.project.test_public_api import PAGES

ROOT = Path(__file__).parents[2]
PATHS = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "dcl_optim").rglob("*.py")}
FILES = {name.removesuffix(".__init__"): path for name, path in sorted(PATHS.items())}
# From the top. A file or folder imports from lower layers and from itself. distances, layout, outputs and pull are the
# documented places of what lies in folders; the package itself does not import them.
ORDER = """
    __main__ | demo | trial | dcl_optim | dcl dcp distances layout outputs pull | optimizer | algorithm
    | companion guards prototypes | prototypes.labels loss penalty.weights | forecaster | progress penalty.pull
    | penalty.distances | pytorch | penalty penalty.layout
"""
LAYER = {unit: depth for depth, units in enumerate(ORDER.split("|")) for unit in units.split()}
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!foreach_|_version__)|from torch[\w.]* import _|sys\._getframe|import dis\b"
    r"|(?<!self)\._(version|modules)\b|\._(compiled_)?call_impl|_(forward|backward)(_pre)?_hooks"
)


def unit(module):
    """The file or folder below dcl_optim that ``ORDER`` has a module in."""
    names = module.split(".")[1:3] or ["dcl_optim"]
    return ".".join(names) if ".".join(names) in LAYER else names[0]


def imports_of(path):
    """What a file imports from the package, anywhere in it: modules, and names of modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            found += [(inner, "") if inner in FILES else (str(node.module), name) for inner, name in names]
    return [(target, name) for target, name in found if target.partition(".")[0] == "dcl_optim"]


def test_imports_go_down():
    wrong = []
    for module, path in FILES.items():
        own = unit(module)
        for target, name in imports_of(path):
            other = unit(target)
            down = other == own or LAYER[own] < LAYER[other]
            script = own in ("trial", "demo", "__main__") and other != own
            if not down or (script and name not in getattr(importlib.import_module(target), "__all__", ())):
                wrong.append(f"{module} imports {target} {name}")
    assert not wrong


def test_the_guards_are_asked_by_the_algorithm_alone():
    modules = {module for module, path in FILES.items() for target, _ in imports_of(path) if unit(target) == "guards"}
    assert {module for module in modules if unit(module) != "guards"} == {"dcl_optim.algorithm"}


def test_no_circle():
    TopologicalSorter({name: {target for target, _ in imports_of(path)} for name, path in FILES.items()}).prepare()


def test_private_apis_are_in_one_file():
    texts = {module: path.read_text() for module, path in FILES.items() if module != "dcl_optim.pytorch.internals"}
    assert not [(module, found[0]) for module in texts for found in PRIVATE.finditer(texts[module])]


def test_a_private_module_is_imported_by_one_test_file_at_most():
    """Public is what the API pages have. So a change behind it changes one file of tests."""
    pages = "".join(page.read_text() for page in PAGES)
    documented = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    # The question that some tests force an answer to; and what the adversary compares with the truth.
    read_by_many = {"dcl_optim.pytorch.synchronization", "dcl_optim.loss.reader"}
    public = documented | read_by_many | {"dcl_optim"}
    importers = {}
    for path in ROOT.glob("tests/**/*.py"):
        for module, name in imports_of(path):
            if module not in public and f"{module}.{name}" not in public:
                importers.setdefault(module, set()).add(str(path.relative_to(ROOT)))
    assert importers, "none would mean that they are not found"
    assert {module: files for module, files in importers.items() if len(files) > 1} == {}
