"""Turn the docstrings' roles into what a browser shows, formulas as MathML, and mark what is not to be copied.

Docstrings carry torch's notation (``:math:`` and ``:class:``), which reads well in a terminal, and pages that of Git
hosts (blocks of math, and dollars). Formulas are translated while the site is built, so that no page loads anything
from elsewhere.
"""

from __future__ import annotations

import html
import re
from typing import Any

INLINE = re.compile(r":math:<code>(.*?)</code>", re.DOTALL)
BLOCK = re.compile(r"<p>\.\. math::\s*(.*?)</p>", re.DOTALL)
PAGE_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE_INLINE = re.compile(r"\$([^$`\n]+)\$")
REFERENCE = re.compile(r":(?:attr|class|func|meth|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>")
PROMPT_OR_OUTPUT = re.compile(r'<span class="(gp|go)">([^<]*)</span>')
LITERAL = re.compile(r"``([^`]+)``")


def _formula(latex: str, display: str) -> str:
    from latex2mathml.converter import convert  # the tests collect this file where the docs' extra is not installed

    source = html.unescape(re.sub(r"</?em>", "_", latex)).strip()
    if "\\\\" in source or "&" in source:
        source = r"\begin{align}" + source + r"\end{align}"
    return str(convert(source, display=display))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page's Markdown."""
    markdown = PAGE_BLOCK.sub(lambda found: f"<p>{_formula(found.group(1), 'block')}</p>", markdown)
    return PAGE_INLINE.sub(lambda found: _formula(found.group(1), "inline"), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    content = INLINE.sub(lambda found: _formula(found.group(1), "inline"), content)
    content = BLOCK.sub(lambda found: f"<p>{_formula(found.group(1), 'block')}</p>", content)
    # The style sheet shows them again: what it generates is not part of what the button copies.
    content = PROMPT_OR_OUTPUT.sub(r'<span class="\1" data-text="\2"></span>', content)
    return REFERENCE.sub(r"<code>\1</code>", content)
