"""Normal equations of the heads against Jacobians written out column by column.

The model is bilinear, so the column of the Jacobian for one entry of ``V`` is the model with that
entry set to one and all others to zero (and likewise for ``Q``): no finite differences.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads, coef_to_tensor, heads_to_coef
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.solvers import LeastSquaresProblem
from sklearn_mhla.solvers._head_equations import (
    CoefficientEquations,
    MomentEquations,
    RowEquations,
    directional_derivatives,
)

N_HEADS, N_OUTPUTS, D = 3, 2, 4
P = D * D * (D + 1) // 2
ROUNDING = 1e-12


def heads():
    return Heads(*reference.make_heads(N_HEADS, N_OUTPUTS, D))


def coefficient_jacobian(at):
    """Columns: V ordered (a, h, j), then Q ordered (h, k, l). Rows: (a, p)."""
    columns = []
    for a in range(N_OUTPUTS):
        for h, j in np.ndindex(N_HEADS, D):
            unit = np.zeros_like(at.value)
            unit[h, a, j] = 1.0
            columns.append(heads_to_coef(unit, at.key_query).ravel())
    for index in np.ndindex(at.key_query.shape):
        unit = np.zeros_like(at.key_query)
        unit[index] = 1.0
        columns.append(heads_to_coef(at.value, unit).ravel())
    return np.stack(columns, axis=1)


def dense(equations):
    """The Gauss-Newton matrix and the gradient in the order of ``coefficient_jacobian``."""
    size = N_HEADS * D
    split = N_OUTPUTS * size
    matrix = np.zeros((split + size * D,) * 2)
    for a in range(N_OUTPUTS):
        block = slice(a * size, (a + 1) * size)
        matrix[block, block] = equations.value_matrix
        matrix[block, split:] = equations.mixed[a]
        matrix[split:, block] = equations.mixed[a].T
    matrix[split:, split:] = equations.query_matrix
    return matrix, np.concatenate([equations.value_gradient.ravel(), equations.query_gradient])


def check(loss, at, residual, jacobian):
    equations = loss.equations(at)
    matrix, gradient = dense(equations)
    half_squares = 0.5 * residual @ residual
    assert equations.loss == pytest.approx(half_squares, rel=ROUNDING)
    assert loss.loss(at) == pytest.approx(half_squares, rel=ROUNDING)
    assert reference.relative_error(matrix, jacobian.T @ jacobian) < ROUNDING
    assert reference.relative_error(equations.matrix(), jacobian.T @ jacobian) < ROUNDING
    assert reference.relative_error(gradient, jacobian.T @ residual) < ROUNDING


def test_distance_of_coefficients():
    at, target = heads(), np.random.default_rng(0).standard_normal((N_OUTPUTS, P))
    residual = (at.coefficients() - target).ravel()
    check(CoefficientEquations(coef_to_tensor(target, D)), at, residual, coefficient_jacobian(at))


@pytest.mark.parametrize("rank", [P, 5])
def test_metric_of_moments(rank):
    random = np.random.default_rng(0)
    at, target = heads(), random.standard_normal((N_OUTPUTS, P))
    root = random.standard_normal((rank, P))
    lifted = np.kron(np.eye(N_OUTPUTS), root)
    residual = lifted @ (at.coefficients() - target).ravel()
    loss = MomentEquations(root.T @ root, target, D)
    check(loss, at, residual, lifted @ coefficient_jacobian(at))


@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", ["last", "causal", "full", "full ragged"])
@pytest.mark.parametrize("backend", [NumpyBackend(), TorchBackend("cpu")], ids=["numpy", "torch"])
def test_rows(backend, rows, weighted, fit_intercept, alpha):
    random = np.random.default_rng(0)
    lengths = [5] * 12 if rows == "full" else random.integers(1, 7, size=12)
    sequences = reference.make_ragged(lengths, D)
    output = "last" if rows == "last" else "sequence"
    design = Design(
        check_sequences(sequences),
        backend,
        output=output,
        causal=rows == "causal",
        rescale=False,
    )
    targets = random.standard_normal((design.n_rows, N_OUTPUTS))
    weights = random.uniform(0.1, 2.0, design.n_rows) if weighted else None
    problem = LeastSquaresProblem(
        design,
        backend.asarray(targets),
        None if weights is None else backend.asarray(weights),
        fit_intercept,
    )
    at = heads()
    features = np.array(
        [
            reference.isometric_features(*pair)
            for sequence in sequences
            for pair in reference.states_and_queries(sequence, output, rows == "causal")
        ]
    )
    weight = np.ones(design.n_rows) if weights is None else weights
    if fit_intercept:
        features = features - np.average(features, axis=0, weights=weight)
        targets = targets - np.average(targets, axis=0, weights=weight)
    root = np.sqrt(weight)[:, None]
    lifted = np.concatenate(
        [
            np.kron(np.eye(N_OUTPUTS), root * features),
            np.sqrt(alpha) * np.eye(N_OUTPUTS * P),
        ]
    )
    residual = lifted @ at.coefficients().ravel()
    residual[: targets.size] -= (root * targets).T.ravel()
    check(RowEquations(problem, alpha), at, residual, lifted @ coefficient_jacobian(at))


@pytest.mark.parametrize("rows", ["last", "causal", "full"])
@pytest.mark.parametrize("backend", [NumpyBackend(), TorchBackend("cpu")], ids=["numpy", "torch"])
def test_directional_derivatives(backend, rows):
    """The model is bilinear: along ``dV`` alone its change is the model with ``dV`` for ``V``."""
    sequences = reference.make_ragged([3, 1, 4, 2], D)
    options = {"output": "last" if rows == "last" else "sequence", "causal": rows == "causal"}
    design = Design(check_sequences(sequences), backend, rescale=False, **options)
    at, count = heads(), 5
    random = np.random.default_rng(0)
    directions = Heads(*(random.standard_normal((count, *part.shape)) for part in at))
    found = np.empty((design.n_rows, N_OUTPUTS, count))
    for block in design.blocks():
        found[block.rows] = backend.to_numpy(directional_derivatives(block, at, directions))
    for k, (value, key_query) in enumerate(zip(*directions, strict=True)):
        expected = reference.predict_heads(value, at.key_query, sequences, **options)
        expected = expected + reference.predict_heads(at.value, key_query, sequences, **options)
        assert reference.relative_error(found[:, :, k], expected) < ROUNDING
