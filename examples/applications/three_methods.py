"""Plain training, DCL and DCP side by side."""

from __future__ import annotations

from examples.applications.comparison import Row

METHODS = ("plain", "dcl", "dcp")
ROWS = {
    "plain": Row({"method": "plain"}),
    "DCL": Row({"method": "dcl"}, against="plain"),
    "DCP": Row({"method": "dcp"}, against="plain"),
}


def check_method(method: str) -> None:
    """ValueError for a method that is none of the three."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
