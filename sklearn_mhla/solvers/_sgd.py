r"""Mini-batch Adam on the heads, the baseline that closed-form solutions are compared with.

The loss is that of the convex solvers, with the coefficients ``W`` written as heads:

.. math:: \frac{1}{2 \sum_i w_i} \Big( \sum_i w_i \| y_i - b - f(Z_i) \|^2 + \alpha \| W \|_F^2
          \Big), \qquad W = \sum_h vec(V_h) \, vec(Q_h)^T .

A step forms ``W``, one product of the stacked heads; predictions and the gradient ``G`` in ``W``
are two products with the states of the batch; ``G`` times the heads are the gradients in the
heads. The cost of a step hardly depends on the number of heads.

Adam follows Kingma and Ba, "Adam: A Method for Stochastic Optimization", algorithm 1. Warm-up,
cosine decay and clipping are those of the published experiments (Yau et al., arXiv 2410.10101,
section 5); everything runs in the standard units of :class:`StandardUnits`, so that a learning
rate means the same for all data.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from tqdm import tqdm

from sklearn_mhla._backend import Array
from sklearn_mhla._features import adjoint_block, pair_indices, pair_scale, predict_block
from sklearn_mhla._heads import Heads
from sklearn_mhla.solvers._base import LeastSquaresProblem
from sklearn_mhla.solvers._mini_batches import Batch, Samples, StandardUnits

_DECAY_FIRST, _DECAY_SECOND, _EPSILON = 0.9, 0.999, 1e-8
_CLIP = 5.0  # largest norm of a gradient
_WARM_UP = 0.1  # of all steps
_FIRST_RATE, _LAST_RATE = 1e-3, 1e-2  # of the learning rate
# Typical size of a prediction before the first step. Small starts find the minimum more often: two
# heads of two reached it from 3 seeds of 3, from 2 of 3 at 0.1 (d=4, 200 epochs).
_START = 0.01
_LARGEST_PENALTY = 1e100
_DIVERGED = 1.1  # times the loss of a constant model
_EVALUATION_NUMBERS = 2**22  # in the largest array of an evaluation without gradient


@dataclass(frozen=True)
class SGDOptions:
    """What a run needs to know beside the data.

    Attributes
    ----------
    n_heads : int
    learning_rate : float
        Largest step of Adam, in standard units.
    batch_size : int
        Sequences per step.
    max_iter : int
        Passes over the data.
    tol : float
        Relative decrease of the held-out loss that counts as progress.
    n_iter_no_change : int
        Passes without progress after which training stops.
    validation_fraction : float or None
        Part of the sequences to hold out; None trains on all, for ``max_iter`` passes.
    seed : int
        Of the first heads, of the held-out part and of the order of sequences.
    verbose : bool
        Show a progress bar over passes.
    """

    n_heads: int
    learning_rate: float
    batch_size: int
    max_iter: int
    tol: float
    n_iter_no_change: int
    validation_fraction: float | None
    seed: int
    verbose: bool


@dataclass(frozen=True)
class SGDSolution:
    """Result of a run.

    Attributes
    ----------
    heads : Heads
        In the units of the problem (rescaled tokens and targets), like the intercept.
    intercept : ndarray of shape (m,)
    loss : float
        Half the weighted residual sum of squares plus half the penalty, at the end, in the units
        of the user, like the curves.
    loss_curve : list of float
        The same per unit of weight, averaged over each pass while the heads moved.
    validation_curve : list of float
        Half the weighted mean squared residual of the held-out part after each pass.
    optimizer : dict
        NumPy arrays and numbers from which :func:`continue_sgd` goes on.
    """

    heads: Heads
    intercept: np.ndarray
    loss: float
    loss_curve: list[float]
    validation_curve: list[float]
    optimizer: dict[str, Any]


def fit_sgd(
    problem: LeastSquaresProblem,
    alpha: float,
    options: SGDOptions,
    start: tuple[Heads, np.ndarray] | None = None,
) -> SGDSolution:
    """Train for ``max_iter`` passes, or until the held-out loss no longer falls.

    Parameters
    ----------
    problem : LeastSquaresProblem
        On a torch backend.
    alpha : float
        Penalty on the squared norm of the coefficients.
    options : SGDOptions
    start : tuple of Heads and ndarray of shape (m,), optional
        First heads and intercept, in the units of the problem; random heads if None.

    Returns
    -------
    SGDSolution

    Warns
    -----
    ConvergenceWarning
        If the loss ended well above that of a constant model or was not finite on the way.
    """
    random = np.random.default_rng(options.seed)
    units = StandardUnits.of(problem)
    kept, held_out = _split(len(problem.design.sequences), options.validation_fraction, random)
    training = Samples(problem, units, kept)
    validation = Samples(problem, units, held_out) if len(held_out) else None
    model = _Model(training, alpha, options.n_heads)
    model.begin(start, random)

    n_steps = options.max_iter * training.n_batches(options.batch_size)
    best_loss, best_heads, idle, finite = math.inf, model.flat.clone(), 0, True
    loss_curve: list[float] = []
    validation_curve: list[float] = []
    with tqdm(
        total=options.max_iter, desc="training", unit="epoch", disable=not options.verbose
    ) as bar:
        for _ in range(options.max_iter):
            before = model.flat.clone()
            loss = model.run_epoch(training, options, random, n_steps)
            finite = math.isfinite(loss)
            if not finite:
                model.flat.copy_(before)
                break
            loss_curve.append(model.in_given_units(loss))
            bar.set_postfix(loss=f"{loss_curve[-1]:.3g}", refresh=False)
            bar.update()
            if validation is None:
                continue
            held_out_loss = model.mean_loss(validation)
            validation_curve.append(model.in_given_units(held_out_loss))
            idle = 0 if held_out_loss < best_loss * (1.0 - options.tol) else idle + 1
            if held_out_loss < best_loss:
                best_loss = held_out_loss
                best_heads.copy_(model.flat)
            if idle >= options.n_iter_no_change:
                break
    if validation is not None and loss_curve:
        model.flat.copy_(best_heads)
    objective = model.mean_loss(training) + model.penalty()
    _warn_if_diverged(objective, 0.5 * training.mean_square, finite, len(loss_curve), options)
    return model.solution(objective, loss_curve, validation_curve)


def continue_sgd(
    problem: LeastSquaresProblem,
    alpha: float,
    options: SGDOptions,
    optimizer: dict[str, Any] | None = None,
    start: tuple[Heads, np.ndarray] | None = None,
) -> SGDSolution:
    """One pass over the data at a constant learning rate.

    Parameters
    ----------
    problem : LeastSquaresProblem
        On a torch backend.
    alpha : float
    options : SGDOptions
    optimizer : dict, optional
        Where to go on. None takes the units from these data.
    start : tuple of Heads and ndarray of shape (m,), optional
        As for :func:`fit_sgd`; not used if there is an ``optimizer``.

    Returns
    -------
    SGDSolution

    Raises
    ------
    FloatingPointError
        If the loss is not finite.
    """
    if optimizer is None:
        units = StandardUnits.of(problem)
    else:
        units = StandardUnits(*(optimizer[name] for name in _UNITS)).rescaled(
            -problem.design.exponent, -problem.target_exponent
        )
    samples = Samples(problem, units, np.arange(len(problem.design.sequences)))
    model = _Model(samples, alpha, options.n_heads)
    if optimizer is None:
        model.begin(start, np.random.default_rng(options.seed))
    else:
        model.restore(optimizer)
    random = np.random.default_rng((options.seed, model.n_steps))
    loss = model.run_epoch(samples, options, random)
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"The loss is not finite at learning_rate={options.learning_rate:g}; lower it. The "
            "model is what it was before this call of partial_fit."
        )
    objective = model.mean_loss(samples) + model.penalty()
    return model.solution(objective, [model.in_given_units(loss)], [])


_UNITS = ("state_unit", "query_unit", "target_unit", "offset")


class _Model:
    """Heads in standard units, their gradient and the moments of Adam, as flat vectors.

    ``value`` (H, m d), ``key_query`` (H, d^2) and ``bias`` (m,) are views of ``flat``.
    """

    def __init__(self, samples: Samples, alpha: float, n_heads: int) -> None:
        problem, units = samples.problem, samples.units
        self.backend = backend = problem.backend
        self.units = units
        self.exponents = problem.design.exponent, problem.target_exponent
        self.fit_intercept = problem.fit_intercept
        self.total_weight = samples.total_weight
        self.n_heads, self.n_outputs = n_heads, int(problem.targets.shape[1])
        self.token_dim = d = problem.design.token_dim
        size = n_heads * (self.n_outputs * d + d * d) + self.n_outputs
        self.flat, self.gradient = backend.zeros((size,)), backend.zeros((size,))
        self.first, self.second = backend.zeros((size,)), backend.zeros((size,))
        self.n_steps = 0
        self.value, self.key_query, self.bias = self._views(self.flat)
        self._slopes = self._views(self.gradient)

        rows, columns = pair_indices(d)
        position = np.empty((d, d), dtype=np.intp)
        position[rows, columns] = position[columns, rows] = np.arange(len(rows))
        self._upper = backend.index(rows * d + columns)
        self._lower = backend.index(columns * d + rows)
        self._position = backend.index(position.reshape(-1))
        self._half = backend.asarray(0.5 * pair_scale(d)[:, None])
        self._inverse = backend.asarray(1.0 / pair_scale(d)[:, None])
        # The unit of the targets cancels between the penalty and the residuals.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            penalty = np.fmin(alpha / self.total_weight / units.squared(), _LARGEST_PENALTY)
        self._penalty = backend.asarray(penalty.reshape(-1)) if alpha > 0.0 else None

    def begin(self, start: tuple[Heads, np.ndarray] | None, random: np.random.Generator) -> None:
        """A given model, or random heads whose predictions have the typical size ``_START``."""
        d = self.token_dim
        if start is None:
            value = random.standard_normal((self.n_heads, self.n_outputs, d))
            key_query = random.standard_normal((self.n_heads, d, d))
            value *= math.sqrt(_START) / math.sqrt(d * self.n_heads)
            key_query *= math.sqrt(_START) / math.sqrt(d)
            heads, intercept = Heads(value, key_query), np.zeros(self.n_outputs)
        else:
            heads, intercept = self.units.inwards(*start)
        parts = [heads.value.reshape(-1), heads.key_query.reshape(-1), intercept]
        self.flat.copy_(self.backend.asarray(np.concatenate(parts)))

    def restore(self, optimizer: dict[str, Any]) -> None:
        """Go on where an earlier model stopped."""
        if len(optimizer["flat"]) != len(self.flat):
            raise ValueError(
                f"n_heads={self.n_heads} differs from the number of heads trained so far; set it "
                "back or start anew with fit."
            )
        for name in ("flat", "first", "second"):
            getattr(self, name).copy_(self.backend.asarray(optimizer[name]))
        self.n_steps = optimizer["n_steps"]

    def run_epoch(
        self,
        samples: Samples,
        options: SGDOptions,
        random: np.random.Generator,
        n_steps: int | None = None,
    ) -> float:
        """One pass; returns the mean loss on the way.

        ``n_steps`` is the length of the schedule; None keeps the learning rate constant.
        """
        total = self.backend.zeros(())  # stays on the device: one transfer per pass
        for batch, n_sequences in samples.batches(options.batch_size, random):
            factor = len(samples) / (samples.total_weight * n_sequences)
            total += self._evaluate(batch, factor) * (n_sequences / len(samples))
            rate = 1.0 if n_steps is None else _schedule(self.n_steps, n_steps)
            self._step(options.learning_rate * rate)
        return float(total)

    def mean_loss(self, samples: Samples) -> float:
        """Half the weighted mean squared residual."""
        rows = max(1, int(samples.rows_per_sequence))
        batch_size = max(1, _EVALUATION_NUMBERS // (rows * self.n_outputs * self.token_dim))
        coef = self._coef()
        total = 0.0
        for batch, _ in samples.batches(batch_size):
            residual = self._residual(batch, coef)
            total += float((residual**2 * batch.weight).sum())
        return 0.5 * total / samples.total_weight

    def penalty(self) -> float:
        """The penalty's share of the loss."""
        return 0.0 if self._penalty is None else float(self._penalty_loss(self._coef()))

    def in_given_units(self, loss: float) -> float:
        """A loss in the units that the user's targets came in."""
        with np.errstate(over="ignore"):
            return float(np.ldexp(loss * self.units.target**2, 2 * self.exponents[1]))

    def solution(
        self, objective: float, loss_curve: list[float], validation_curve: list[float]
    ) -> SGDSolution:
        """The model in the units of the design, and all it takes to go on."""
        to_numpy, d = self.backend.to_numpy, self.token_dim
        heads = Heads(
            to_numpy(self.value).reshape(self.n_heads, self.n_outputs, d),
            to_numpy(self.key_query).reshape(self.n_heads, d, d),
        )
        units = self.units.rescaled(*self.exponents)
        optimizer = {
            "flat": np.array(to_numpy(self.flat)),
            "first": np.array(to_numpy(self.first)),
            "second": np.array(to_numpy(self.second)),
            "n_steps": self.n_steps,
        }
        optimizer.update(
            zip(_UNITS, (units.state, units.query, units.target, units.offset), strict=True)
        )
        return SGDSolution(
            *self.units.outwards(heads, to_numpy(self.bias)),
            self.in_given_units(objective) * self.total_weight,
            loss_curve,
            validation_curve,
            optimizer,
        )

    def _views(self, flat: Array) -> tuple[Array, Array, Array]:
        n_value = self.n_heads * self.n_outputs * self.token_dim
        n_query = self.n_heads * self.token_dim**2
        return (
            flat[:n_value].reshape(self.n_heads, -1),
            flat[n_value : n_value + n_query].reshape(self.n_heads, -1),
            flat[n_value + n_query :],
        )

    def _coef(self) -> Array:
        """Packed coefficients (m, p): ``scale_jk / 2 (W[a,j,k,l] + W[a,k,j,l])``."""
        tensor = (self.value.mT @ self.key_query).reshape(self.n_outputs, -1, self.token_dim)
        coef = tensor.index_select(1, self._upper)
        coef += tensor.index_select(1, self._lower)
        coef *= self._half
        return coef.reshape(self.n_outputs, -1)

    def _residual(self, batch: Batch, coef: Array) -> Array:
        residual = predict_block(batch.state, batch.query, coef)
        residual -= batch.target
        residual += self.bias
        return residual

    def _penalty_loss(self, coef: Array) -> Array:
        return 0.5 * (coef**2 * self._penalty).sum()

    def _evaluate(self, batch: Batch, factor: float) -> Array:
        """Loss on a mini-batch; its gradient is left in ``gradient``."""
        coef = self._coef()
        residual = self._residual(batch, coef)
        weighted = residual * (batch.weight * factor)
        loss = 0.5 * (weighted * residual).sum()
        slope = adjoint_block(batch.state, batch.query, weighted)
        if self._penalty is not None:
            loss += self._penalty_loss(coef)
            slope += coef * self._penalty
        # Back to the symmetric (m d) x (d^2) unfolding.
        slope = slope.reshape(self.n_outputs, -1, self.token_dim) * self._inverse
        slope = slope.index_select(1, self._position).reshape(-1, self.token_dim**2)
        value_slope, query_slope, bias_slope = self._slopes
        value_slope.copy_(self.key_query @ slope.mT)
        query_slope.copy_(self.value @ slope)
        if self.fit_intercept:
            bias_slope.copy_(weighted.sum((0, 1)))
        return loss

    def _step(self, rate: float) -> None:
        """Clip the gradient and take one step of Adam."""
        self.n_steps += 1
        norm = self.gradient.norm()
        self.gradient *= _CLIP / norm.clamp(min=_CLIP)
        self.first.lerp_(self.gradient, 1.0 - _DECAY_FIRST)
        self.second.mul_(_DECAY_SECOND)
        self.second.addcmul_(self.gradient, self.gradient, value=1.0 - _DECAY_SECOND)
        first_bias = 1.0 - _DECAY_FIRST**self.n_steps
        second_bias = 1.0 - _DECAY_SECOND**self.n_steps
        size = (self.second / second_bias).sqrt_()
        size += _EPSILON
        self.flat.addcdiv_(self.first, size, value=-rate / first_bias)


def _schedule(step: int, n_steps: int) -> float:
    """Linear warm-up, then half a cosine."""
    warm_up = _WARM_UP * n_steps
    if step < warm_up:
        return _FIRST_RATE + (1.0 - _FIRST_RATE) * step / warm_up
    progress = (step - warm_up) / (n_steps - warm_up)
    return _LAST_RATE + (1.0 - _LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _split(
    n_samples: int, fraction: float | None, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences to train on and sequences to hold out, both ascending."""
    if fraction is None:
        return np.arange(n_samples), np.arange(0)
    n_held_out = max(1, round(fraction * n_samples))
    if n_held_out >= n_samples:
        raise ValueError(
            f"early_stopping=True with validation_fraction={fraction:g} leaves nothing to train "
            f"on: there are {n_samples} sequences."
        )
    order = random.permutation(n_samples)
    return np.sort(order[n_held_out:]), np.sort(order[:n_held_out])


def _warn_if_diverged(
    objective: float, constant: float, finite: bool, n_epochs: int, options: SGDOptions
) -> None:
    """Compare with the model that is constant, which training should not end above."""
    if finite and objective <= _DIVERGED * max(constant, 0.5):  # 0.5 for targets of unit size
        return
    if finite:
        found = f"the loss is {objective:.3g} where a constant model has {constant:.3g}"
    else:
        found = "the loss is not finite; the heads are those of the epoch before"
    warnings.warn(
        f"Stochastic gradients diverged: after {n_epochs} epochs {found} (targets of unit size). "
        f"Lower learning_rate={options.learning_rate:g}.",
        ConvergenceWarning,
        stacklevel=5,
    )
