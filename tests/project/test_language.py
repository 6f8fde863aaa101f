"""No page, docstring or message has these phrases: fillers, metaphors, and verbs of people for code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
FILES += sorted(ROOT.glob("dcl_optim/**/*.py"))
AVOIDED = re.compile(
    r"\b(of its own|of your own|says so|likewise|takes no part|such as it is|as it is|as it was|knobs?|its kin"
    r"|is served|wins|pays(?!-)|takes away|holds to|runs? away|where there is none|none such|where to go on"
    r"|apart from)\b|# questions",
    re.IGNORECASE,
)


def text(path: Path) -> str:
    """A page without comments and targets of links, or the strings of a module; on one line."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        constants = (node.value for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Constant))
        content = "\n".join(value for value in constants if isinstance(value, str))
    return " ".join(re.sub(r"<!--.*?-->|\]\([^)]*\)", "]", content, flags=re.DOTALL).split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_to_avoid(path: Path) -> None:
    words = text(path)
    assert [words[max(0, hit.start() - 40) : hit.end() + 20] for hit in AVOIDED.finditer(words)] == []
