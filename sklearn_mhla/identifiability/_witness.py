"""Two models that agree on every training row and differ elsewhere.

Such a pair proves that the rows do not identify the model: if one of the two minimises the
empirical risk, so does the other. Without a limit on heads a null vector of the second moment
gives one. With few heads there is no formula; the search

1. walks from a minimiser along directions that the rows do not notice to first order
   (:mod:`sklearn_mhla.identifiability._jacobian`) and returns to the training predictions by
   Levenberg-Marquardt steps, which damp the motion along the predictions only as far as needed;
2. fits the training predictions anew, from the solution of least squares cut to its leading
   heads and from random starts.

What is found is verified before it is reported, with other arithmetic than that of the search:
outputs of both models are computed from the raw tokens as attention, score by score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads, coef_to_tensor, function_distance, tensor_to_heads
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._attention import attention_outputs
from sklearn_mhla.identifiability._jacobian import (
    LocalIdentifiability,
    random_heads,
    tangent_test,
)
from sklearn_mhla.identifiability._standardized import StandardizedDesign
from sklearn_mhla.solvers import SOLVERS, LeastSquaresProblem, choose_solver, fit_few_heads
from sklearn_mhla.solvers._head_equations import RowEquations
from sklearn_mhla.solvers._low_rank import best_values, levenberg_marquardt

# What counts as a witness: on the rows, relative to the outputs; as functions, relative to the
# coefficients; and on the input that is returned, relative to the outputs there.
AGREEMENT = 1e-9
DIFFERENCE = 1e-3
_RANK_TOL = 1e-9

# Lengths of a walk, relative to the model; the longest that can be corrected is best.
_STEPS = (1.0, -1.0, 0.25, -0.25)
_TRIAL_INPUTS = 512
_MOST_TOKENS = 16


@dataclass(frozen=True, repr=False)
class Witness:
    """Two models that agree on all rows and an input on which they differ.

    Attributes
    ----------
    heads, other : Heads
        The models, of the user's tokens.
    X : ndarray of shape (1, n_tokens, d)
        An input on which they differ.
    outputs : ndarray of shape (2, m)
        What the two models say to it (at its last token).
    disagreement : float
        Frobenius norm of the difference of all training predictions relative to the predictions.
    distance : float
        Function distance of the two models relative to the norm of the first, in tokens whose
        coordinates have been brought to about the same size.
    loss : float
        Mean squared training error of ``heads`` relative to the mean square of the targets: zero up
        to rounding if the models fit the rows exactly. Otherwise both are minimisers as far
        as the best loss that was found is the minimum.
    origin : {"null vector", "null direction", "restart"}
        How it was found.
    """

    heads: Heads
    other: Heads
    X: np.ndarray
    outputs: np.ndarray
    disagreement: float
    distance: float
    loss: float
    origin: str

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return (
            f"<Witness ({self.origin}): two models of at most {len(self.other.value)} heads agree "
            f"on all training rows to {self.disagreement:.1e} and differ by {self.distance:.2g} of "
            f"their size; relative training loss {self.loss:.1e}>"
        )


@dataclass(frozen=True, repr=False)
class NoWitness:
    """How hard a search looked that found nothing. This proves nothing.

    Attributes
    ----------
    n_starts : int
        Runs, along null directions and from random starts.
    n_iter : int
        Steps of all runs.
    n_agreeing : int
        Runs that ended at a model that agrees on all rows: they found the same function again.
    largest_distance : float
        The largest relative function distance among those.
    closest : float
        The smallest relative disagreement on the rows among the other runs.
    local : LocalIdentifiability or None
        The Jacobian test at the minimiser; None where null vectors decide.
    """

    n_starts: int
    n_iter: int
    n_agreeing: int
    largest_distance: float
    closest: float
    local: LocalIdentifiability | None

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        if self.local is None:
            if self.n_starts == 0:
                return "<No witness: the features of the rows have full rank>"
            return (
                "<No witness: rows of deficient rank, but no null vector to working accuracy "
                f"(disagreement {self.closest:.1e})>"
            )
        others = self.n_starts - self.n_agreeing
        closest = f" (the closest to {self.closest:.1e})" if others else ""
        return (
            f"<No witness in {self.n_starts} runs of {self.n_iter} steps: {self.n_agreeing} found "
            f"the same function, {others} did not fit the rows{closest}; Jacobian: {self.local!r}>"
        )


_FULL_RANK = NoWitness(0, 0, 0, 0.0, math.inf, None)


def find_witness(
    design: Design,
    targets: np.ndarray | Heads,
    n_heads: int | None = None,
    *,
    n_starts: int = 10,
    max_iter: int = 100,
    tol: float = 1e-8,
    random_state: Any = None,
    verbose: int = 0,
) -> Witness | NoWitness:
    """Search two models that agree on all rows of a design and differ elsewhere.

    Parameters
    ----------
    design : Design
        Rows of weight zero left out.
    targets : ndarray of shape (rows, m), or Heads
        Heads are a teacher of the user's tokens, and its outputs are the targets: is *this* model
        determined by the rows? Targets need not be outputs of any model; then the first model is
        the best fit that the few-head solver finds.
    n_heads : int, optional
        Heads that the two models may have, not fewer than a teacher has. None: no limit.
    n_starts : int
        New starts, and as many random combinations of null directions.
    max_iter : int
        Levenberg-Marquardt steps of every run.
    tol : float
        Relative decrease of the loss below which a run has converged.
    random_state : int, RandomState or None
    verbose : int
        Print a line per run.

    Returns
    -------
    Witness or NoWitness
        True where one was found.

    Raises
    ------
    ValueError
        If the targets are zero on every row, or a teacher has other widths or more heads.

    Warns
    -----
    ConvergenceWarning
        If the fit of the first model did not converge.
    """
    random = check_random_state(random_state)
    if not isinstance(targets, Heads):
        targets = np.asarray(targets, dtype=np.float64)
    n_outputs = _check(design, targets, n_heads)
    standard = StandardizedDesign(design)
    if n_heads is None or n_heads >= min(n_outputs, design.token_dim) * design.token_dim:
        return _unrestricted_witness(standard, targets, random)

    if isinstance(targets, Heads):
        baseline = _Baseline.of_teacher(standard, targets)
    else:
        exponent = math.frexp(np.abs(targets).max())[1]
        scaled = np.ldexp(targets, -exponent)
        best = fit_few_heads(
            _problem(standard, scaled),
            n_heads,
            0.0,
            method=_smaller_system(design),
            max_iter=max_iter,
            tol=tol,
            random=random,
        )
        relative = 2.0 * best.loss / float((scaled**2).sum())
        baseline = _Baseline(standard, best.heads, exponent, relative)
    loss = RowEquations(_problem(standard, baseline.predictions()), 0.0)
    scale = loss.loss(Heads(0.0 * baseline.first.value, baseline.first.key_query))
    local = tangent_test(standard, _padded(baseline.first, n_heads), _RANK_TOL, random)
    comparisons, n_iter = [], 0
    for origin, start in _starts(local, loss, n_heads, n_starts, random):
        run = levenberg_marquardt(loss, start, scale=scale, max_iter=max_iter, tol=tol)
        n_iter += run.n_iter
        comparison = baseline.compare(run.heads)
        comparisons.append(comparison)
        if verbose:
            print(f"[find_witness] {origin}, {run.n_iter} steps: {comparison}")
        found = baseline.witness(run.heads, comparison, origin, random)
        if found is not None:
            return found
    agreeing = [each.distance for each in comparisons if each.disagreement <= AGREEMENT]
    others = [each.disagreement for each in comparisons if each.disagreement > AGREEMENT]
    return NoWitness(
        n_starts=len(comparisons),
        n_iter=n_iter,
        n_agreeing=len(agreeing),
        largest_distance=max(agreeing, default=0.0),
        closest=min(others, default=math.inf),
        local=replace(
            local,
            heads=baseline.in_user_units(local.heads),
            directions=baseline.in_user_units(local.directions),
        ),
    )


def class_witness(
    design: Design, n_heads: int, n_outputs: int = 1, *, random_state: Any = None
) -> Witness | NoWitness:
    """Two models of at most ``n_heads >= d / 2`` heads that agree on all rows.

    A null vector of the second moment is a function with one output that vanishes on all rows. It
    has at most ``d`` heads, so it is the difference of two models with half of them each. If one of
    the two is the teacher, the other fits its targets as well: below full rank the rows do not
    identify every model of the class.

    Parameters
    ----------
    design : Design
        Rows of weight zero left out.
    n_heads : int
        At least ``d / 2``.
    n_outputs : int
    random_state : int, RandomState or None

    Returns
    -------
    Witness or NoWitness
        True unless the features of the rows have full rank.

    Raises
    ------
    ValueError
        If there are fewer than ``d / 2`` heads.
    """
    d = design.token_dim
    if 2 * n_heads < d:
        raise ValueError(f"n_heads must be at least d / 2 = {d / 2:g}; got {n_heads}.")
    random = check_random_state(random_state)
    standard = StandardizedDesign(design)
    null, _ = _null_vector(standard, np.empty((design.n_rows, 0)), random)
    if null is None:
        return _FULL_RANK
    value, key_query = tensor_to_heads(coef_to_tensor(null[None], d))
    value = np.pad(value, [(0, 0), (0, n_outputs - 1), (0, 0)])
    half = (len(value) + 1) // 2
    first, other = Heads(value[:half], key_query[:half]), Heads(-value[half:], key_query[half:])
    return _from_null_vector(_Baseline(standard, first, 0, 0.0), other, random)


@dataclass(frozen=True)
class _Comparison:
    disagreement: float
    distance: float

    def __str__(self) -> str:
        return f"disagreement on the rows {self.disagreement:.1e}, distance {self.distance:.1e}"


@dataclass(frozen=True)
class _Baseline:
    """The first model, in standardised units, its outputs divided by ``2 ** exponent``."""

    standard: StandardizedDesign
    first: Heads
    exponent: int
    loss: float

    @classmethod
    def of_teacher(cls, standard: StandardizedDesign, teacher: Heads) -> _Baseline:
        """A model whose outputs are the targets."""
        baseline = cls(standard, standard.from_user(teacher), 0, 0.0)
        exponent = math.frexp(np.abs(baseline.predictions()).max())[1]
        value = np.ldexp(baseline.first.value, -exponent)
        return cls(standard, Heads(value, baseline.first.key_query), exponent, 0.0)

    def predictions(self) -> np.ndarray:
        """Outputs of the first model at all rows."""
        backend = self.standard.backend
        coef = backend.asarray(self.first.coefficients())
        return np.asarray(backend.to_numpy(self.standard.matvec(coef)))

    def compare(self, other: Heads) -> _Comparison:
        """Disagreement on the rows, from the raw tokens, and distance as functions."""
        first, second = (
            attention_outputs(self.standard, self.in_user_units(model))
            for model in (self.first, other)
        )
        zero = Heads(0.0 * other.value, other.key_query)
        size = max(function_distance(model, zero) for model in (self.first, other))
        distance = function_distance(self.first, other)
        return _Comparison(
            float(_relative_gaps(first[None], second[None])[0]), distance / size if size else 0.0
        )

    def witness(
        self, other: Heads, comparison: _Comparison, origin: str, random: np.random.RandomState
    ) -> Witness | None:
        """The pair with the random input that tells them apart best, if it is a witness."""
        if comparison.disagreement > AGREEMENT or comparison.distance < DIFFERENCE:
            return None
        standard = self.standard
        n_tokens = int(np.clip(np.median(standard.sequences.lengths), 2, _MOST_TOKENS))
        trials = random.standard_normal((_TRIAL_INPUTS, n_tokens, standard.token_dim))
        trials *= np.ldexp(1.0 / np.sqrt(n_tokens), standard.exponent) / standard.units
        inputs = Design(check_sequences(trials), NumpyBackend(), state=standard.state)
        models = [self.in_user_units(model) for model in (self.first, other)]
        outputs = np.stack([attention_outputs(inputs, model) for model in models])
        gaps = _relative_gaps(*outputs[:, :, None])
        best = int(gaps.argmax())
        if gaps[best] < DIFFERENCE:
            return None
        return Witness(
            heads=models[0],
            other=models[1],
            X=trials[best : best + 1],
            outputs=outputs[:, best],
            disagreement=comparison.disagreement,
            distance=comparison.distance,
            loss=self.loss,
            origin=origin,
        )

    def in_user_units(self, heads: Heads) -> Heads:
        """Models, or their changes, of the user's tokens and targets."""
        value, key_query = self.standard.to_user(heads)
        return Heads(np.ldexp(value, self.exponent), key_query)


def _unrestricted_witness(
    standard: StandardizedDesign, targets: np.ndarray | Heads, random: np.random.RandomState
) -> Witness | NoWitness:
    """Without a limit on heads: a null vector of the second moment, added to one output."""
    columns, exponent = np.empty((standard.n_rows, 0)), 0
    if not isinstance(targets, Heads):
        exponent = math.frexp(np.abs(targets).max())[1]
        columns = np.ldexp(targets, -exponent)
    null, coef = _null_vector(standard, columns, random)
    if null is None:
        return _FULL_RANK
    if isinstance(targets, Heads):
        baseline = _Baseline.of_teacher(standard, targets)
        coef = baseline.first.coefficients()
    else:
        heads = tensor_to_heads(coef_to_tensor(coef, standard.token_dim))
        baseline = _Baseline(standard, heads, exponent, 0.0)
        residual = columns - baseline.predictions()
        baseline = replace(baseline, loss=float((residual**2).sum() / (columns**2).sum()))
    other = coef.copy()
    other[0] += null * (np.linalg.norm(coef) / np.linalg.norm(null))
    heads = tensor_to_heads(coef_to_tensor(other, standard.token_dim))
    return _from_null_vector(baseline, heads, random)


def _null_vector(
    standard: StandardizedDesign, targets: np.ndarray, random: np.random.RandomState
) -> tuple[np.ndarray | None, np.ndarray]:
    """A null vector (p,) of the second moment, and least-squares coefficients of targets.

    It is what least squares leaves of a random vector fitted to its own outputs; None if the rank
    is full.
    """
    backend = standard.backend
    trial = random.standard_normal((1, standard.n_features))
    image = backend.to_numpy(standard.matvec(backend.asarray(trial)))
    problem = _problem(standard, np.hstack([image, targets]))
    solver = choose_solver("auto", problem.size, backend.available_memory())[0]
    solution = solver(problem).solve(0.0)
    coef = np.asarray(backend.to_numpy(solution.coef))
    return None if solution.rank == standard.n_features else trial[0] - coef[0], coef[1:]


def _from_null_vector(
    baseline: _Baseline, other: Heads, random: np.random.RandomState
) -> Witness | NoWitness:
    comparison = baseline.compare(other)
    found = baseline.witness(other, comparison, "null vector", random)
    return found or NoWitness(1, 0, 0, 0.0, comparison.disagreement, None)


def _starts(
    local: LocalIdentifiability,
    loss: RowEquations,
    n_heads: int,
    n_starts: int,
    random: np.random.RandomState,
) -> Iterator[tuple[str, Heads]]:
    """Points on null directions, far before near; least squares; random key-query matrices."""
    at, directions = local.heads, local.directions
    size = math.hypot(np.linalg.norm(at.value), np.linalg.norm(at.key_query))
    n_null = len(directions.value)
    for _ in range(n_starts if n_null else 0):
        weights = random.standard_normal(n_null)
        move = Heads(*(np.tensordot(weights, part, 1) for part in directions))
        length = math.hypot(np.linalg.norm(move.value), np.linalg.norm(move.key_query))
        for step in _STEPS:
            factor = step * size / length
            moved = Heads(*(part + factor * change for part, change in zip(at, move, strict=True)))
            yield "null direction", _padded(moved, n_heads)
    design, backend = loss.problem.design, loss.problem.backend
    coef = SOLVERS[_smaller_system(design)](loss.problem).solve(0.0).coef
    tensor = coef_to_tensor(backend.to_numpy(coef), design.token_dim)
    yield "restart", best_values(loss, tensor_to_heads(tensor, n_heads))
    n_outputs, d = tensor.shape[:2]
    for _ in range(n_starts - 1):
        drawn = random_heads(n_heads, n_outputs, d, random)
        start = Heads(0.0 * drawn.value, drawn.key_query / math.sqrt(d))
        yield "restart", best_values(loss, start)


def _smaller_system(design: Design) -> str:
    return "dual" if design.n_rows < design.n_features else "primal"


def _padded(heads: Heads, n_heads: int) -> Heads:
    """The same function with heads of size zero added."""
    missing = [(0, n_heads - len(heads.value)), (0, 0), (0, 0)]
    return Heads(np.pad(heads.value, missing), np.pad(heads.key_query, missing))


def _problem(standard: StandardizedDesign, targets: np.ndarray) -> LeastSquaresProblem:
    return LeastSquaresProblem(standard, standard.backend.asarray(targets), None, False)


def _relative_gaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Norms of ``first[i] - second[i]`` relative to the larger one, (n,); 0 where both are 0."""
    axes = tuple(range(1, first.ndim))
    largest = np.maximum(np.abs(first).max(axes), np.abs(second).max(axes))
    largest = np.where(largest > 0.0, largest, 1.0).reshape((-1,) + (1,) * len(axes))
    first, second = first / largest, second / largest  # squares of extreme outputs overflow
    size = np.sqrt(np.maximum((first**2).sum(axes), (second**2).sum(axes)))
    gaps: np.ndarray = np.sqrt(((first - second) ** 2).sum(axes)) / np.where(size > 0.0, size, 1.0)
    return gaps


def _check(design: Design, targets: np.ndarray | Heads, n_heads: int | None) -> int:
    """The number of outputs."""
    d = design.token_dim
    if isinstance(targets, Heads):
        value, key_query = (np.asarray(part) for part in targets)
        if value.ndim != 3 or value.shape[2] != d or key_query.shape != (len(value), d, d):
            raise ValueError(
                f"A teacher of tokens of width {d} has value (n_heads, m, {d}) and key_query "
                f"(n_heads, {d}, {d}); got {value.shape} and {key_query.shape}."
            )
        if n_heads is not None and n_heads < len(value):
            raise ValueError(
                f"The teacher has {len(value)} heads, so it is no model of n_heads={n_heads}."
            )
        return int(value.shape[1])
    if targets.ndim != 2 or len(targets) != design.n_rows or not np.isfinite(targets).all():
        raise ValueError(
            f"targets must be finite and of shape ({design.n_rows}, m), a row for each row of the "
            f"design; got shape {targets.shape}."
        )
    if not targets.any():
        raise ValueError(
            "targets are zero on every row, where every model with a head of size zero fits. Pass "
            "targets of a model, or a teacher."
        )
    return int(targets.shape[1])
