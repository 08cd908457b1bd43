"""The other leaf of the door: targets, labels and weights of validated sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d

from sklearn_mhla._backend import to_numpy
from sklearn_mhla._tokens import Sequences, n_dimensions


def check_targets(
    y: Any, sequences: Sequences, output: str, estimator_name: str = "MHLARegressor"
) -> tuple[np.ndarray, int]:
    """Validate ``y`` and lay it out as one row per predicted position.

    Parameters
    ----------
    y : array-like
        ``(n,)`` or ``(n, m)`` for ``output="last"``; ``(n, T)`` or ``(n, T, m)``, or a list of
        ``(T_i,)`` or ``(T_i, m)`` arrays, for ``output="sequence"``.
    sequences : Sequences
    output : {"last", "sequence"}
    estimator_name : str
        For error messages.

    Returns
    -------
    targets : ndarray of shape (rows, m)
        float64. ``rows`` is ``n`` or the total number of tokens.
    n_dims : int
        Dimensions of one row's target: 0 if scalar, 1 if a vector.
    """
    if y is None:
        raise ValueError(
            f"This {estimator_name} estimator requires y to be passed, but the target y is None."
        )
    n_samples = len(sequences)
    per_sample = "(n_samples,) or (n_samples, m)"
    if output == "last":
        targets = _check_numbers(y, "y")
        lead = 1
    elif _is_list_of_targets(y):
        if len(y) != n_samples:
            raise ValueError(
                f"Found input variables with inconsistent numbers of samples: X has {n_samples} "
                f"sequences, y has {len(y)} rows."
            )
        return _check_target_list(y, sequences)
    else:
        targets = _check_numbers(y, "y")
        lead = 2
        per_sample = "(n_samples, n_tokens) or (n_samples, n_tokens, m)"
    if targets.ndim not in (lead, lead + 1):
        raise ValueError(
            f"y has {targets.ndim} dimensions (shape {targets.shape}); output={output!r} needs "
            f"{per_sample}."
        )
    if targets.shape[0] != n_samples:
        raise ValueError(
            f"Found input variables with inconsistent numbers of samples: X has {n_samples} "
            f"sequences, y has {targets.shape[0]} rows."
        )
    if lead == 2 and (sequences.lengths != targets.shape[1]).any():
        wrong = int(np.flatnonzero(sequences.lengths != targets.shape[1])[0])
        raise ValueError(
            f"output='sequence' needs one target per token: sequence {wrong} has "
            f"{sequences.lengths[wrong]} tokens, but y has shape {targets.shape}."
        )
    n_dims = targets.ndim - lead
    width = targets.shape[-1] if n_dims else 1
    if width == 0:
        raise ValueError(f"y has no outputs (shape {targets.shape}); it needs at least one column.")
    return targets.reshape(-1, width), n_dims


def check_labels(y: Any, output: str, estimator_name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Validate the labels of a classifier and lay them out in one row.

    Parameters
    ----------
    y : array-like
        ``(n,)`` for ``output="last"``; ``(n, T)`` or a list of ``(T_i,)`` arrays for
        ``output="sequence"``.
    output : {"last", "sequence"}
    estimator_name : str
        For error messages.

    Returns
    -------
    labels : ndarray of shape (rows,)
    counts : ndarray of shape (n,) or None
        Labels per sequence, for ``output="sequence"``.

    Raises
    ------
    ValueError
        If they cannot be labels, or are not one per row.
    """
    if y is None:
        raise ValueError(
            f"This {estimator_name} estimator requires y to be passed, but the target y is None."
        )
    counts = None
    if output == "sequence":
        parts = [np.asarray(to_numpy(part)) for part in y]
        for i, part in enumerate(parts):
            if part.ndim != 1:
                raise ValueError(
                    f"output='sequence' needs one label per token: y[{i}] has shape {part.shape}, "
                    "expected (n_tokens,)."
                )
        labels, counts = np.concatenate(parts), np.array([len(part) for part in parts])
    else:
        labels = column_or_1d(to_numpy(y), warn=True)
    if not len(labels):
        raise ValueError("Found array with 0 sample(s): y is empty while at least 2 are required.")
    assert_all_finite(labels, input_name="y")
    check_classification_targets(labels)
    return labels, counts


def check_sample_weights(sample_weight: Any, n_samples: int) -> np.ndarray | None:
    """Validate one non-negative weight per sequence; None stays None.

    Raises
    ------
    ValueError
        If the length is wrong, a weight is negative or not finite, or all are zero.
    """
    if sample_weight is None:
        return None
    weights = _check_numbers(sample_weight, "sample_weight")
    if weights.ndim == 0:
        weights = np.full(n_samples, float(weights))
    if weights.shape != (n_samples,):
        raise ValueError(
            f"sample_weight.shape == {weights.shape}, expected ({n_samples},): one weight per "
            "sequence."
        )
    if (weights < 0).any():
        wrong = int(np.flatnonzero(weights < 0)[0])
        raise ValueError(
            f"sample_weight must not be negative; sample_weight[{wrong}] = {weights[wrong]}."
        )
    if not weights.any():
        raise ValueError("sample_weight is zero for every sample; at least one must be positive.")
    return weights


def _check_target_list(y: Sequence[Any], sequences: Sequences) -> tuple[np.ndarray, int]:
    parts = [_check_numbers(part, f"y[{i}]") for i, part in enumerate(y)]
    for i, part in enumerate(parts):
        if part.ndim not in (1, 2) or part.shape[1:] != parts[0].shape[1:] or 0 in part.shape[1:]:
            raise ValueError(
                f"Every element of y must be (n_tokens_i,) or (n_tokens_i, m) with one m, at least "
                f"1; element 0 has shape {parts[0].shape}, element {i} has shape {part.shape}."
            )
        if len(part) != sequences.lengths[i]:
            raise ValueError(
                f"output='sequence' needs one target per token: sequence {i} has "
                f"{sequences.lengths[i]} tokens, y[{i}] has {len(part)} rows."
            )
    joined = np.concatenate(parts)
    return joined.reshape(len(joined), -1), joined.ndim - 1


def _is_list_of_targets(y: Any) -> bool:
    """Whether y is a list, tuple or object array with one array per sequence."""
    if isinstance(y, np.ndarray):
        return y.dtype == object and y.ndim == 1 and len(y) > 0 and n_dimensions(y[0]) >= 1
    return isinstance(y, (list, tuple)) and len(y) > 0 and n_dimensions(y[0]) >= 1


def _check_numbers(values: Any, name: str) -> np.ndarray:
    """Return a finite float64 array of any number of dimensions."""
    values = to_numpy(values)
    if getattr(getattr(values, "dtype", None), "kind", "f") in "mM":
        raise ValueError(f"{name} holds dates or time differences; convert them to numbers first.")
    try:
        numbers: np.ndarray = check_array(
            values,
            dtype=np.float64,
            ensure_2d=False,
            allow_nd=True,
            ensure_min_samples=0,
            ensure_min_features=0,
            input_name=name,
        )
    except (TypeError, ValueError) as error:
        if f"Input {name} " in str(error):
            raise
        raise ValueError(f"{name} cannot be read as numbers: {error}") from error
    return numbers
