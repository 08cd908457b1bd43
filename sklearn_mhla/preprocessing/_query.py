"""Append the token at which a sequence is read."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted, check_scalar

from sklearn_mhla._tokens import (
    Sequences,
    check_sequences,
    compare_features,
    describe_columns,
    store_columns,
)
from sklearn_mhla.preprocessing._base import (
    TokenTransformer,
    chosen_columns,
    in_input_form,
    joined_tokens,
    with_token_suffix,
)
from sklearn_mhla.preprocessing._position import cosines

_SUMMARIES = ("last", "mean", "cosine", "constant")


class QueryToken(TokenTransformer):
    r"""Append a final token that holds a constant and a summary of the sequence.

    Linear attention reads the state with its last token, the query. Without a query token that is
    the last reading. With one, the query is ``(1, summary)`` in coordinates of its own: tokens
    become ``(z_t, 0)``, the query ``(0, 1, summary)``, and the model contains

    * the state of the sequence times 1: terms of degree two in the tokens, and through their
      constant (:class:`PositionFeatures`) linear terms and sums over time;
    * the state of the sequence times the summary: terms of degree three;
    * the summary alone, up to degree three.

    Parameters
    ----------
    summary : {"last", "mean", "cosine", "constant"}, default="last"
        The last token; the mean over tokens; the shape of the sequence, :math:`\frac{1}{T}
        \sum_t z_t \cos(\pi k (t + 1/2) / T)` for ``k = 0 .. n_components``, which begins with the
        mean; or nothing but the one.
    n_components : int, default=4
        Highest order of "cosine". Sequences of different lengths are stretched onto each other.
    features : sequence of int, default=None
        Which features of the tokens are summarised; None takes all.
    static_columns : sequence of int, default=None
        Columns of a 2-D input that describe the whole sequence (a price class, a patient's age).
        They are taken out of the sequence and put into the query, after the summary.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds, before the query is appended and without
        static columns; None means that a row is a single token.

    Attributes
    ----------
    token_dim_ : int
        Width of the tokens that go in.
    n_features_in_ : int
        Columns of a 2-D input, else ``token_dim_``.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Column names of a data frame.

    See Also
    --------
    PositionFeatures : Position and a constant; before this transformer.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.preprocessing import QueryToken
    >>> QueryToken("last").fit_transform(np.array([[[2.0], [3.0]]]))
    array([[[2., 0., 0.],
            [3., 0., 0.],
            [0., 1., 3.]]])
    """

    def __init__(
        self,
        summary: str = "last",
        n_components: int = 4,
        *,
        features: Any = None,
        static_columns: Any = None,
        n_tokens: int | None = None,
    ) -> None:
        self.summary = summary
        self.n_components = n_components
        self.features = features
        self.static_columns = static_columns
        self.n_tokens = n_tokens

    def fit(self, X: Any, y: Any = None) -> QueryToken:
        """Learn the width of the tokens.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_tokens * d + n_static), (n_samples, n_tokens, d), or \
list of n_samples arrays of shape (n_tokens_i, d)
            Sequences of tokens.
        y : None
            Ignored.

        Returns
        -------
        QueryToken
            This transformer, fitted.

        Raises
        ------
        ValueError
            If a parameter or the data are invalid.
        """
        if self.static_columns is None:
            super().fit(X)
        else:
            self._check_parameters()
            table = check_sequences(X, cubic=False)
            sequences = self._split(table, None)[0]
            store_columns(
                self,
                describe_columns(X, table)
                | {"token_dim_": sequences.token_dim, "_n_tokens_fitted": self.n_tokens or 1},
            )
        chosen_columns(self.features, "features", self.token_dim_)
        return self

    def transform(self, X: Any) -> Any:
        """Append the query.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts, tokens of the fitted width.

        Returns
        -------
        ndarray, torch.Tensor or list
            In the form of ``X``, float64, with one token more and wider tokens.
        """
        if self.static_columns is None:
            sequences = self._check_new(X)
            static = np.empty((len(sequences), 0))
        else:
            check_is_fitted(self)
            compare_features(self, X)
            table = check_sequences(X, cubic=False)
            sequences, static = self._split(table, self.token_dim_)
        tokens, lengths, d = joined_tokens(sequences), sequences.lengths, self.token_dim_
        query = np.hstack([np.ones((len(lengths), 1)), self._summaries(tokens, lengths), static])
        last = np.cumsum(lengths + 1) - 1
        extended = np.zeros((len(tokens) + len(query), d + query.shape[1]))
        is_token = np.ones(len(extended), dtype=bool)
        is_token[last] = False
        extended[is_token, :d] = tokens
        extended[last, d:] = query
        return in_input_form(extended, lengths + 1, sequences)

    def _summaries(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Summary of every sequence, (n_samples, n_summarised)."""
        if self.summary == "constant":
            return np.empty((len(lengths), 0))
        chosen = tokens[:, chosen_columns(self.features, "features", self.token_dim_)]
        ends = np.cumsum(lengths)
        if self.summary == "last":
            last: np.ndarray = chosen[ends - 1]
            return last
        if self.summary == "cosine":
            basis = cosines(lengths, np.arange(self.n_components + 1))
            chosen = (chosen[:, :, None] * basis[:, None, :]).reshape(len(chosen), -1)
        sums: np.ndarray = np.add.reduceat(chosen, ends - lengths, axis=0)
        sums /= lengths[:, None]
        return sums

    def _split(self, table: Sequences, token_dim: int | None) -> tuple[Sequences, np.ndarray]:
        """Sequences and static columns of a 2-D input."""
        if table.layout != "flat":
            raise ValueError(
                "static_columns names columns of a 2-D X, but X is 3-D or a list. Repeat static "
                "features in every token and summarise them with summary='last' and features=..."
            )
        values = joined_tokens(table)
        static = chosen_columns(self.static_columns, "static_columns", values.shape[1])
        rest = np.delete(values, static, axis=1)
        if rest.shape[1] == 0:
            raise ValueError("static_columns holds every column of X; no sequence is left.")
        sequences = check_sequences(rest, n_tokens=self.n_tokens, token_dim=token_dim, cubic=False)
        return replace(sequences, device=table.device), values[:, static]

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.summary not in _SUMMARIES:
            raise ValueError(
                f"summary must be one of {', '.join(map(repr, _SUMMARIES))}; got {self.summary!r}."
            )
        check_scalar(self.n_components, "n_components", Integral, min_val=1)

    def _names_out(self, names: np.ndarray) -> list[str]:
        # Names of tokens that sat in several columns are lost: features of a token are numbered.
        summarised = np.arange(0)
        if self.summary != "constant":
            summarised = chosen_columns(self.features, "features", self.token_dim_)
        summaries = [f"query_x{j}" for j in summarised]
        if self.summary == "cosine":
            orders = range(self.n_components + 1)
            summaries = [f"{name}_cos{k}" for name in summaries for k in orders]
        static: list[str] = []
        if self.static_columns is not None:
            columns = chosen_columns(self.static_columns, "static_columns", len(names))
            static = [f"static_{name}" for name in names[columns]]
        own = [f"x{j}" for j in range(self.token_dim_)]
        token = [*own, "query_constant", *summaries, *static]
        n_tokens = self._n_tokens_fitted + 1
        return [name for t in range(n_tokens) for name in with_token_suffix(token, n_tokens, t)]
