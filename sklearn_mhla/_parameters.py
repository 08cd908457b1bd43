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
    _check_choices(estimator, _CHOICES)
    _check_flags(estimator, ("fit_intercept", "causal", "early_stopping", "warm_start"))
    check_scalar(estimator.verbose, "verbose", Integral, min_val=0)
    for name in ("alpha", "learning_rate", "tol"):
        _check_not_negative(getattr(estimator, name), name)
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


def check_cv_parameters(estimator: Any) -> None:
    """As :func:`check_parameters`, for the cross-validated estimator."""
    shared = {name: _CHOICES[name] for name in ("heads", "output", "state")}
    _check_choices(estimator, {**shared, "method": ("auto", "primal", "dual")})
    _check_flags(estimator, ("fit_intercept", "causal", "alpha_per_target"))
    check_scalar(estimator.verbose, "verbose", Integral, min_val=0)
    _check_not_negative(estimator.tol, "tol")
    check_scalar(estimator.max_iter, "max_iter", Integral, min_val=1)
    if estimator.n_tokens is not None:
        check_scalar(estimator.n_tokens, "n_tokens", Integral, min_val=1)
    n_heads = estimator.n_heads
    counts = [n_heads] if n_heads is None or np.ndim(n_heads) == 0 else list(n_heads)
    if not counts:
        raise ValueError("n_heads is empty; it must be None, an integer or a list of these.")
    for count in counts:
        if count is not None:
            check_scalar(count, "n_heads", Integral, min_val=1)
    if estimator.alpha_per_target and counts != [None]:
        raise ValueError(
            "alpha_per_target=True needs n_heads=None, because outputs share the heads; got "
            f"n_heads={n_heads!r}."
        )
    if estimator.alphas is not None:
        _check_alphas(estimator.alphas, estimator.cv is None)
    if not (estimator.scoring is None or isinstance(estimator.scoring, str)) and not callable(
        estimator.scoring
    ):
        raise ValueError(
            f"scoring must be None, the name of a scorer or a callable; got {estimator.scoring!r}."
        )


def _check_alphas(alphas: Any, leave_one_out: bool) -> None:
    try:
        values = np.atleast_1d(np.asarray(alphas, dtype=np.float64))
    except (TypeError, ValueError):
        raise ValueError(f"alphas must be numbers; got {alphas!r}.") from None
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"alphas must be a non-empty 1-D array; got shape {values.shape}.")
    for index, value in enumerate(values):
        _check_not_negative(float(value), f"alphas[{index}]")
        if value == 0.0 and leave_one_out:
            raise ValueError(
                f"alphas[{index}] == 0, must be > 0 for leave-one-out (cv=None): without a penalty "
                "a sequence that alone determines a direction has no closed-form error. Remove "
                "it, or set cv, for example cv=5."
            )


def _check_choices(estimator: Any, choices: dict[str, tuple[str, ...]]) -> None:
    for name, allowed in choices.items():
        if getattr(estimator, name) not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, allowed))}; got "
                f"{getattr(estimator, name)!r}."
            )


def _check_flags(estimator: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(estimator, name), (bool, np.bool_)):
            raise ValueError(f"{name} must be True or False; got {getattr(estimator, name)!r}.")


def _check_not_negative(value: Any, name: str) -> None:
    check_scalar(value, name, Real, min_val=0.0)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}.")


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
