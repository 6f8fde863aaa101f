"""Plain training, DCL and DCP side by side."""

from __future__ import annotations

from examples.research.applications.comparison import Row

ROWS = {
    "plain": Row({"method": "plain"}),
    "DCL": Row({"method": "dcl"}, against="plain"),
    "DCP": Row({"method": "dcp"}, against="plain"),
}
