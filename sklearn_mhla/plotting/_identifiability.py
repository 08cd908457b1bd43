"""Certificates: spectrum and coverage."""

from __future__ import annotations

from typing import Any

import numpy as np

from sklearn_mhla._pivoted_cholesky import COVERED
from sklearn_mhla.identifiability import IdentifiabilityCertificate, certify_identifiable
from sklearn_mhla.plotting._pyplot import import_pyplot

_KINDS = ("spectrum", "coverage")
# Residuals below are drawn there; a logarithm has no zero.
_SMALLEST_RESIDUAL = 1e-17


class IdentifiabilityDisplay:
    """What a certificate says, as a picture.

    The spectrum of the second moment, or how far inputs are outside the span of the training
    features. It is recommended to use :meth:`from_certificate` or :meth:`from_data`.

    Parameters
    ----------
    certificate : IdentifiabilityCertificate
        The certificate.
    residual : ndarray of shape (n,), default=None
        Squared relative residuals of inputs whose coverage is to be shown.

    Attributes
    ----------
    ax_ : matplotlib Axes
        Axes of the last plot.
    figure_ : matplotlib Figure
        Figure of the last plot.

    See Also
    --------
    certify_identifiable : Makes certificates.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla.plotting import IdentifiabilityDisplay
    >>> X = np.random.default_rng(0).standard_normal((200, 5, 3))
    >>> display = IdentifiabilityDisplay.from_data(X)
    >>> display.ax_.get_ylabel()
    'eigenvalue of the second moment'
    """

    ax_: Any
    figure_: Any

    def __init__(
        self, certificate: IdentifiabilityCertificate, *, residual: np.ndarray | None = None
    ) -> None:
        self.certificate = certificate
        self.residual = residual

    @classmethod
    def from_certificate(
        cls,
        certificate: IdentifiabilityCertificate,
        X: Any = None,
        *,
        kind: str = "spectrum",
        ax: Any = None,
    ) -> IdentifiabilityDisplay:
        """Draw a certificate.

        Parameters
        ----------
        certificate : IdentifiabilityCertificate
            The certificate.
        X : array-like or list of arrays, default=None
            Inputs whose coverage is to be shown; needed for ``kind="coverage"``.
        kind : {"spectrum", "coverage"}, default="spectrum"
            What to draw; see :meth:`plot`.
        ax : matplotlib Axes, default=None
            Axes to draw on; None makes a new figure.

        Returns
        -------
        IdentifiabilityDisplay
            The display, already drawn.

        Raises
        ------
        ValueError
            If ``kind`` is unknown, or "coverage" without inputs.
        ImportError
            If matplotlib is not installed.
        """
        residual = None
        if X is not None:
            found = certificate.residual(X)
            residual = np.concatenate([np.ravel(part) for part in found])
        return cls(certificate, residual=residual).plot(ax, kind=kind)

    @classmethod
    def from_data(
        cls, X: Any, X_new: Any = None, *, kind: str = "spectrum", ax: Any = None, **options: Any
    ) -> IdentifiabilityDisplay:
        """Certify inputs and draw the certificate.

        Parameters
        ----------
        X : array-like or list of arrays
            Training inputs.
        X_new : array-like or list of arrays, default=None
            Inputs whose coverage is to be shown; needed for ``kind="coverage"``.
        kind : {"spectrum", "coverage"}, default="spectrum"
            What to draw; see :meth:`plot`.
        ax : matplotlib Axes, default=None
            Axes to draw on; None makes a new figure.
        **options : dict
            Passed to :func:`certify_identifiable`.

        Returns
        -------
        IdentifiabilityDisplay
            The display, already drawn.

        Raises
        ------
        ValueError
            If an input or an option is invalid.
        ImportError
            If matplotlib is not installed.
        """
        return cls.from_certificate(certify_identifiable(X, **options), X_new, kind=kind, ax=ax)

    def plot(self, ax: Any = None, *, kind: str = "spectrum") -> IdentifiabilityDisplay:
        """Draw.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Axes to draw on; None makes a new figure.
        kind : {"spectrum", "coverage"}, default="spectrum"
            "spectrum" draws the eigenvalues of the second moment in descending order, the
            level of rounding, a proven lower bound if there is one, and the null space as a
            shaded area. "coverage" draws a histogram of the squared relative residuals of inputs
            and the level up to which they count as covered.

        Returns
        -------
        IdentifiabilityDisplay
            This object.

        Raises
        ------
        ValueError
            If ``kind`` is unknown, or "coverage" without residuals.
        ImportError
            If matplotlib is not installed.
        """
        if kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, _KINDS))}; got {kind!r}.")
        if kind == "coverage" and self.residual is None:
            raise ValueError("kind='coverage' needs inputs whose coverage is to be shown.")
        if ax is None:
            ax = import_pyplot(type(self).__name__).subplots()[1]
        if kind == "spectrum":
            self._plot_spectrum(ax)
        else:
            self._plot_coverage(ax, np.asarray(self.residual))
        self.ax_, self.figure_ = ax, ax.figure
        return self

    def _plot_spectrum(self, ax: Any) -> None:
        certificate = self.certificate
        rank, p = certificate.rank, certificate.n_features
        ax.set(
            xlabel="index",
            ylabel="eigenvalue of the second moment",
            title=f"{certificate.verdict}: rank {rank} of {p}",
            xlim=(0, p + 1),
        )
        if rank:
            ax.set_yscale("log")
            values = certificate.eigenvalues[:rank]
            ax.plot(np.arange(1, rank + 1), values, ".", label="eigenvalues")
            ax.axhline(
                certificate.tol * values[0], color="0.5", linestyle="--", label="level of rounding"
            )
        if certificate.lower_bound > 0.0:
            ax.axhline(
                certificate.lower_bound, color="C2", linestyle=":", label="proven lower bound"
            )
        if rank < p:
            ax.axvspan(rank + 0.5, p + 0.5, color="C3", alpha=0.15, label=f"zero ({p - rank})")
        ax.legend()

    def _plot_coverage(self, ax: Any, residual: np.ndarray) -> None:
        covered = residual <= COVERED**2
        bins = np.logspace(np.log10(_SMALLEST_RESIDUAL), 0.0, 52)
        ax.hist(np.maximum(residual, _SMALLEST_RESIDUAL), bins=bins)
        ax.axvline(COVERED**2, color="0.5", linestyle="--", label="covered up to here")
        ax.set(
            xscale="log",
            xlabel="squared relative residual",
            ylabel="inputs",
            title=f"{covered.sum()} of {len(residual)} inputs covered",
        )
        ax.legend()
