"""What the token transformers share: one door for data, and the way back to the form it had."""

from __future__ import annotations

from abc import abstractmethod
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, check_scalar

from sklearn_mhla._backend import as_input_kind, to_numpy
from sklearn_mhla._tokens import (
    Sequences,
    check_sequences,
    compare_features,
    describe_columns,
    store_columns,
)


def _has_columns(transformer: Any) -> bool:
    """Whether the output has columns to be named."""
    if not getattr(transformer, "_rows_are_flat", True):
        raise AttributeError(
            f"This {type(transformer).__name__} was fitted on 3-D input or a list, whose output is "
            "no table and has no columns to name."
        )
    return True


class TokenTransformer(TransformerMixin, BaseEstimator):
    """Base of the transformers: 2-D, 3-D and ragged input, output in the form of the input."""

    n_tokens: int | None
    token_dim_: int
    n_features_in_: int
    _n_tokens_fitted: int

    def fit(self, X: Any, y: Any = None) -> Any:
        """Learn what the transformation needs.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * d), (n_samples, n_tokens, d), or list of \
n_samples arrays of shape (n_tokens_i, d)
            Sequences of tokens.
        y : None
            Ignored.

        Returns
        -------
        TokenTransformer
            This transformer, fitted.

        Raises
        ------
        ValueError
            If a parameter or the data are invalid.
        """
        self._check_parameters()
        sequences = check_sequences(X, n_tokens=self.n_tokens, cubic=False)
        attributes = describe_columns(X, sequences) | {
            "token_dim_": sequences.token_dim,
            "_n_tokens_fitted": int(sequences.lengths.max()),
        }
        attributes |= self._learn(sequences)
        store_columns(self, attributes)
        return self

    def _check_new(self, X: Any) -> Sequences:
        check_is_fitted(self)
        compare_features(self, X)
        return check_sequences(X, n_tokens=self.n_tokens, token_dim=self.token_dim_, cubic=False)

    def _check_parameters(self) -> None:
        if self.n_tokens is not None:
            check_scalar(self.n_tokens, "n_tokens", Integral, min_val=1)

    def _learn(self, sequences: Sequences) -> dict[str, Any]:
        """Fitted attributes beyond the description of the input."""
        return {}

    @available_if(_has_columns)  # type: ignore[untyped-decorator]
    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the output's columns, for 2-D input.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names of the input's columns; None takes those of the fit, or ``x0, x1, ...``.

        Returns
        -------
        ndarray of str
            One name per output column.
        """
        check_is_fitted(self)
        names = self._names_out(self._column_names_in(input_features))
        return np.asarray(names, dtype=object)

    @abstractmethod
    def _names_out(self, names: np.ndarray) -> list[str]:
        """Output names from those of the input's columns."""

    def _column_names_in(self, input_features: Any) -> np.ndarray:
        known = getattr(self, "feature_names_in_", None)
        if input_features is None:
            generated = [f"x{i}" for i in range(self.n_features_in_)]
            return np.asarray(generated if known is None else known, dtype=object)
        given = np.asarray(input_features, dtype=object)
        if known is not None and not np.array_equal(known, given):
            raise ValueError("input_features is not equal to feature_names_in_")
        if len(given) != self.n_features_in_:
            raise ValueError(
                f"input_features should have length equal to number of features "
                f"({self.n_features_in_}), got {len(given)}"
            )
        return given

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def chosen_columns(indices: Any, name: str, width: int) -> np.ndarray:
    """Valid distinct column indices; None means all."""
    if indices is None:
        return np.arange(width)
    chosen = np.atleast_1d(np.asarray(indices))
    if (
        chosen.ndim != 1
        or not len(chosen)
        or chosen.dtype.kind not in "iu"
        or len(np.unique(chosen)) < len(chosen)
    ):
        raise ValueError(f"{name} must be distinct integers; got {indices!r}.")
    if chosen.min() < 0 or chosen.max() >= width:
        raise ValueError(f"{name} must lie in 0..{width - 1}; got {indices!r}.")
    return chosen


def joined_tokens(sequences: Sequences) -> np.ndarray:
    """All tokens of all sequences one below the other, float64 (total, d)."""
    if sequences.layout == "list":
        tokens: np.ndarray = np.concatenate(sequences.data)
    else:
        tokens = np.asarray(to_numpy(sequences.data)).reshape(-1, sequences.token_dim)
    return tokens.astype(np.float64, copy=False)


def in_input_form(tokens: np.ndarray, lengths: np.ndarray, sequences: Sequences) -> Any:
    """Joined tokens in the form that the input had: table, 3-D array or list; array or tensor."""
    n_samples, width = len(lengths), tokens.shape[1]
    if sequences.layout == "list":
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return [as_input_kind(part, sequences.device) for part in parts]
    shape = (n_samples, -1) if sequences.layout == "flat" else (n_samples, -1, width)
    return as_input_kind(tokens.reshape(shape), sequences.device)


def with_token_suffix(names: list[str], n_tokens: int, token: int) -> list[str]:
    """Names of features of one token among several; as they are if there is only one."""
    return names if n_tokens == 1 else [f"{name}_t{token}" for name in names]
