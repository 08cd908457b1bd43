"""Tables of the reproductions: as Markdown on the terminal, and in place in a page of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A pipe table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def replace_table(page: Path, name: str, table: str) -> None:
    """Put a table between ``<!-- table: NAME -->`` and the next ``<!-- end -->`` of a page."""
    pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, found = pattern.subn(lambda match: f"{match[1]}{table}\n{match[2]}", page.read_text())
    if not found:
        raise ValueError(f"{page} has no place '<!-- table: {name} -->' ... '<!-- end -->'.")
    page.write_text(text)
