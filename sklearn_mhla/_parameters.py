"""Validation of the estimators' parameters, before any look at data."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_scalar

from sklearn_mhla.solvers import SOLVERS, SGDOptions

_CHOICES = {
    "solver": ("convex", "sgd"),
    "heads": ("minimal", "svd"),
    "penalty": ("l2", "nuclear"),
    "method": ("auto", *SOLVERS),
    "output": ("last", "sequence"),
    "state": ("sum", "mean"),
}


def check_parameters(estimator: Any) -> None:
    """Raise a ValueError or TypeError that names the first invalid parameter."""
    for name, choices in _CHOICES.items():
        if getattr(estimator, name) not in choices:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, choices))}; got "
                f"{getattr(estimator, name)!r}."
            )
    for name in ("fit_intercept", "causal", "early_stopping", "warm_start"):
        if not isinstance(getattr(estimator, name), (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False; got {getattr(estimator, name)!r}.")
    check_scalar(estimator.verbose, "verbose", Integral, min_val=0)
    for name in ("alpha", "learning_rate", "tol"):
        value = getattr(estimator, name)
        check_scalar(value, name, Real, min_val=0.0)
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite; got {value}.")
    for name in ("n_tokens", "n_heads", "max_iter", "batch_size", "n_iter_no_change"):
        if getattr(estimator, name) is not None or name not in ("n_tokens", "n_heads"):
            check_scalar(getattr(estimator, name), name, Integral, min_val=1)
    if estimator.method == "pivoted" and (
        estimator.n_heads is not None or estimator.penalty != "l2"
    ):
        raise ValueError(
            "method='pivoted' needs n_heads=None and penalty='l2'; got "
            f"n_heads={estimator.n_heads} and penalty={estimator.penalty!r}. Use method='auto'."
        )
    if estimator.penalty == "nuclear":
        if estimator.solver == "sgd" or estimator.n_heads is not None:
            raise ValueError(
                "penalty='nuclear' chooses the number of heads by its strength: it needs "
                f"solver='convex' and n_heads=None; got solver={estimator.solver!r} and "
                f"n_heads={estimator.n_heads}."
            )
        if estimator.alpha == 0.0:
            raise ValueError("penalty='nuclear' needs alpha > 0; got 0.")
    if estimator.learning_rate == 0.0:
        raise ValueError("learning_rate must be positive; got 0.")
    check_scalar(
        estimator.validation_fraction,
        "validation_fraction",
        Real,
        min_val=0.0,
        max_val=1.0,
        include_boundaries="neither",
    )


def sgd_options(estimator: Any, most_heads: int) -> SGDOptions:
    """What the SGD solver needs of an estimator; ``most_heads`` stands for no limit."""
    return SGDOptions(
        n_heads=most_heads if estimator.n_heads is None else estimator.n_heads,
        learning_rate=estimator.learning_rate,
        batch_size=estimator.batch_size,
        max_iter=estimator.max_iter,
        tol=estimator.tol,
        n_iter_no_change=estimator.n_iter_no_change,
        validation_fraction=estimator.validation_fraction if estimator.early_stopping else None,
        seed=int(check_random_state(estimator.random_state).randint(2**31 - 1)),
        verbose=bool(estimator.verbose),
    )
