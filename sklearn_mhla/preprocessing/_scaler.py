"""Standardise every feature over all tokens of all sequences."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_scalar

from sklearn_mhla._tokens import Sequences
from sklearn_mhla.preprocessing._base import TokenTransformer, in_input_form, joined_tokens


class TokenScaler(TokenTransformer):
    """Standardise token features by their mean and deviation over all tokens.

    ``sklearn.preprocessing.StandardScaler`` would give every position of a flattened sequence a
    scale of its own and refuses 3-D input; here one mean and one deviation per feature serve all
    positions, so a level that differs between positions stays visible.

    Parameters
    ----------
    with_mean : bool, default=True
        Whether to subtract the mean.
    with_std : bool, default=True
        Whether to divide by the standard deviation; that of constant features counts as one.
    std : float, default=1.0
        Standard deviation of the result. Beside a constant of one, readings of size ``std`` make
        terms of degree one, two and three of sizes ``std``, ``std**2`` and ``std**3``: the smaller
        it is, the less a penalty weighs on linear terms compared with the others. In the limit the
        model is ridge regression. Only with ``with_std=True``.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds; None means that a row is a single token.

    Attributes
    ----------
    mean_ : ndarray of shape (d,)
        Mean over tokens, zeros if ``with_mean=False``.
    scale_ : ndarray of shape (d,)
        What is divided by: standard deviations over ``std``, ones if ``with_std=False``.
    token_dim_ : int
        Width ``d`` of the tokens.
    n_features_in_ : int
        Columns of a 2-D input, else ``d``.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame.

    See Also
    --------
    PositionFeatures : Append where a token stands; after scaling.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.preprocessing import TokenScaler
    >>> X = np.array([[[1.0, 0.0], [3.0, 10.0]], [[5.0, 20.0], [7.0, 30.0]]])
    >>> TokenScaler().fit(X).mean_
    array([ 4., 15.])
    """

    mean_: np.ndarray
    scale_: np.ndarray

    def __init__(
        self,
        *,
        with_mean: bool = True,
        with_std: bool = True,
        std: float = 1.0,
        n_tokens: int | None = None,
    ) -> None:
        self.with_mean = with_mean
        self.with_std = with_std
        self.std = std
        self.n_tokens = n_tokens

    def transform(self, X: Any) -> Any:
        """Standardise.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts, tokens of the fitted width.

        Returns
        -------
        ndarray, torch.Tensor or list
            In the form of ``X``, float64.
        """
        sequences = self._check_new(X)
        scaled = joined_tokens(sequences) - self.mean_
        scaled /= self.scale_
        return in_input_form(scaled, sequences.lengths, sequences)

    def inverse_transform(self, X: Any) -> Any:
        """Undo the standardisation.

        Parameters
        ----------
        X : array-like or list of arrays
            Standardised sequences.

        Returns
        -------
        ndarray, torch.Tensor or list
            In the form of ``X``, float64.
        """
        sequences = self._check_new(X)
        tokens = joined_tokens(sequences) * self.scale_
        tokens += self.mean_
        return in_input_form(tokens, sequences.lengths, sequences)

    def _learn(self, sequences: Sequences) -> dict[str, Any]:
        tokens, d = joined_tokens(sequences), sequences.token_dim
        # Powers of two bring every feature into (-1, 1), so that its square can be represented.
        exponent = np.frexp(np.maximum(tokens.max(axis=0), -tokens.min(axis=0)))[1]
        scaler = StandardScaler().fit(np.ldexp(tokens, -exponent))
        mean = np.ldexp(scaler.mean_, exponent)
        # Deviations in (-1, 1) are smaller than 1, which StandardScaler gives constant features.
        scale = np.where(scaler.scale_ == 1.0, 1.0, np.ldexp(scaler.scale_, exponent))
        return {
            "mean_": mean if self.with_mean else np.zeros(d),
            "scale_": scale / self.std if self.with_std else np.ones(d),
        }

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_scalar(self.std, "std", Real, min_val=0.0, include_boundaries="neither")
        if self.std != 1.0 and not self.with_std:
            raise ValueError(f"std={self.std} needs with_std=True.")

    def _names_out(self, names: np.ndarray) -> list[str]:
        return list(names)
