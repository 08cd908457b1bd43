"""Run the Python blocks of Markdown pages, each page in a namespace and a folder of its own.

A block that follows the line ``<!-- not run -->`` is left out. Warnings are errors.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

BLOCK = re.compile(r"(<!-- not run -->\n+)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_page(page: Path) -> int:
    """Run all blocks of a page in order; return how many there were."""
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__main__"}
    n_blocks = 0
    for skipped, code in BLOCK.findall(text):
        if skipped:
            continue
        line = text[: text.index(code)].count("\n")
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
        n_blocks += 1
    return n_blocks


def main() -> None:
    """Run the pages named on the command line."""
    warnings.simplefilter("error")
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            print(f"{page.name}: {run_page(page)} blocks ran", flush=True)


if __name__ == "__main__":
    main()
