"""Append to every token where it stands in its sequence."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from sklearn.utils.validation import check_scalar

from sklearn_mhla.preprocessing._base import (
    TokenTransformer,
    in_input_form,
    joined_tokens,
    with_token_suffix,
)

_KINDS = ("cosine", "sinusoidal", "linear", "onehot")


class PositionFeatures(TokenTransformer):
    r"""Append features of the position, and a constant, to every token.

    The state of linear attention is a sum over tokens and does not depend on their order. With
    position features it contains sums like :math:`\sum_t x_t f_k(t)`: the model then sees the
    shape of a sequence. The constant gives the model its terms of lower degree.

    Parameters
    ----------
    kind : {"cosine", "sinusoidal", "linear", "onehot"}, default="cosine"
        With positions :math:`t = 0, \dots, T - 1`:

        * "cosine": :math:`\cos(\pi k (t + 1/2) / T)` for ``k = 1 .. n_components``, the basis of
          the discrete cosine transform. Sequences of different lengths are stretched onto each
          other.
        * "sinusoidal": :math:`\sin(\omega_k t), \cos(\omega_k t)` with :math:`\omega_k =
          10000^{-k / n}`, ``k = 0 .. n - 1``, ``n = n_components`` (Vaswani et al., "Attention Is
          All You Need", 2017, section 3.5).
        * "linear": one feature that rises from -1 to 1 along a sequence.
        * "onehot": one feature per position, as many as the longest sequence of the fit has.
    n_components : int, default=4
        Number of features for "cosine", of frequencies for "sinusoidal".
    constant : bool, default=True
        Whether to append a one before them.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds; None means that a row is a single token.

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
    QueryToken : Append the token at which the sequence is read.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.preprocessing import PositionFeatures
    >>> PositionFeatures("linear").fit_transform(np.zeros((1, 3, 1)))
    array([[[ 0.,  1., -1.],
            [ 0.,  1.,  0.],
            [ 0.,  1.,  1.]]])
    """

    def __init__(
        self,
        kind: str = "cosine",
        n_components: int = 4,
        *,
        constant: bool = True,
        n_tokens: int | None = None,
    ) -> None:
        self.kind = kind
        self.n_components = n_components
        self.constant = constant
        self.n_tokens = n_tokens

    def transform(self, X: Any) -> Any:
        """Append the features.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts, tokens of the fitted width.

        Returns
        -------
        ndarray, torch.Tensor or list
            In the form of ``X``, float64, with wider tokens.

        Raises
        ------
        ValueError
            For "onehot", if a sequence is longer than any at fit.
        """
        sequences = self._check_new(X)
        longest = int(sequences.lengths.max())
        if self.kind == "onehot" and longest > self._n_tokens_fitted:
            raise ValueError(
                f"X has a sequence of {longest} tokens, but kind='onehot' knows only the "
                f"{self._n_tokens_fitted} positions of the fit; use kind='cosine' or "
                "'sinusoidal' for sequences of any length."
            )
        tokens = np.hstack([joined_tokens(sequences), self._features(sequences.lengths)])
        return in_input_form(tokens, sequences.lengths, sequences)

    def _features(self, lengths: np.ndarray) -> np.ndarray:
        """Appended features of all tokens, one sequence below the other."""
        position, length = positions(lengths), np.repeat(lengths, lengths)
        blocks = [np.ones((len(position), 1))] if self.constant else []
        if self.kind == "cosine":
            blocks.append(cosines(lengths, np.arange(1, self.n_components + 1)))
        elif self.kind == "sinusoidal":
            frequency = 10000.0 ** (-np.arange(self.n_components) / self.n_components)
            angle = np.outer(position, frequency)
            blocks.extend([np.sin(angle), np.cos(angle)])
        elif self.kind == "linear":
            blocks.append((2.0 * position - (length - 1))[:, None])
            blocks[-1] /= np.maximum(length - 1, 1)[:, None]
        else:
            blocks.append(np.eye(self._n_tokens_fitted)[position])
        return np.hstack(blocks)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.kind not in _KINDS:
            raise ValueError(
                f"kind must be one of {', '.join(map(repr, _KINDS))}; got {self.kind!r}."
            )
        check_scalar(self.n_components, "n_components", Integral, min_val=1)

    def _names_out(self, names: np.ndarray) -> list[str]:
        if self.kind == "cosine":
            added = [f"cos{k}" for k in range(1, self.n_components + 1)]
        elif self.kind == "sinusoidal":
            frequencies = range(self.n_components)
            added = [f"{wave}{k}" for wave in ("sin", "cos") for k in frequencies]
        elif self.kind == "linear":
            added = ["position"]
        else:
            added = [f"position{t}" for t in range(self._n_tokens_fitted)]
        added = (["constant"] if self.constant else []) + added
        tokens = names.reshape(self._n_tokens_fitted, -1)
        return [
            name
            for t, own in enumerate(tokens)
            for name in [*own, *with_token_suffix(added, len(tokens), t)]
        ]


def positions(lengths: np.ndarray) -> np.ndarray:
    """Position of every token in its sequence, one sequence below the other, (total,)."""
    first = np.cumsum(lengths) - lengths
    position: np.ndarray = np.arange(int(lengths.sum())) - np.repeat(first, lengths)
    return position


def cosines(lengths: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """``cos(pi k (t + 1/2) / T)`` at every token for all orders ``k``, (total, n_orders)."""
    phase = np.pi * (positions(lengths) + 0.5) / np.repeat(lengths, lengths)
    basis: np.ndarray = np.cos(np.outer(phase, orders))
    return basis
