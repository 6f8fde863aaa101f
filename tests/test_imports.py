"""Who imports what (layers, and what is private in torch, CPython or here), and how much is where."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from graphlib import TopologicalSorter
from pathlib import Path

import torch

from dcl_optim import DCPOptimizer
from dcl_optim.forecaster import Forecaster
from dcl_optim.forward import Forward
from tests.helpers import CLASSES, mlp, one, sgd, train
from tests.test_public_api import PAGES

ROOT = Path(__file__).parent.parent
PATHS = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "dcl_optim").rglob("*.py")}
FILES = {name.removesuffix(".__init__"): path for name, path in sorted(PATHS.items())}
# From the top. A file or package imports from lower layers and from itself; _ stands for all files that begin with it.
ORDER = """
    __main__ | demo | plots | metrics dcl_optim | dcl dcp | optimizer | algorithm | batches companion prototypes
    | forecaster | loss | weights | distances distributed forward schedules | reference _
"""
LAYER = {unit: depth for depth, units in enumerate(ORDER.split("|")) for unit in units.split()}
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!foreach_|_version__)|from torch[\w.]* import _|sys\._getframe|import dis\b|\._version\b"
    r"|\._modules\b|\._(compiled_)?call_impl|_(forward|backward)(_pre)?_hooks"
)


def unit(module: str) -> str:
    """The file or package right below dcl_optim in which a module lies."""
    _, name, *_ = [*module.split("."), "dcl_optim"]
    return "_" if name.startswith("_") and name != "__main__" else name


def imports(module: str) -> list[tuple[str, str]]:
    return imports_of(FILES[module])


def imports_of(path: Path) -> list[tuple[str, str]]:
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


def test_imports_go_down() -> None:
    wrong = []
    for module in FILES:
        own = unit(module)
        for target, name in imports(module):
            other = unit(target)
            down = other == own or LAYER[own] < LAYER[other]
            script = own in ("metrics", "plots", "demo", "__main__") and other != own
            if not down or (script and name not in getattr(importlib.import_module(target), "__all__", ())):
                wrong.append(f"{module} imports {target} {name}")
    assert not wrong


def test_no_circle() -> None:
    TopologicalSorter({module: {target for target, _ in imports(module)} for module in FILES}).prepare()


def test_private_apis_are_in_one_file() -> None:
    texts = {module: path.read_text() for module, path in FILES.items() if module != "dcl_optim._torch"}
    assert not [(module, found[0]) for module in texts for found in PRIVATE.finditer(texts[module])]


def test_a_private_module_is_imported_by_one_test_file_at_most() -> None:
    """Public is what the API pages have. So a change behind it changes one file of tests."""
    pages = "".join(page.read_text() for page in PAGES)
    documented = set(re.findall(r"^::: (\S+)", pages, re.MULTILINE))
    # The written-out algorithm, the one question that many tests force an answer to, and what a benchmark measures.
    read_by_many = {"dcl_optim.reference", "dcl_optim._sync", "dcl_optim.prototypes.Prototypes"}
    public = documented | read_by_many | {"dcl_optim"}
    importers: dict[str, set[str]] = {}
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/test_*.py")]:
        for module, name in imports_of(path):
            if module not in public and f"{module}.{name}" not in public:
                importers.setdefault(module, set()).add(str(path.relative_to(ROOT)))
    assert importers, "none would mean that they are not found"
    assert {module: files for module, files in importers.items() if len(files) > 1} == {}


# ---- how much is where -----------------------------------------------------------------------------------------------


def test_the_algorithm_is_as_short_as_the_papers_box_allows() -> None:
    assert len(FILES["dcl_optim.algorithm"].read_text().splitlines()) <= 200


def test_the_core_does_not_grow() -> None:
    """Whoever adds to it takes something out. The aim is 4,500 lines."""
    core = [path for name, path in FILES.items() if name.split(".")[1:2] not in (["demo"], ["metrics"], ["plots"])]
    assert sum(len(path.read_text().splitlines()) for path in core) <= 5_243


def test_a_forecaster_has_to_define_six_methods_and_may_define_eight() -> None:
    methods = {name for name, value in vars(Forecaster).items() if inspect.isfunction(value)}
    required = Forecaster.__abstractmethods__
    assert len(required) <= 6
    assert len(methods - required) <= 8


def test_objects_have_few_attributes() -> None:
    model = mlp()
    optimizer = DCPOptimizer(sgd(model), model, CLASSES)
    train(model, optimizer, [one()])
    algorithm = optimizer._algorithm
    for found in (algorithm, algorithm.loss, algorithm.batches, algorithm.hooks):
        assert len(vars(found)) <= 16, type(found)
    assert len(vars(Forward(torch.zeros(2, 3), 1))) <= 10
