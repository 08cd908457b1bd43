"""Which token attends to which."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted, check_scalar

from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.plotting._pyplot import import_pyplot


class AttentionDisplay:
    r"""Scores :math:`z_s^T Q_h z_t` of tokens for queries, one heat map per head.

    The output is :math:`\sum_h \sum_s (z_s^T Q_h q) V_h z_s`: a token enters with its score. Given
    tokens that hold nothing but their position, the picture is the kernel of position against
    position that the model has learned. It is recommended to use :meth:`from_estimator`.

    Parameters
    ----------
    scores : ndarray of shape (n_heads, n_queries, n_tokens)
        Scores, largest head first.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes, shape (n_shown,)
        Axes of the last plot.
    figure_ : matplotlib Figure
        Figure of the last plot.

    See Also
    --------
    HeadsDisplay : The matrices themselves.

    Examples
    --------
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.plotting import AttentionDisplay
    >>> X, y = make_linear_attention(n_samples=200, n_tokens=8, random_state=0)
    >>> model = MHLARegressor(n_heads=1).fit(X, y)
    >>> AttentionDisplay.from_estimator(model, X[0]).scores.shape
    (1, 8, 8)
    """

    axes_: Any
    figure_: Any

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores

    @classmethod
    def from_estimator(
        cls, estimator: Any, tokens: Any, queries: Any = None, *, max_heads: int = 4
    ) -> AttentionDisplay:
        """Draw the scores of one sequence.

        Parameters
        ----------
        estimator : MHLARegressor, MHLARegressorCV or MHLAClassifier
            Fitted.
        tokens : array-like of shape (n_tokens, d)
            One sequence.
        queries : array-like of shape (n_queries, d), default=None
            Queries that read it; None takes the tokens themselves.
        max_heads : int, default=4
            How many heads to draw at most.

        Returns
        -------
        AttentionDisplay
            The display, already drawn.

        Raises
        ------
        ValueError
            If the tokens have another width than those of the fit.
        ImportError
            If matplotlib is not installed.
        """
        check_is_fitted(estimator)
        read, asking = (
            np.asarray(check_sequences([values], token_dim=estimator.token_dim_).data[0])
            for values in (tokens, tokens if queries is None else queries)
        )
        value, key_query = estimator.value_, estimator.key_query_
        norms = np.linalg.norm(value, axis=(1, 2)) * np.linalg.norm(key_query, axis=(1, 2))
        order = np.argsort(-norms, kind="stable")
        # Both matrices of a head to the same norm, so that scores can be compared.
        size = np.linalg.norm(key_query, axis=(1, 2))
        scale = np.divide(np.sqrt(norms), size, out=np.zeros_like(size), where=size > 0.0)
        scores = np.einsum("sk,hkl,tl->hts", read, key_query * scale[:, None, None], asking)
        return cls(scores[order]).plot(max_heads=max_heads)

    def plot(self, *, max_heads: int = 4) -> AttentionDisplay:
        """Draw.

        Parameters
        ----------
        max_heads : int, default=4
            How many heads to draw at most.

        Returns
        -------
        AttentionDisplay
            This object.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        check_scalar(max_heads, "max_heads", Integral, min_val=1)
        pyplot = import_pyplot(type(self).__name__)
        shown = self.scores[:max_heads]
        figure, axes = pyplot.subplots(
            1,
            max(1, len(shown)),
            figsize=(3.8 * max(1, len(shown)), 3.4),
            squeeze=False,
            layout="constrained",
        )
        for h, (ax, scores) in enumerate(zip(axes[0], shown, strict=False)):
            limit = np.abs(scores).max() or 1.0
            picture = ax.imshow(scores, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
            figure.colorbar(picture, ax=ax)
            ax.set(title=f"scores, head {h}", xlabel="token", ylabel="query")
        self.axes_, self.figure_ = axes[0], figure
        return self
