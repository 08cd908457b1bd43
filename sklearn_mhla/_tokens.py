"""The one door for data: any accepted input becomes validated :class:`Sequences`.

Accepted are 2-D tables whose rows are flattened sequences (token-major), 3-D arrays
``(n_samples, n_tokens, token_dim)`` and lists of ``(n_tokens_i, token_dim)`` arrays; NumPy,
pandas, polars, memory maps and torch tensors. Input is never copied whole: it is kept as it
came and turned into contiguous float64 one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array, validate_data

from sklearn_mhla._backend import Array, Backend, tensor_device, to_numpy

_FLOAT_MAX = float(np.finfo(np.float64).max)
_FLOAT_TINY = float(np.finfo(np.float64).tiny)
_CHECK_ROWS = 2**20  # values looked at a time when a non-finite one is searched


@dataclass(frozen=True)
class Sequences:
    """Validated sequences of tokens, in the memory they came in.

    Attributes
    ----------
    data : array of shape (n, T, d), or list of n arrays of shape (T_i, d)
        Any real dtype; a torch tensor only when it lives on an accelerator.
    lengths : ndarray of shape (n,)
        Number of tokens of every sequence.
    token_dim : int
        ``d``.
    largest : float
        Largest absolute value of any coordinate.
    layout : {"flat", "array", "list"}
        The form the input had.
    device : str or None
        Device of the input when it was a torch tensor; results go back there.
    """

    data: Any
    lengths: np.ndarray
    token_dim: int
    largest: float
    layout: str
    device: str | None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether sequences differ in length."""
        return self.layout == "list" and bool((self.lengths != self.lengths[0]).any())

    def tokens(self, chosen: slice | np.ndarray, backend: Backend) -> Array:
        """The chosen sequences as contiguous float64 ``(n, T, d)``, zero-padded in front.

        A zero token in front adds nothing to any state and is never the query, so the
        padding is exact.
        """
        if self.layout != "list":
            return backend.asarray(self.data[chosen])
        members = self.data[chosen] if isinstance(chosen, slice) else [self.data[i] for i in chosen]
        lengths = self.lengths[chosen]
        longest = int(lengths.max())
        joined = np.concatenate(members).astype(np.float64, copy=False)
        if (lengths == longest).all():
            return backend.asarray(joined.reshape(len(lengths), longest, self.token_dim))
        padded = np.zeros((len(lengths), longest, self.token_dim))
        padded[np.arange(longest) >= longest - lengths[:, None]] = joined
        return backend.asarray(padded)

    def take(self, indices: np.ndarray) -> Sequences:
        """The chosen sequences only."""
        chosen = [self.data[i] for i in indices] if self.layout == "list" else self.data[indices]
        return replace(self, data=chosen, lengths=self.lengths[indices])


def check_sequences(
    X: Any,
    *,
    estimator: Any = None,
    n_tokens: int | None = None,
    token_dim: int | None = None,
    reset: bool = True,
) -> Sequences:
    """Validate ``X`` in any accepted form.

    Parameters
    ----------
    X : array-like, data frame, tensor or list of arrays
        See the module's description.
    estimator : estimator, optional
        Receives ``n_features_in_`` and ``feature_names_in_`` (``reset=True``) or is compared
        with them (``reset=False``).
    n_tokens : int, optional
        Tokens per row of a 2-D input; None means that a row is one token.
    token_dim : int, optional
        Required ``d``, known from an earlier fit.
    reset : bool, default=True
        Whether this is the first look at data (``fit``).

    Returns
    -------
    Sequences

    Raises
    ------
    ValueError
        If the input has the wrong width or number of dimensions, is empty, holds NaN,
        infinity or text, or if the cube of its largest value leaves the range of float64.
    """
    device = tensor_device(X)
    if device is not None and device.startswith("cuda"):
        sequences = _check_tensor(X, n_tokens, device)
    else:
        X = to_numpy(X)
        if _is_list_of_sequences(X):
            sequences = _check_list(X)
        elif np.ndim(X) == 3:
            sequences = _check_3d(X, device)
        else:
            sequences = _check_2d(X, estimator, n_tokens, reset, device)
    if sequences.layout != "flat" and estimator is not None and reset:
        estimator.n_features_in_ = sequences.token_dim
        if hasattr(estimator, "feature_names_in_"):  # left by an earlier fit on a data frame
            del estimator.feature_names_in_
    if token_dim is not None and sequences.token_dim != token_dim:
        hint = (
            f" A 2-D row is one token unless n_tokens is set; here n_tokens={n_tokens}."
            if sequences.layout == "flat"
            else " The number of tokens is free, their width is not."
        )
        raise ValueError(
            f"X has tokens of width {sequences.token_dim}, but this model was fitted on tokens of "
            f"width d={token_dim}.{hint}"
        )
    _check_cube(sequences)
    return sequences


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
    elif isinstance(y, (list, tuple)) and len(y) == n_samples and _is_ragged_targets(y):
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


def check_sample_weights(sample_weight: Any, n_samples: int) -> np.ndarray | None:
    """Validate one non-negative weight per sequence; None stays None.

    Raises
    ------
    ValueError
        If the length is wrong, a weight is negative or not finite, or all are zero.
    """
    if sample_weight is None:
        return None
    if np.ndim(sample_weight) == 0:
        weights = np.full(n_samples, float(sample_weight))
    else:
        weights = _check_numbers(sample_weight, "sample_weight")
    if weights.shape != (n_samples,):
        raise ValueError(
            f"sample_weight.shape == {weights.shape}, expected ({n_samples},): one weight per "
            "sequence."
        )
    if not np.isfinite(weights).all():
        raise ValueError("sample_weight contains NaN or infinity.")
    if (weights < 0).any():
        wrong = int(np.flatnonzero(weights < 0)[0])
        raise ValueError(
            f"sample_weight must not be negative; sample_weight[{wrong}] = {weights[wrong]}."
        )
    if not weights.any():
        raise ValueError("sample_weight is zero for every sample; at least one must be positive.")
    return weights


def _is_list_of_sequences(X: Any) -> bool:
    """A list, tuple or object array whose members are themselves 2-D."""
    if isinstance(X, np.ndarray):
        return X.dtype == object and X.ndim == 1 and len(X) > 0 and np.ndim(X[0]) == 2
    return isinstance(X, (list, tuple)) and len(X) > 0 and _ndim(X[0]) == 2


def _ndim(values: Any) -> int:
    """Dimensions of an array, frame, tensor or nested list, without converting it."""
    if hasattr(values, "shape"):
        return len(values.shape)
    if isinstance(values, (list, tuple)):
        return 1 + (_ndim(values[0]) if len(values) else 0)
    return 0


def _check_2d(
    X: Any, estimator: Any, n_tokens: int | None, reset: bool, device: str | None
) -> Sequences:
    try:
        if estimator is None:
            table = check_array(X, dtype="numeric", ensure_all_finite=False)
        else:
            table = validate_data(
                estimator, X, reset=reset, dtype="numeric", ensure_all_finite=False
            )
    except ValueError as error:
        column = _first_text_column(X)
        if column is None:
            raise
        raise ValueError(f"X holds text where numbers are needed, in {column}.") from error
    width = table.shape[1]
    n_tokens = 1 if n_tokens is None else n_tokens
    if width % n_tokens:
        raise ValueError(
            f"X has {width} columns, which n_tokens={n_tokens} does not divide; a row holds "
            "n_tokens tokens of equal width, one after the other."
        )
    names = _column_names(X)
    largest = _largest(table, lambda at: f"row {at[0]}, column {_quoted(names, at[1])}")
    # reshape, not a copy: a row's columns keep their stride
    data = table.reshape(len(table), n_tokens, width // n_tokens)
    lengths = np.full(len(table), n_tokens)
    return Sequences(data, lengths, width // n_tokens, largest, "flat", device)


def _check_3d(X: Any, device: str | None) -> Sequences:
    data = np.asarray(X)
    _require_real(data)
    if data.dtype == object:
        data = check_array(data, allow_nd=True, dtype=np.float64, ensure_all_finite=False)
    if 0 in data.shape:
        what = ("sample(s)", "token(s)", "feature(s)")[data.shape.index(0)]
        raise ValueError(
            f"Found array with 0 {what} (shape={data.shape}) while a minimum of 1 is required."
        )
    largest = _largest(data, lambda at: f"sequence {at[0]}, token {at[1]}, feature {at[2]}")
    lengths = np.full(data.shape[0], data.shape[1])
    return Sequences(data, lengths, data.shape[2], largest, "array", device)


def _check_list(X: Sequence[Any]) -> Sequences:
    device = tensor_device(X[0])
    data = [np.asarray(to_numpy(member)) for member in X]
    token_dim = data[0].shape[1] if data[0].ndim == 2 else -1
    for i, member in enumerate(data):
        if member.ndim != 2:
            raise ValueError(
                f"X is a list of sequences, so every element must be 2-D (n_tokens, token_dim); "
                f"element {i} has shape {member.shape}."
            )
        if len(member) == 0:
            raise ValueError(f"X holds an empty sequence: element {i} has 0 tokens.")
        if member.shape[1] != token_dim or token_dim == 0:
            raise ValueError(
                f"All sequences must have tokens of one width (at least 1): element 0 has width "
                f"{token_dim}, element {i} has width {member.shape[1]}."
            )
    kinds = {member.dtype for member in data}
    if any(kind.kind not in "buif" for kind in kinds):
        for i, member in enumerate(data):
            _require_real(member)
            if member.dtype.kind not in "buif":
                try:
                    data[i] = member.astype(np.float64)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"X[{i}] cannot be read as numbers: {error}") from error
    lengths = np.array([len(member) for member in data])
    ends = np.cumsum(lengths)
    largest = 0.0
    start = 0
    while start < len(data):  # blocks, so that the joined copy stays small
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _CHECK_ROWS // token_dim)))
        block = np.concatenate(data[start:stop])

        def where(at: Any, start: int = start, done: int = int(done)) -> str:
            i = start + int(np.searchsorted(ends[start:], done + at[0], side="right"))
            return f"sequence {i}, token {done + at[0] - (ends[i] - lengths[i])}, feature {at[1]}"

        largest = max(largest, _largest(block, where))
        start = stop
    return Sequences(data, lengths, token_dim, largest, "list", device)


def _check_tensor(X: Any, n_tokens: int | None, device: str) -> Sequences:
    """A tensor on an accelerator stays there; the same rules as for NumPy input."""
    if X.ndim not in (2, 3):
        raise ValueError(f"Expected a 2-D or 3-D tensor, got shape {tuple(X.shape)}.")
    layout = "array" if X.ndim == 3 else "flat"
    if X.ndim == 2:
        n_tokens = 1 if n_tokens is None else n_tokens
        if X.shape[1] % n_tokens:
            raise ValueError(
                f"X has {X.shape[1]} columns, which n_tokens={n_tokens} does not divide."
            )
        X = X.reshape(X.shape[0], n_tokens, X.shape[1] // n_tokens)
    if 0 in X.shape:
        raise ValueError(f"Found an empty tensor of shape {tuple(X.shape)}.")
    largest = float(X.detach().abs().max())
    if not np.isfinite(largest):
        raise ValueError(f"X contains NaN or infinity (a tensor on {device}).")
    lengths = np.full(X.shape[0], X.shape[1])
    return Sequences(X.detach(), lengths, X.shape[2], largest, layout, device)


def _check_target_list(y: Sequence[Any], sequences: Sequences) -> tuple[np.ndarray, int]:
    parts = [_check_numbers(part, f"y[{i}]") for i, part in enumerate(y)]
    for i, part in enumerate(parts):
        if part.ndim not in (1, 2) or part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"Every element of y must be (n_tokens_i,) or (n_tokens_i, m) with one m; element "
                f"0 has shape {parts[0].shape}, element {i} has shape {part.shape}."
            )
        if len(part) != sequences.lengths[i]:
            raise ValueError(
                f"output='sequence' needs one target per token: sequence {i} has "
                f"{sequences.lengths[i]} tokens, y[{i}] has {len(part)} rows."
            )
    joined = np.concatenate(parts)
    return joined.reshape(len(joined), -1), joined.ndim - 1


def _is_ragged_targets(y: Sequence[Any]) -> bool:
    return _ndim(y[0]) >= 1


def _check_numbers(values: Any, name: str) -> np.ndarray:
    """A finite float64 array of any number of dimensions."""
    try:
        numbers: np.ndarray = check_array(
            to_numpy(values),
            dtype=np.float64,
            ensure_2d=False,
            allow_nd=True,
            ensure_min_samples=0,
            ensure_min_features=0,
            input_name=name,
        )
        return numbers
    except ValueError as error:
        if name in str(error):
            raise
        raise ValueError(f"{name} cannot be read as numbers: {error}") from error


def _largest(values: np.ndarray, where: Any) -> float:
    """Largest absolute value; a ValueError that says where if one is not finite."""
    if values.dtype.kind == "b":
        return float(values.any())
    low, high = values.min(), values.max()  # NaN propagates through both
    largest = max(-float(low), float(high))
    if np.isfinite(low) and np.isfinite(high) and np.isfinite(largest):
        return abs(largest)
    for start in range(0, len(values), max(1, _CHECK_ROWS // max(1, values[0].size))):
        block = values[start : start + max(1, _CHECK_ROWS // max(1, values[0].size))]
        bad = ~np.isfinite(block.astype(np.float64))
        if bad.any():
            at = [int(i) for i in np.argwhere(bad)[0]]
            kind = "NaN" if np.isnan(block[tuple(at)]) else "infinity"
            at[0] += start
            raise ValueError(
                f"Input X contains {kind}, first at {where(at)}. MHLA has no notion of a missing "
                "value: drop the row or impute it."
            )
    raise AssertionError("unreachable: a non-finite extreme without a non-finite value")


def _check_cube(sequences: Sequences) -> None:
    """The features are cubic in the tokens; refuse what float64 cannot hold."""
    largest, longest = sequences.largest, int(sequences.lengths.max())
    if largest == 0.0:
        return
    with np.errstate(over="ignore", under="ignore"):
        cube = np.float64(largest) ** 3
    if cube > _FLOAT_MAX / longest:
        raise ValueError(
            f"X holds a value of size {largest:.3g}; its cube (the model is cubic in the tokens) "
            "overflows float64. Rescale the tokens."
        )
    if cube < _FLOAT_TINY:
        raise ValueError(
            f"The largest value of X is {largest:.3g}; its cube (the model is cubic in the tokens) "
            "underflows float64. Rescale the tokens."
        )


def _require_real(data: np.ndarray) -> None:
    if data.dtype.kind == "c":
        raise ValueError(f"Complex data not supported\n{data.dtype}\n")


def _column_names(X: Any) -> list[str] | None:
    columns = getattr(X, "columns", None)
    return None if columns is None else [str(name) for name in columns]


def _quoted(names: list[str] | None, index: int) -> str:
    return str(index) if names is None else repr(names[index])


def _first_text_column(X: Any) -> str | None:
    """Name of the first column of a data frame (or object array) that is not numeric."""
    names = _column_names(X)
    if names is not None:
        columns = [
            (repr(name), np.asarray(X[column]))
            for name, column in zip(names, X.columns, strict=True)
        ]
    elif isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "OUS":
        columns = [(str(i), X[:, i]) for i in range(X.shape[1])]
    else:
        return None
    for name, values in columns:
        if values.dtype.kind in "OUST":
            for row, value in enumerate(values):
                if isinstance(value, str):
                    try:
                        float(value)
                    except ValueError:
                        return f"column {name}, row {row}: {value!r}"
    return None
