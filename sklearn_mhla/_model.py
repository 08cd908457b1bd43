"""What every fitted model can do, however it was fitted: predict, score, show its heads."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla._backend import Array, as_input_kind, backend_for, import_torch, is_dask
from sklearn_mhla._fitting import design_of
from sklearn_mhla._heads import Heads, svd_heads
from sklearn_mhla._minimal_heads import minimal_heads
from sklearn_mhla._targets import check_sample_weights, check_targets
from sklearn_mhla._tokens import (
    Rows,
    Sequences,
    check_sequences,
    compare_features,
    describe_columns,
    rows_of_positive_weight,
    store_columns,
)

# What a convex fit finds; `partial_fit` leaves it to be found when it is first asked for.
SOLVED = (
    "coef_",
    "intercept_",
    "_heads",
    "method_",
    "n_iter_",
    "rank_",
    "loss_",
    "gradient_norm_",
    "dual_gap_",
    "_ridge",
)
# What the next fit forgets.
_OF_ONE_FIT = (
    *SOLVED,
    "loss_curve_",
    "validation_loss_curve_",
    "_optimizer",
    "_moments",
    "_unsolved",
    "_posterior",
)


class LinearAttentionModel(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Base of the estimators: from input to validated rows, from ``coef_`` to predictions.

    Subclasses have the parameters that say how a sequence is read (``n_tokens``, ``output``,
    ``causal``, ``state``), ``heads`` and ``device``; their `fit` ends in `_store`.
    """

    n_tokens: int | None
    output: str
    causal: bool
    state: str
    heads: str
    device: str | None

    coef_: np.ndarray
    intercept_: np.ndarray
    token_dim_: int
    _heads: Heads | None
    _n_outputs: int
    _target_ndim: int
    _rows_are_flat: bool

    # scikit-learn shows parameter descriptions only where it can link to documentation.
    _doc_link_module = "sklearn_mhla"
    _doc_link_template = "https://arxiv.org/abs/2410.10101"

    def predict(self, X: Any) -> Any:
        """Evaluate the model.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts. The token width must be that of the fit;
            the number of tokens is free for 3-D input and lists.

        Returns
        -------
        ndarray, or torch.Tensor if X holds tensors, or list of these, or dask.array.Array
            Predictions in float64, shaped like the ``y`` of `fit`. A list for
            ``output="sequence"`` if ``X`` is a list. Of a Dask collection a Dask array, which is
            computed on request.
        """
        check_is_fitted(self)
        if is_dask(X):
            from sklearn_mhla import distributed

            return distributed.predict(self, X)
        sequences = self._check_new(X)
        return self._shaped(self._predict_rows(sequences), sequences)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Coefficient of determination, averaged over outputs.

        For ``output="sequence"`` every position counts as one observation.

        Parameters
        ----------
        X : array-like or list of arrays
            Sequences in any form that `fit` accepts.
        y : array-like
            True targets, in the form that `fit` accepts.
        sample_weight : array-like of shape (n_samples,), default=None
            Weight of each sequence.

        Returns
        -------
        float
            1 is perfect, 0 is as good as the mean of ``y``.
        """
        from sklearn.metrics import r2_score  # a fifth of this package's import time

        check_is_fitted(self)
        if is_dask(X):
            from sklearn_mhla import distributed

            return distributed.score(self, X, y, sample_weight)
        sequences = self._check_new(X)
        targets, _ = check_targets(y, sequences, self.output, type(self).__name__)
        weights = check_sample_weights(sample_weight, len(sequences))
        if weights is not None and self.output == "sequence":
            weights = np.repeat(weights, sequences.lengths)
        return float(r2_score(targets, self._predict_rows(sequences), sample_weight=weights))

    def to_torch(self) -> Any:
        """The fitted model as a torch module.

        Returns
        -------
        MultiHeadLinearAttention
            From :mod:`sklearn_mhla.interop`, in float64 on the CPU; its parameters are copies of
            ``value_``, ``key_query_`` and ``intercept_``, and it computes what `predict` does.

        Raises
        ------
        ImportError
            If torch is not installed.
        """
        check_is_fitted(self)
        import_torch("to_torch()")
        from sklearn_mhla.interop._module import module_of

        return module_of(self, self._computed_heads("value_"))

    def _validated(
        self, X: Any, y: Any, sample_weight: Any, refit: bool = True
    ) -> tuple[Rows, dict[str, Any]]:
        """Rows that count, and the attributes to store once they have been fitted."""
        if not refit:
            compare_features(self, X)
        sequences = check_sequences(
            X, n_tokens=self.n_tokens, token_dim=None if refit else self.token_dim_
        )
        targets, target_ndim = check_targets(y, sequences, self.output, type(self).__name__)
        weights = check_sample_weights(sample_weight, len(sequences))
        if not refit and (targets.shape[1], target_ndim) != (self._n_outputs, self._target_ndim):
            raise ValueError(
                f"y has {targets.shape[1]} output(s) (a target of {target_ndim} dimension(s)), but "
                f"this model was fitted on {self._n_outputs} ({self._target_ndim} dimension(s))."
            )
        attributes = describe_columns(X, sequences) if refit else {}
        attributes.update(token_dim_=sequences.token_dim, _target_ndim=target_ndim)
        attributes["_n_outputs"] = targets.shape[1]
        return rows_of_positive_weight(sequences, targets, weights, self.output), attributes

    def _store(self, attributes: dict[str, Any]) -> Self:
        """Set fitted attributes, all at once, and forget those of an earlier fit."""
        for name in _OF_ONE_FIT:
            self.__dict__.pop(name, None)
        store_columns(self, attributes)
        return self

    @property
    def value_(self) -> np.ndarray:
        """Value matrices, shape (`n_heads_`, n_outputs, d)."""
        return self._computed_heads("value_").value

    @property
    def key_query_(self) -> np.ndarray:
        """Fused key-query matrices, shape (`n_heads_`, d, d)."""
        return self._computed_heads("key_query_").key_query

    @property
    def n_heads_(self) -> int:
        """Number of heads."""
        return len(self._computed_heads("n_heads_").value)

    def _computed_heads(self, attribute: str) -> Heads:
        """Heads of the fitted coefficients; seconds of work at worst, so done when asked for."""
        if not hasattr(self, "coef_"):
            raise AttributeError(
                f"This {type(self).__name__} is not fitted yet, so it has no {attribute}; call fit "
                "first."
            )
        if self._heads is None:
            convert = svd_heads if self.heads == "svd" else minimal_heads
            self._heads = convert(self.coef_, self.token_dim_)
        return self._heads

    def _shaped(self, rows: np.ndarray, sequences: Sequences) -> Any:
        """Outputs (rows, m) in the form of the targets and the kind of the input."""
        if self._target_ndim == 0:
            rows = rows[:, 0]
        if self.output == "sequence":
            if sequences.layout == "list":
                parts = np.split(rows, np.cumsum(sequences.lengths)[:-1])
                return [as_input_kind(part, sequences.device) for part in parts]
            rows = rows.reshape(len(sequences), -1, *rows.shape[1:])
        return as_input_kind(rows, sequences.device)

    def _check_new(self, X: Any) -> Sequences:
        compare_features(self, X)
        return check_sequences(X, n_tokens=self.n_tokens, token_dim=self.token_dim_)

    def _predict_rows(self, sequences: Sequences) -> np.ndarray:
        backend = backend_for(self.device, sequences.device, fall_back=True)
        design = design_of(self, sequences, backend, rescale=False)
        rows: Array = design.matvec(design.backend.asarray(self.coef_))
        predictions: np.ndarray = design.backend.to_numpy(rows)
        predictions += self.intercept_
        return predictions

    def __dir__(self) -> list[str]:
        """Names of attributes; the heads are listed once computed.

        Displays of estimators evaluate every listed attribute.
        """
        computed = vars(self).get("_heads") is not None
        hidden = () if computed else ("value_", "key_query_", "n_heads_")
        names = (name for name in object.__dir__(self) if name not in hidden)
        return [name for name in names if hasattr(self, name)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags
