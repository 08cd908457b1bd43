"""Heads as heat maps."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted, check_scalar

from sklearn_mhla.plotting._pyplot import import_pyplot

_MAX_LABELS = 24  # names on an axis that can still be read


class HeadsDisplay:
    r"""Value and key-query matrices of a model, one row of pictures per head.

    A head computes :math:`V_h S Q_h q`: the column of ``Q_h`` that belongs to a feature of the
    query says which combination of features it asks for, and ``V_h`` what is read out of the
    tokens that match. Heads can be multiplied by ``c`` and ``1 / c``; here both matrices of a head
    have the same norm. Heads are ordered by it, largest first. It is recommended to use
    :meth:`from_estimator`.

    Parameters
    ----------
    value : ndarray of shape (n_heads, n_outputs, d)
        Value matrices.
    key_query : ndarray of shape (n_heads, d, d)
        Fused key-query matrices.
    feature_names : sequence of str, default=None
        Names of the features of a token; None numbers them.
    output_names : sequence of str, default=None
        Names of the outputs; None numbers them.

    Attributes
    ----------
    axes_ : ndarray of matplotlib Axes, shape (n_shown, 2)
        Axes of the last plot: value matrix and key-query matrix of every head.
    figure_ : matplotlib Figure
        Figure of the last plot.

    See Also
    --------
    AttentionDisplay : Which token attends to which.

    Examples
    --------
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.plotting import HeadsDisplay
    >>> X, y = make_linear_attention(n_samples=200, n_heads=1, random_state=0)
    >>> display = HeadsDisplay.from_estimator(MHLARegressor(n_heads=1).fit(X, y))
    >>> display.axes_.shape
    (1, 2)
    """

    axes_: Any
    figure_: Any

    def __init__(
        self,
        value: np.ndarray,
        key_query: np.ndarray,
        *,
        feature_names: Any = None,
        output_names: Any = None,
    ) -> None:
        self.value = value
        self.key_query = key_query
        self.feature_names = feature_names
        self.output_names = output_names

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        feature_names: Any = None,
        output_names: Any = None,
        max_heads: int = 4,
    ) -> HeadsDisplay:
        """Draw the heads of a fitted model.

        Parameters
        ----------
        estimator : MHLARegressor, MHLARegressorCV or MHLAClassifier
            Fitted.
        feature_names : sequence of str, default=None
            Names of the features of a token; None takes ``feature_names_in_`` if every row was
            a single token, else numbers.
        output_names : sequence of str, default=None
            Names of the outputs; None takes the classes of a classifier, else numbers.
        max_heads : int, default=4
            How many heads to draw at most.

        Returns
        -------
        HeadsDisplay
            The display, already drawn.

        Raises
        ------
        ValueError
            If names and sizes do not match.
        ImportError
            If matplotlib is not installed.
        """
        check_is_fitted(estimator)
        names = getattr(estimator, "feature_names_in_", None)
        if feature_names is None and names is not None and len(names) == estimator.token_dim_:
            feature_names = names
        classes = getattr(estimator, "classes_", None)
        if output_names is None and classes is not None and len(classes) == len(estimator.coef_):
            output_names = classes
        display = cls(
            estimator.value_,
            estimator.key_query_,
            feature_names=feature_names,
            output_names=output_names,
        )
        return display.plot(max_heads=max_heads)

    def plot(self, *, max_heads: int = 4) -> HeadsDisplay:
        """Draw.

        Parameters
        ----------
        max_heads : int, default=4
            How many heads to draw at most.

        Returns
        -------
        HeadsDisplay
            This object.

        Raises
        ------
        ValueError
            If names and sizes do not match.
        ImportError
            If matplotlib is not installed.
        """
        check_scalar(max_heads, "max_heads", Integral, min_val=1)
        _, n_outputs, d = self.value.shape
        features = _names(self.feature_names, d, "feature_names", "x")
        outputs = _names(self.output_names, n_outputs, "output_names", "y")
        norms = _norm(self.value) * _norm(self.key_query)
        order = np.argsort(-norms, kind="stable")[:max_heads]
        pyplot = import_pyplot(type(self).__name__)
        n_shown = max(1, len(order))
        height = 2.6 + 0.08 * d
        figure, axes = pyplot.subplots(
            n_shown, 2, figsize=(7.5, height * n_shown), squeeze=False, layout="constrained"
        )
        for row, head in zip(axes, order, strict=False):
            size = np.sqrt(norms[head])
            share = f"{norms[head] / norms.sum():.0%}" if norms.any() else "0%"
            pictures = [
                (self.value[head], f"value, head {head} ({share})", outputs, "output", "token"),
                (self.key_query[head], f"key-query, head {head}", features, "token", "query"),
            ]
            for ax, (matrix, title, names, ylabel, xlabel) in zip(row, pictures, strict=True):
                norm = np.linalg.norm(matrix)
                scaled = matrix * (size / norm) if norm else matrix
                limit = np.abs(scaled).max() or 1.0
                picture = ax.imshow(scaled, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
                figure.colorbar(picture, ax=ax)
                ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
                _label(ax.yaxis, names)
                _label(ax.xaxis, features, rotation=90)
        self.axes_, self.figure_ = axes, figure
        return self


def _norm(matrices: np.ndarray) -> np.ndarray:
    norms: np.ndarray = np.sqrt((matrices**2).sum(axis=(1, 2)))
    return norms


def _names(given: Any, size: int, parameter: str, letter: str) -> list[str]:
    if given is None:
        return [f"{letter}{i}" for i in range(size)]
    if len(given) != size:
        raise ValueError(f"{parameter} must have {size} names; got {len(given)}.")
    return [str(name) for name in given]


def _label(axis: Any, names: list[str], rotation: float = 0.0) -> None:
    """Names at the ticks, thinned out where there are many."""
    step = -(-len(names) // _MAX_LABELS)
    axis.set_ticks(range(0, len(names), step), names[::step], rotation=rotation, fontsize="small")
