"""The one door for data: any accepted input becomes validated :class:`Sequences`.

Accepted are 2-D tables whose rows are flattened sequences (token-major), 3-D arrays
``(n_samples, n_tokens, token_dim)`` and lists of ``(n_tokens_i, token_dim)`` arrays; NumPy,
pandas, polars and torch tensors; memory maps, and arrays in chunked files, which stay there. Input
is never copied whole: it is kept as it came and turned into contiguous float64 one block at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_array, validate_data

from sklearn_mhla._backend import Array, Backend, is_tensor, tensor_device, to_numpy
from sklearn_mhla._stored import StoredArray, is_stored

_FLOAT_MAX = float(np.finfo(np.float64).max)
_FLOAT_TINY = float(np.finfo(np.float64).tiny)
_CHECK_ROWS = 2**20  # values looked at a time when a non-finite one is searched


@dataclass(frozen=True)
class Sequences:
    """Validated sequences of tokens, in the memory they came in.

    Attributes
    ----------
    data : array of shape (n, T, d), or list of n arrays of shape (T_i, d)
        Any real dtype; a torch tensor only when it lives on an accelerator, a
        :class:`StoredArray` when it has not been read yet.
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
        """The chosen sequences only; neighbours in their order are not copied."""
        if self.layout == "list":
            chosen: Any = [self.data[i] for i in indices]
        elif isinstance(self.data, StoredArray):
            chosen = self.data.take(indices)
        elif len(indices) and (np.diff(indices) == 1).all():
            chosen = self.data[int(indices[0]) : int(indices[-1]) + 1]
        else:
            chosen = self.data[indices]
        return replace(self, data=chosen, lengths=self.lengths[indices])


def check_sequences(
    X: Any,
    *,
    n_tokens: int | None = None,
    token_dim: int | None = None,
    cubic: bool = True,
) -> Sequences:
    """Validate ``X`` in any accepted form.

    Parameters
    ----------
    X : array-like, data frame, tensor or list of arrays
        See the module's description.
    n_tokens : int, optional
        Tokens per row of a 2-D input; None means that a row is one token.
    token_dim : int, optional
        Required ``d``, known from an earlier fit. Without it the data are to be fitted, and
        values too small for their features to be represented are refused too.
    cubic : bool, default=True
        Whether the cube of the largest value must be representable; not for transformers.

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
        n_dims = n_dimensions(X)
        if is_stored(X):
            sequences = _check_stored(X, n_tokens)
        elif _is_list_of_sequences(X):
            sequences = _check_list(X)
        elif n_dims == 3:
            sequences = _check_3d(X, device)
        elif n_dims > 3:
            raise ValueError(
                f"X has {n_dims} dimensions; expected 2-D (n_samples, n_tokens * token_dim), 3-D "
                "(n_samples, n_tokens, token_dim) or a list of 2-D arrays."
            )
        else:
            sequences = _check_2d(X, n_tokens, device)
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
    if cubic:
        _check_cube(sequences, to_be_fitted=token_dim is None)
    return sequences


@dataclass(frozen=True)
class Rows:
    """What a fit is made of.

    Attributes
    ----------
    sequences : Sequences
    targets : ndarray of shape (rows, m)
    weights : ndarray of shape (rows,) or None
        Positive.
    """

    sequences: Sequences
    targets: np.ndarray
    weights: np.ndarray | None


def rows_of_positive_weight(
    sequences: Sequences, targets: np.ndarray, weights: np.ndarray | None, output: str
) -> Rows:
    """Leave out sequences of weight zero and give every row the weight of its sequence."""
    if weights is None:
        return Rows(sequences, targets, None)
    row_weights = np.repeat(weights, sequences.lengths) if output == "sequence" else weights
    kept = np.flatnonzero(weights)
    if len(kept) < len(weights):
        sequences, targets = sequences.take(kept), targets[row_weights > 0]
        sequences = replace(sequences, largest=_largest_of(sequences))
    return Rows(sequences, targets, row_weights[row_weights > 0])


def describe_columns(X: Any, sequences: Sequences) -> dict[str, Any]:
    """Attributes that scikit-learn wants of an estimator fitted on ``X``.

    ``n_features_in_`` and, for data frames, ``feature_names_in_``; refuses column names of mixed
    types. For input that is not 2-D the number of features is the width of a token.
    """
    if sequences.layout != "flat":
        return {"n_features_in_": sequences.token_dim, "_rows_are_flat": False}
    if is_tensor(X):
        return {"n_features_in_": X.shape[1], "_rows_are_flat": True}
    described = BaseEstimator()
    validate_data(described, X, reset=True, skip_check_array=True)
    return {**vars(described), "_rows_are_flat": True}


def store_columns(estimator: Any, attributes: dict[str, Any]) -> None:
    """Set what :func:`describe_columns` found, and forget the names of an earlier fit."""
    if "n_features_in_" in attributes:
        vars(estimator).pop("feature_names_in_", None)
    vars(estimator).update(attributes)


def compare_features(estimator: Any, X: Any) -> None:
    """Refuse a 2-D input whose columns are not those of a fit on 2-D input."""
    if (
        not is_tensor(X)
        and not _is_list_of_sequences(X)
        and n_dimensions(X) == 2
        and estimator._rows_are_flat
    ):
        validate_data(estimator, X, reset=False, skip_check_array=True)


def _is_list_of_sequences(X: Any) -> bool:
    """Whether X is a list, tuple or object array whose members are themselves 2-D."""
    if isinstance(X, np.ndarray):
        return X.dtype == object and X.ndim == 1 and len(X) > 0 and n_dimensions(X[0]) == 2
    return isinstance(X, (list, tuple)) and any(n_dimensions(member) == 2 for member in X)


def n_dimensions(values: Any) -> int:
    """Dimensions of an array, frame, tensor or nested list, without converting it if possible."""
    if hasattr(values, "shape"):
        return len(values.shape)
    if isinstance(values, (list, tuple)):
        return 1 + (n_dimensions(values[0]) if len(values) else 0)
    if hasattr(values, "__array__"):
        return int(np.asarray(values).ndim)
    return 0


def _check_2d(X: Any, n_tokens: int | None, device: str | None) -> Sequences:
    dates = _first_dates(X)
    if dates is not None:
        raise ValueError(f"X must hold numbers only, but has dates or time differences in {dates}.")
    try:
        table = check_array(X, dtype="numeric", ensure_all_finite=False, input_name="X")
        if table.dtype.kind not in "buif":
            raise TypeError(f"X has dtype {table.dtype}")
    except (TypeError, ValueError) as error:
        value, where = _first_bad_cell(X)
        if where is None:
            raise
        # scikit-learn's convention: TypeError for objects that cannot be numbers at all.
        text_or_missing = isinstance(value, (str, bytes)) or value is None or "NA" in str(error)
        kind = ValueError if text_or_missing or isinstance(error, ValueError) else TypeError
        raise kind(f"X must hold numbers only, but has {where}: {error}") from error
    width = table.shape[1]
    n_tokens = _checked_n_tokens(width, n_tokens)
    names = _column_names(X)
    largest = _largest(table, lambda at: f"row {at[0]}, column {_quoted(names, at[1])}")
    # reshape, not a copy: a row's columns keep their stride
    data = table.reshape(len(table), n_tokens, width // n_tokens)
    lengths = np.full(len(table), n_tokens)
    return Sequences(data, lengths, width // n_tokens, largest, "flat", device)


def _check_3d(X: Any, device: str | None) -> Sequences:
    data = _real_numbers(X, "X", ("sequence", "token", "feature"))
    if 0 in data.shape:
        what = ("sample(s)", "token(s)", "feature(s)")[data.shape.index(0)]
        raise ValueError(
            f"Found array with 0 {what} (shape={data.shape}) while a minimum of 1 is required."
        )
    largest = _largest(data, lambda at: f"sequence {at[0]}, token {at[1]}, feature {at[2]}")
    lengths = np.full(data.shape[0], data.shape[1])
    return Sequences(data, lengths, data.shape[2], largest, "array", device)


def _check_stored(X: Any, n_tokens: int | None) -> Sequences:
    """Rows are read once, block by block, and let go of again."""
    if 0 in X.shape:
        raise ValueError(
            f"Found array with 0 sample(s), token(s) or feature(s) (shape={tuple(X.shape)}) while "
            "a minimum of 1 is required."
        )
    flat = len(X.shape) == 2
    n_tokens = _checked_n_tokens(X.shape[1], n_tokens) if flat else X.shape[1]
    data = StoredArray(X, n_tokens)
    n_samples, _, token_dim = data.shape
    largest = 0.0
    for start, block in data.blocks():

        def where(at: Any, start: int = start) -> str:
            if flat:
                return f"row {start + at[0]}, column {at[1] * token_dim + at[2]}"
            return f"sequence {start + at[0]}, token {at[1]}, feature {at[2]}"

        largest = max(largest, _largest(block, where))
    lengths = np.broadcast_to(n_tokens, n_samples)
    layout = "flat" if flat else "array"
    return Sequences(data, lengths, token_dim, largest, layout, None)


def _checked_n_tokens(width: int, n_tokens: int | None) -> int:
    """Tokens in a row of that many columns."""
    n_tokens = 1 if n_tokens is None else n_tokens
    if width % n_tokens:
        raise ValueError(
            f"X has {width} columns, which n_tokens={n_tokens} does not divide; a row holds "
            "n_tokens tokens of equal width, one after the other."
        )
    return n_tokens


def _check_list(X: Sequence[Any]) -> Sequences:
    device = tensor_device(X[0])
    data = [
        _real_numbers(to_numpy(member), f"X[{i}]", ("token", "feature"))
        for i, member in enumerate(X)
    ]
    for i, member in enumerate(data):
        if member.ndim != 2:
            raise ValueError(
                f"X is a list of sequences, so every element must be 2-D (n_tokens, token_dim); "
                f"element {i} has shape {member.shape}."
            )
        if 0 in member.shape:
            raise ValueError(
                f"X holds an empty sequence: element {i} has shape {member.shape}, (n_tokens, "
                "token_dim) must be at least (1, 1)."
            )
        if member.shape[1] != data[0].shape[1]:
            raise ValueError(
                f"All sequences must have tokens of one width: element 0 has width "
                f"{data[0].shape[1]}, element {i} has width {member.shape[1]}."
            )
    token_dim = data[0].shape[1]
    lengths = np.array([len(member) for member in data])
    ends = np.cumsum(lengths)
    largest = 0.0
    start = 0
    while start < len(data):  # blocks, so that the joined copy stays small
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _CHECK_ROWS // token_dim)))
        block = np.concatenate(data[start:stop])

        def where(at: Any, start: int = start, done: int = done) -> str:
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
        n_tokens = _checked_n_tokens(X.shape[1], n_tokens)
        X = X.reshape(X.shape[0], n_tokens, X.shape[1] // n_tokens)
    if 0 in X.shape:
        raise ValueError(f"Found an empty tensor of shape {tuple(X.shape)}.")
    if X.is_complex():
        raise ValueError(f"Complex data not supported: X has dtype {X.dtype}.")
    values = X.detach().byte() if str(X.dtype) == "torch.bool" else X.detach()
    low, high = (float(extreme) for extreme in values.aminmax())
    largest = max(abs(low), abs(high))
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError(f"X contains NaN or infinity (a tensor on {device}).")
    lengths = np.full(X.shape[0], X.shape[1])
    return Sequences(X.detach(), lengths, X.shape[2], largest, layout, device)


def _real_numbers(values: Any, name: str, axes: tuple[str, ...]) -> np.ndarray:
    """Return an array of a real dtype; a ValueError that says where if that cannot be."""
    if issparse(values):
        raise ValueError(f"{name} is a sparse matrix; sequences must be dense arrays.")
    try:
        data = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
    if data.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: {name} has dtype {data.dtype}.")
    if data.dtype.kind in "buif":
        return data
    for at in np.ndindex(data.shape) if data.dtype == object else ():
        if not _is_number(data[at]):
            where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False)) or "all"
            raise ValueError(f"{name} must hold numbers only, but has {data[at]!r} at {where}.")
    if data.dtype != object:
        raise ValueError(f"{name} must hold numbers only, but has dtype {data.dtype}.")
    return data.astype(np.float64)


def _is_number(value: Any) -> bool:
    """Whether float64 can hold a value of an object array or of a data frame."""
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _largest(values: np.ndarray, where: Any) -> float:
    """Largest absolute value; a ValueError that says where if one is not finite."""
    if values.dtype.kind == "b":
        return float(values.any())
    low, high = float(values.min()), float(values.max())  # NaN propagates through both
    if np.isfinite(low) and np.isfinite(high):
        return max(abs(low), abs(high))
    for start in range(0, len(values), max(1, _CHECK_ROWS // max(1, values[0].size))):
        block = values[start : start + max(1, _CHECK_ROWS // max(1, values[0].size))]
        with np.errstate(over="ignore"):
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


def _largest_of(sequences: Sequences) -> float:
    """Largest absolute value of sequences that were checked before."""
    if isinstance(sequences.data, StoredArray):
        parts: Any = (block for _, block in sequences.data.blocks())
    else:
        parts = sequences.data if sequences.layout == "list" else [sequences.data]
    return max(max(abs(float(part.min())), abs(float(part.max()))) for part in parts)


def _check_cube(sequences: Sequences, to_be_fitted: bool) -> None:
    """Refuse tokens whose cubic features float64 cannot hold."""
    largest, longest = sequences.largest, int(sequences.lengths.max())
    with np.errstate(over="ignore", under="ignore"):
        cube = np.float64(largest) ** 3
    if cube > _FLOAT_MAX / longest:
        raise ValueError(
            f"X holds a value of size {largest:.3g}; its cube (the model is cubic in the tokens) "
            "overflows float64. Rescale the tokens."
        )
    if to_be_fitted and largest > 0.0 and cube < _FLOAT_TINY:
        raise ValueError(
            f"The largest value of X is {largest:.3g}; its cube (the model is cubic in the tokens) "
            "underflows float64. Rescale the tokens."
        )


def _column_names(X: Any) -> list[str] | None:
    columns = getattr(X, "columns", None)
    return None if columns is None else [str(name) for name in columns]


def _quoted(names: list[str] | None, index: int) -> str:
    return str(index) if names is None else repr(names[index])


def _columns(X: Any) -> list[tuple[str, Any]]:
    """Labelled columns of a data frame or of a 2-D NumPy array."""
    names = _column_names(X)
    if names is not None:
        return [(repr(name), X[key]) for name, key in zip(names, X.columns, strict=True)]
    if isinstance(X, np.ndarray) and X.ndim == 2:
        return [(str(i), X[:, i]) for i in range(X.shape[1])]
    return []


def _first_dates(X: Any) -> str | None:
    """Label of the first column of dates; conversion to numbers would be silent."""
    if isinstance(X, np.ndarray) and X.dtype.kind not in "mM":
        return None
    for label, column in _columns(X):
        if np.asarray(column[:1]).dtype.kind in "mM":
            return f"column {label}"
    return None


def _first_bad_cell(X: Any) -> tuple[Any, str | None]:
    """Find the first entry of a table that is not a number, and say where it stands."""
    for label, column in _columns(X):
        values = np.asarray(column)
        if values.dtype.kind in "buifc":
            continue
        for row, value in enumerate(values):
            if not _is_number(value):
                return value, f"{value!r} in row {row}, column {label}"
    return None, None
