"""List the examples that can be run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def commands(package: str, folder: Path) -> Iterator[str]:
    """Give a line for each module of a package that is a command. Nothing is imported."""
    files = {path.stem: path for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text("utf-8")}
    files |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    files.pop("__main__", None)
    width = max(map(len, files))
    for name in sorted(files):
        summary = (ast.get_docstring(ast.parse(files[name].read_text("utf-8"))) or "").partition("\n")[0]
        yield f"python -m {package}.{name:<{width}}  {summary}"


if __name__ == "__main__":
    print(*commands("examples", Path(__file__).parent), sep="\n")
