"""The loss over the epochs of a fit by stochastic gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla.plotting._pyplot import import_pyplot


class LossCurveDisplay:
    """Training and held-out loss against epochs.

    It is recommended to use :meth:`from_estimator`.

    Parameters
    ----------
    loss_curve : sequence of float
        Training loss per epoch.
    validation_loss_curve : sequence of float, default=()
        Held-out loss per epoch.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the last plot.
    figure_ : matplotlib Figure
        Figure of the last plot.

    Examples
    --------
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.plotting import LossCurveDisplay
    >>> X, y = make_linear_attention(n_samples=100, random_state=0)
    >>> model = MHLARegressor(solver="sgd", max_iter=5, random_state=0).fit(X, y)
    >>> LossCurveDisplay.from_estimator(model).ax_.get_xlabel()
    'epoch'
    """

    ax_: Any
    figure_: Any

    def __init__(self, loss_curve: Any, validation_loss_curve: Any = ()) -> None:
        self.loss_curve = loss_curve
        self.validation_loss_curve = validation_loss_curve

    @classmethod
    def from_estimator(cls, estimator: Any, *, ax: Any = None) -> LossCurveDisplay:
        """Draw the curves of a fitted model.

        Parameters
        ----------
        estimator : MHLARegressor or MHLAClassifier
            Fitted with ``solver="sgd"``.
        ax : matplotlib Axes, default=None
            Axes to draw on; None makes a new figure.

        Returns
        -------
        LossCurveDisplay
            The display, already drawn.

        Raises
        ------
        ValueError
            If the model was not fitted by stochastic gradients.
        ImportError
            If matplotlib is not installed.
        """
        check_is_fitted(estimator)
        if not hasattr(estimator, "loss_curve_"):
            raise ValueError(
                f"This {type(estimator).__name__} has no loss_curve_: it was fitted by "
                f"method {estimator.method_!r}, which has no epochs."
            )
        return cls(estimator.loss_curve_, estimator.validation_loss_curve_).plot(ax)

    def plot(self, ax: Any = None) -> LossCurveDisplay:
        """Draw.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; None makes a new figure.

        Returns
        -------
        LossCurveDisplay
            This object.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        if ax is None:
            ax = import_pyplot(type(self).__name__).subplots()[1]
        for curve, label in [
            (self.loss_curve, "training"),
            (self.validation_loss_curve, "held out"),
        ]:
            if len(curve):
                ax.plot(np.arange(1, len(curve) + 1), curve, label=label)
        ax.set(xlabel="epoch", ylabel="half the mean squared residual", yscale="log")
        ax.legend()
        self.ax_, self.figure_ = ax, ax.figure
        return self
