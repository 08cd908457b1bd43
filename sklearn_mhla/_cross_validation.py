"""Scores on data that a fit has not seen, for every penalty and number of heads.

One eigendecomposition per training set serves all penalties. Moments are accumulated once, over
the smallest parts from which all training sets are put together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.utils import check_random_state, indexable

from sklearn_mhla._backend import Array, backend_for
from sklearn_mhla._fitting import fit_l2, most_heads, problem_of, size_of
from sklearn_mhla._moments import Moments
from sklearn_mhla._scoring import Scorer, Scoring
from sklearn_mhla._tokens import Rows
from sklearn_mhla.solvers import (
    DualSolver,
    LeastSquaresProblem,
    MomentProblem,
    PrimalSolver,
    ProblemSize,
    RidgePath,
    Units,
    best_heads,
    choose_solver,
    leave_one_out,
)

# Default penalties relative to the mean eigenvalue of the Gram matrix. Cubic features have widely
# spread eigenvalues, so most of the grid lies below 1; at its lower end squaring the condition
# number still leaves half the digits.
RELATIVE_ALPHAS = np.logspace(-8.0, 2.0, 21)

# Numbers held at a time: coefficients or predictions of several penalties.
_BUDGET = 2**25

Split = tuple[np.ndarray, np.ndarray]


def splits_of(splitter: Any, X: Any, y: Any, groups: Any, sample_weight: Any) -> list[Split]:
    """Training and test sequences of every split, as positions among those of positive weight.

    Parameters
    ----------
    splitter : cross-validation generator of scikit-learn
    X, y, groups
        As given to `fit`.
    sample_weight : array-like, float or None
        Valid weights; sequences of weight zero take part in no split.

    Raises
    ------
    ValueError
        If a split has nothing to train on or nothing to test on.
    """
    X, y, groups = indexable(X, y, groups)
    n_samples = len(X)
    kept = np.ones(n_samples, dtype=bool)
    if sample_weight is not None:
        kept = np.broadcast_to(np.asarray(sample_weight) > 0, (n_samples,))
    position = np.cumsum(kept) - 1
    splits = []
    for number, parts in enumerate(splitter.split(X, y, groups)):
        chosen = [np.arange(n_samples)[part] for part in parts]
        train, test = (position[part[kept[part]]] for part in chosen)
        for name, part in (("training", train), ("test", test)):
            if len(part) == 0:
                raise ValueError(
                    f"Split {number} of cv has no {name} sequences of positive weight. Use fewer "
                    "splits, or a splitter that shuffles."
                )
        splits.append((train, test))
    if not splits:
        raise ValueError("cv yields no splits.")
    return splits


def fit_cross_validated(
    model: Any,
    rows: Rows,
    splits: list[Split] | None,
    scorer: Scorer | None,
    target_ndim: int,
) -> dict[str, Any]:
    """Fitted attributes of a cross-validated model.

    Parameters
    ----------
    model : estimator
        Supplies parameters.
    rows : Rows
    splits : list of (ndarray, ndarray) or None
        Training and test sequences; None leaves out one sequence at a time.
    scorer : callable or None
        ``scorer(estimator, predictions, targets)``; None is the negative mean squared error.
    target_ndim : int
        Dimensions of one row's target.
    """
    backend = backend_for(model.device, rows.sequences.device)
    size = size_of(rows)
    wanted = head_counts(model.n_heads)
    counts = [n if n is not None and n < most_heads(size) else None for n in wanted]
    if splits is None:
        _check_leave_one_out(counts, len(rows.sequences))
    kind = _choose_solver(model, size, backend.available_memory(), counts)
    problem, units = problem_of(model, backend, rows, bool(model.verbose))
    training_sets = None if splits is None else _TrainingSets(problem, splits, kind)
    solver = kind(problem)
    alphas, shown = _penalties(model.alphas, solver, units)
    per_target = model.alpha_per_target and target_ndim > 0
    scoring = Scoring(problem, rows, scorer, per_target=per_target, squeeze=target_ndim == 0)
    if training_sets is None:
        scores = _leave_one_out_scores(problem, solver, backend.asarray(alphas), scoring)
        scores = np.repeat(scores[None, :, None], len(counts), axis=0)
    else:
        scores = _fold_scores(model, training_sets, counts, alphas, scoring)
    scores = scores.reshape(-1, *scores.shape[2:])
    means, best = _choose(scores)
    at_head, at_alpha = np.divmod(best, len(alphas))
    found = {
        "alpha_": shown[at_alpha],
        "alphas_": shown,
        "best_score_": scoring.in_units(np.take_along_axis(means, best[None], 0)[0]),
        "cv_results_": _results(scores, means, scoring, wanted, shown, splits is None),
    }
    if model.verbose:
        print(f"[{type(model).__name__}] alpha={found['alpha_']}, score={found['best_score_']}")
    fits = {
        alpha: fit_l2(model, problem, units, kind, counts[int(at_head.max())], float(alpha))
        for alpha in np.unique(alphas[at_alpha])
    }
    return found | _combine([fits[alpha] for alpha in np.atleast_1d(alphas[at_alpha])])


def head_counts(n_heads: Any) -> list[int | None]:
    """The numbers of heads to try."""
    return [n_heads] if n_heads is None or np.ndim(n_heads) == 0 else list(n_heads)


def _check_leave_one_out(counts: list[int | None], n_sequences: int) -> None:
    restricted = [count for count in counts if count is not None]
    if restricted:
        raise ValueError(
            "cv=None leaves out one sequence at a time in closed form, which exists only without a "
            f"limit on heads; got n_heads={restricted[0]}. Set cv, for example cv=5."
        )
    if n_sequences < 2:
        raise ValueError(
            "cv=None leaves out one sequence at a time and needs at least two of positive weight; "
            f"got n_samples={n_sequences}."
        )


def _choose_solver(
    model: Any, size: ProblemSize, available: int, counts: list[int | None]
) -> type[PrimalSolver] | type[DualSolver]:
    solver, reason = choose_solver(
        model.method,
        size,
        available,
        max((n for n in counts if n is not None), default=None),
        iterative=False,
    )
    order = size.n_features if solver is PrimalSolver else size.n_rows
    needed = 8 * 4 * order**2  # the matrix, its eigenvectors and the workspace of LAPACK
    if solver not in (PrimalSolver, DualSolver) or needed > available:
        raise MemoryError(
            f"Cross-validation in closed form takes an eigendecomposition of order {order} and "
            f"{needed / 1e9:.3g} GB of memory, of which {available / 1e9:.3g} GB are available. "
            "Use GridSearchCV with MHLARegressor, fewer rows or narrower tokens."
        )
    if model.verbose:
        print(f"[{type(model).__name__}] method={solver.name!r}: {reason}")
    return PrimalSolver if solver is PrimalSolver else DualSolver


def _penalties(
    given: Any, solver: PrimalSolver | DualSolver, units: Units
) -> tuple[np.ndarray, np.ndarray]:
    """Penalties in the units of the problem and in those of the user."""
    if given is not None:
        shown = np.atleast_1d(np.asarray(given, dtype=np.float64))
        return np.array([units.alpha(alpha) for alpha in shown]), shown
    largest_rank = max(1, solver.problem.largest_rank)
    # Constant features leave only rounding errors once they are centred.
    trace = solver.trace if solver.trace > 1e-12 * solver.offset else solver.offset
    alphas = RELATIVE_ALPHAS * (trace / largest_rank if trace > 0.0 else 1.0)
    return alphas, np.ldexp(alphas, 6 * units.tokens)


def _combine(fits: list[dict[str, Any]]) -> dict[str, Any]:
    """The attributes of one fit, or output ``j`` of the ``j``-th of several."""
    attributes = dict(fits[0])
    if len(fits) > 1:
        for name in ("coef_", "intercept_"):
            attributes[name] = np.array([fit[name][j] for j, fit in enumerate(fits)])
        for name in ("n_iter_", "rank_"):
            attributes[name] = max(fit[name] for fit in fits)
    return attributes


def _leave_one_out_scores(
    problem: LeastSquaresProblem,
    solver: PrimalSolver | DualSolver,
    alphas: Array,
    scoring: Scoring,
) -> np.ndarray:
    blocks = leave_one_out(problem, solver, alphas)
    if scoring.scorer is None:
        squares = sum(scoring.squares(rows, errors) for rows, errors in blocks)
        return scoring.of_squares(squares, problem.total_weight)
    errors = problem.backend.empty((problem.design.n_rows, len(alphas), problem.size.n_outputs))
    for rows, of_rows in blocks:
        errors[rows] = of_rows
    return scoring.score(np.arange(problem.design.n_rows), errors)


def _fold_scores(
    model: Any,
    training_sets: _TrainingSets,
    counts: list[int | None],
    alphas: np.ndarray,
    scoring: Scoring,
) -> np.ndarray:
    """Scores of shape (numbers of heads, alphas, splits) and, if per target, outputs."""
    problem, splits = training_sets.problem, training_sets.splits
    shape: tuple[int, ...] = (len(counts), len(alphas), len(splits))
    if scoring.per_target:
        shape = (*shape, problem.size.n_outputs)
    scores = np.empty(shape)
    for k, (_, test) in enumerate(splits):
        solver = training_sets.solver(k)
        path = RidgePath(solver)
        design, rows = problem.design.take(test, verbose=False), problem.design.rows_of(test)
        targets = problem.targets[rows] + problem.target_mean
        for i, count in enumerate(counts):
            if count is None:
                solutions = _unrestricted(path, alphas, len(rows))
            else:
                solutions = _few_heads(path, alphas, count, model)
            for at, coef in solutions:
                predicted = design.matvec(coef.reshape(-1, coef.shape[2]))
                errors = targets[:, None] - predicted.reshape(len(rows), *coef.shape[:2])
                errors -= solver.intercept(coef)
                scores[i, at, k] = scoring.score(rows, errors)
    return scores


Solutions = Iterator[tuple[np.ndarray, Array]]


def _unrestricted(path: RidgePath, alphas: np.ndarray, n_test: int) -> Solutions:
    """Positions of penalties and their coefficients (k, m, p), as many as memory should hold."""
    problem = path.solver.problem
    step = max(1, _BUDGET // (problem.size.n_outputs * (problem.size.n_features + n_test)))
    for start in range(0, len(alphas), step):
        at = np.arange(start, min(start + step, len(alphas)))
        yield at, path.coefficients(problem.backend.asarray(alphas[at]))


def _few_heads(path: RidgePath, alphas: np.ndarray, n_heads: int, model: Any) -> Solutions:
    """As :func:`_unrestricted`; from the strongest penalty on, each starts from the one before."""
    problem = path.solver.problem
    start = None
    for at in np.argsort(-alphas, kind="stable"):
        coef = path.coefficients(problem.backend.asarray(alphas[at : at + 1]))[0]
        run = best_heads(
            path.head_loss(coef, float(alphas[at])),
            problem.backend.to_numpy(coef),
            problem.size.token_dim,
            n_heads,
            max_iter=model.max_iter,
            tol=model.tol,
            random=check_random_state(model.random_state),
            start=start,
        )
        start = run.heads
        yield np.array([at]), problem.backend.asarray(run.heads.coefficients())[None]


class _TrainingSets:
    """The training sets of all splits.

    For the primal form moments of the smallest parts of the data are kept where the splits share
    few of them: k-fold cross-validation then passes over the rows once. They are added up, as
    subtracting a fold from the total would cancel where that fold holds most of the sum.
    """

    def __init__(self, problem: LeastSquaresProblem, splits: list[Split], kind: type) -> None:
        self.problem, self.splits = problem, splits
        self.in_dual_form = kind is DualSolver
        self.parts: list[Moments] = []
        counts = np.zeros((len(problem.design.sequences), len(splits)), dtype=np.intp)
        for k, (train, _) in enumerate(splits):
            np.add.at(counts[:, k], train, 1)
        self.patterns, part = np.unique(counts, axis=0, return_inverse=True)
        if self._parts_are_few():
            part = part.reshape(-1)
            for j in range(len(self.patterns)):
                self.parts.append(self._moments(np.flatnonzero(part == j)))
            problem.moments = sum(self.parts[1:], start=self.parts[0])

    def solver(self, k: int) -> PrimalSolver | DualSolver:
        """Solver of the ``k``-th training set."""
        problem, train = self.problem, self.splits[k][0]
        if self.in_dual_form:
            rows = problem.design.rows_of(train)
            return DualSolver(
                LeastSquaresProblem(
                    problem.design.take(train),
                    problem.targets[rows] + problem.target_mean,
                    None if problem.weights is None else problem.weights[rows][:, 0],
                    problem.fit_intercept,
                    problem.target_exponent,
                )
            )
        if self.parts:
            chosen = [self.parts[j] for j in self.patterns[:, k].nonzero()[0]]
            moments = sum(chosen[1:], start=chosen[0])
        else:
            moments = self._moments(train)
        return PrimalSolver(MomentProblem(moments, problem.fit_intercept))

    def _moments(self, chosen: np.ndarray) -> Moments:
        problem = self.problem
        rows = problem.design.rows_of(chosen)
        return Moments.from_design(
            problem.design.take(chosen),
            problem.targets[rows],
            None if problem.weights is None else problem.weights[rows],
            target_exponent=problem.target_exponent,
            target_shift=problem.target_mean,
        )

    def _parts_are_few(self) -> bool:
        n_parts, n_splits = self.patterns.shape
        # Rows that are drawn with replacement count several times.
        if self.in_dual_form or n_parts > 2 * n_splits or self.patterns.max() > 1:
            return False
        size = 2 * self.problem.size.n_features**2 * n_parts  # a quarter of p^2 numbers each
        return bool(size < self.problem.backend.available_memory() // 2)


def _choose(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean scores of all candidates, and the position of the first best (one per output)."""
    means = scores.mean(1)
    if not np.isfinite(means).all():
        if not np.isfinite(means).any(0).all():
            raise ValueError(
                "No candidate has a finite score. A metric may be undefined on so small test "
                "sets (R^2 needs two samples); use scoring=None or fewer splits."
            )
        warnings.warn(
            f"Some scores are not finite and count as the worst: {means}",
            UserWarning,
            stacklevel=4,
        )
        means = np.where(np.isfinite(means), means, -np.inf)
    return means, np.asarray(means.argmax(0))


def _results(
    scores: np.ndarray,
    means: np.ndarray,
    scoring: Scoring,
    counts: list[int | None],
    alphas: np.ndarray,
    left_one_out: bool,
) -> dict[str, np.ndarray]:
    """``cv_results_``: one entry per candidate, all penalties for each number of heads."""
    heads = np.empty(len(counts), dtype=object)
    heads[:] = counts
    results = {
        "param_n_heads": np.repeat(heads, len(alphas)),
        "param_alpha": np.tile(alphas, len(counts)),
    }
    if not left_one_out:
        for k in range(scores.shape[1]):
            results[f"split{k}_test_score"] = scoring.in_units(scores[:, k])
    results["mean_test_score"] = scoring.in_units(scores.mean(1))
    if not left_one_out:
        results["std_test_score"] = scoring.in_units(scores.std(1))
    results["rank_test_score"] = 1 + (means[:, None] < means).sum(1).astype(np.int32)
    return results
