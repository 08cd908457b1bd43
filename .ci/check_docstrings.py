"""Validate the docstring of every public object with numpydoc.

Public is what the ``__all__`` of a public module names, with its methods and properties as far as
they are defined in this package. Which checks run is set in pyproject.toml.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from numpydoc.validate import ERROR_MSGS, validate

PACKAGE = "sklearn_mhla"
INTERNAL = {"solvers"}  # users reach these through parameters of the estimators


def public_modules() -> Iterator[str]:
    """Names of the package and of its public modules."""
    yield PACKAGE
    for module in pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        parts = module.name.split(".")
        if not any(part.startswith("_") or part in INTERNAL for part in parts):
            yield module.name


def public_objects() -> Iterator[str]:
    """Import paths of all public classes, functions, methods and properties."""
    for module_name in public_modules():
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", []):
            path, value = f"{module_name}.{name}", getattr(module, name)
            if not callable(value):
                continue
            yield path
            if not inspect.isclass(value):
                continue
            for member in dir(value):
                attribute = inspect.getattr_static(value, member)
                function = getattr(attribute, "fget", getattr(attribute, "__func__", attribute))
                ours = str(getattr(function, "__module__", "")).startswith(PACKAGE)
                if ours and inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{path}.{member}"


def main() -> int:
    """Print all errors; return how many there are."""
    config = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["numpydoc_validation"]
    checks = set(config["checks"])
    if "all" in checks:
        checks = set(ERROR_MSGS) - checks
    paths = list(public_objects())
    n_errors = 0
    for path in paths:
        for code, message in validate(path)["errors"]:
            if code in checks:
                n_errors += 1
                print(f"{path}: {code} {message}")
    print(f"{len(paths)} public objects, {n_errors} errors")
    return n_errors


if __name__ == "__main__":
    sys.exit(main() > 0)
