"""The cubic feature map, for use with any linear model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla._backend import NumpyBackend, as_input_kind, to_numpy
from sklearn_mhla._design import Design
from sklearn_mhla._features import cubic_features, n_cubic_features, pair_indices, pair_scale
from sklearn_mhla._tokens import check_sequences, compare_features
from sklearn_mhla.preprocessing._base import TokenTransformer


class LinearAttentionFeatures(TokenTransformer):
    r"""The ``p = d^2 (d + 1) / 2`` features in which linear attention is linear.

    A sequence with state :math:`S = \sum_t z_t z_t^T` and query :math:`q = z_T` becomes the
    products :math:`S_{jk} q_l`, ``j <= k`` (Yau et al. [1]_, Algorithm 2). A linear model on them
    is linear attention with any number of heads: the way to a lasso, a logistic regression or a
    quantile regression of this form. Least squares is better served by
    :class:`sklearn_mhla.MHLARegressor`, which never writes the features down.

    Parameters
    ----------
    state : {"sum", "mean"}, default="sum"
        Whether the state is the sum over tokens or is divided by their number.
    basis : {"isometric", "published"}, default="isometric"
        "isometric" multiplies products with ``j < k`` by sqrt(2), so that inner products are
        those of the states times those of the queries and a penalty treats a state alike however
        it is written down. "published" has no such factors.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds; None means that a row is a single token.

    Attributes
    ----------
    token_dim_ : int
        Width ``d`` of the tokens.
    n_features_in_ : int
        Columns of a 2-D input, else ``d``.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame.

    References
    ----------
    .. [1] M. Yau, E. Akyurek, J. Mao, J. B. Tenenbaum, S. Jegelka and J. Andreas, "Learning
       Linear Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.preprocessing import LinearAttentionFeatures
    >>> features = LinearAttentionFeatures(basis="published").fit([[1.0, 2.0]])
    >>> features.transform([[1.0, 2.0]])
    array([[1., 2., 2., 4., 4., 8.]])
    """

    def __init__(
        self, *, state: str = "sum", basis: str = "isometric", n_tokens: int | None = None
    ) -> None:
        self.state = state
        self.basis = basis
        self.n_tokens = n_tokens

    def transform(self, X: Any) -> Any:
        """Compute the features.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts, tokens of the fitted width.

        Returns
        -------
        ndarray or torch.Tensor of shape (n_samples, p)
            Index order ``(j, k, l)`` with ``j <= k`` and ``l`` running fastest.

        Raises
        ------
        MemoryError
            If the features do not fit into memory.
        ValueError
            If the cube of a token overflows float64.
        """
        check_is_fitted(self)
        compare_features(self, X)
        sequences = check_sequences(X, n_tokens=self.n_tokens, token_dim=self.token_dim_)
        backend = NumpyBackend()
        n_features = n_cubic_features(self.token_dim_)
        needed = 8 * len(sequences) * n_features
        if needed > backend.available_memory():
            raise MemoryError(
                f"{len(sequences)} rows of {n_features} features need {needed / 1e9:.3g} GB, but "
                f"only {backend.available_memory() / 1e9:.3g} GB are available. MHLARegressor fits "
                "the same model without writing the features down."
            )
        features = np.empty((len(sequences), n_features))
        design = Design(
            replace(sequences, data=to_numpy(sequences.data)),
            backend,
            state=self.state,
            rescale=False,
        )
        for block in design.blocks():
            features[block.rows] = cubic_features(block.state, block.query)
        if self.basis == "published":
            features /= np.repeat(pair_scale(self.token_dim_), self.token_dim_)
        return as_input_kind(features, sequences.device)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name, choices in (("state", ("sum", "mean")), ("basis", ("isometric", "published"))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, choices))}; got "
                    f"{getattr(self, name)!r}."
                )

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the features, ``S[j,k] q[l]``.

        Parameters
        ----------
        input_features : array-like of str, default=None
            Names of the input's columns, used where a row is a single token.

        Returns
        -------
        ndarray of str of shape (p,)
            One name per feature.
        """
        check_is_fitted(self)
        names = self._names_out(self._column_names_in(input_features))
        return np.asarray(names, dtype=object)

    def _names_out(self, names: np.ndarray) -> list[str]:
        one_token = len(names) == self.token_dim_
        own = list(names) if one_token else [f"x{j}" for j in range(self.token_dim_)]
        pairs = zip(*pair_indices(self.token_dim_), strict=True)
        return [f"S[{own[j]},{own[k]}] q[{name}]" for j, k in pairs for name in own]
