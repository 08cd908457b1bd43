"""The bound against exact rational arithmetic: never above the smallest eigenvalue, and close."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import reference

from sklearn_mhla import Moments
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._proof import (
    LowerBound,
    eigenvalue_lower_bound,
    residual_bound,
    sums_lower_bound,
)

BACKEND = NumpyBackend()


def bound_of(X, weights=None, backend=BACKEND, **options):
    design = Design(check_sequences(X), backend, **options)
    return eigenvalue_lower_bound(design, None if weights is None else backend.asarray(weights))


def published_matrix(X, **options):
    """``H`` of all rows by NumPy, (rows, p)."""
    return np.array(
        [
            reference.published_features(*pair)
            for sequence in X
            for pair in reference.states_and_queries(sequence, **options)
        ]
    )


def integers(values):
    """Python integers ``k`` and one exponent with ``values = k 2^exponent``."""
    fraction, exponent = np.frexp(values)
    lowest = int(exponent.min())
    shift = (exponent - lowest).astype(object)
    return np.ldexp(fraction, 53).astype(np.int64).astype(object) << shift, lowest - 53


@dataclass(frozen=True)
class ExactMoment:
    """``sum_i w_i H_i H_i^T = gram 2^exponent`` and ``sum_i w_i`` in exact arithmetic."""

    gram: object
    exponent: int
    weight: Fraction
    n_tokens: int

    @classmethod
    def of(cls, X, weights, output="last", causal=True, state="sum"):
        flint = pytest.importorskip("flint")
        tokens, token_exponent = integers(np.asarray(X, dtype=np.float64))
        token_dim = tokens.shape[2]
        left, right = np.triu_indices(token_dim)
        products = tokens[:, :, left] * tokens[:, :, right]
        if output == "last":
            states, queries = products.sum(1)[:, None], tokens[:, -1:]
        else:
            states = np.add.accumulate(products, axis=1)
            states = states if causal else np.repeat(states[:, -1:], tokens.shape[1], axis=1)
            queries = tokens
        features = (states[..., :, None] * queries[..., None, :]).reshape(-1, len(left) * token_dim)
        if weights is None:
            weights = np.ones(len(features))
        factors, weight_exponent = integers(weights)
        weighted = factors[:, None] * features
        gram = flint.fmpz_mat(weighted.T.tolist()) * flint.fmpz_mat(features.tolist())
        total = sum((Fraction(weight) for weight in weights.tolist()), Fraction(0))
        return cls(
            gram,
            6 * token_exponent + weight_exponent,
            total,
            tokens.shape[1] if state == "mean" else 1,
        )

    def exceeds(self, value):
        """Whether all eigenvalues of the second moment are at least ``value``.

        The characteristic polynomial of a symmetric matrix has real roots only; none is negative
        iff the signs of its coefficients alternate (Descartes).
        """
        import flint

        order = self.gram.nrows()
        ratio = Fraction(value) * self.weight * self.n_tokens**2 / Fraction(2) ** self.exponent
        identity = flint.fmpz_mat(
            order, order, [int(i % (order + 1) == 0) for i in range(order**2)]
        )
        shifted = ratio.denominator * self.gram - ratio.numerator * identity
        coefficients = shifted.charpoly().coeffs()
        return all((-1) ** (order - k) * c >= 0 for k, c in enumerate(coefficients))

    def is_definite(self):
        return self.gram.det() != 0


def sequences_near_a_line(random, n_samples, n_tokens):
    direction = random.standard_normal(2)
    distance = 10.0 ** random.uniform(-17, -3)
    along = random.standard_normal((n_samples, n_tokens, 1))
    return along * direction + distance * random.standard_normal((n_samples, n_tokens, 2))


def nearly_equal_columns(random, n_samples, n_tokens):
    X = random.standard_normal((n_samples, n_tokens, 1))
    moved = random.random(X.shape) < 0.5
    return np.concatenate([X, np.where(moved, np.nextafter(X, np.inf), X)], axis=2)


def columns_of_different_size(random, n_samples, n_tokens):
    return random.standard_normal((n_samples, n_tokens, 2)) * [1.0, 10.0 ** random.uniform(-60, 0)]


def small_integers(random, n_samples, n_tokens):
    return random.integers(-2, 3, (n_samples, n_tokens, 2)).astype(float)


def rows_almost_repeated(random, n_samples, n_tokens):
    base = random.standard_normal((min(5, n_samples), n_tokens, 2))
    X = base[random.integers(0, len(base), n_samples)]
    return X * (1.0 + 2.0**-52 * random.integers(-2, 3, X.shape))


def special_values(random, n_samples, n_tokens):
    X = random.standard_normal((n_samples, n_tokens, 2))
    chosen = random.random(X.shape)
    X[chosen < 0.2] = -0.0
    X[chosen > 0.8] = 5e-324 * random.integers(0, 9)
    X[0, 0, 0] = 1.0
    return X


def orthogonal_but_for_rounding(random, n_samples, n_tokens):
    """``S_12 = 0`` exactly, but 2^-60 of what it sums in floating point: singular."""
    small = 2.0**-30
    base = np.array([[1.0 + small, 1.0 + small], [-1.0, 1.0 + 2.0 * small], [-small, small]])
    return base * 2.0 ** random.integers(-3, 4, (n_samples, 1, 2))


def gaussian(random, n_samples, n_tokens):
    return random.standard_normal((n_samples, n_tokens, 2))


KINDS = [
    gaussian,
    sequences_near_a_line,
    nearly_equal_columns,
    columns_of_different_size,
    small_integers,
    rows_almost_repeated,
    special_values,
    orthogonal_but_for_rounding,
]


def random_case(random):
    """Tokens, weights and options of one trial."""
    n_samples, n_tokens = int(random.integers(2, 16)), int(random.integers(1, 5))
    X = KINDS[random.integers(len(KINDS))](random, n_samples, n_tokens)
    if random.random() < 0.2:
        X = X.astype(np.float32).astype(float)
    if random.random() < 0.3:
        X = X * 10.0 ** random.uniform(-99, 99)
    if not 1e-100 < np.abs(X).max() < 1e100:
        X = np.ones_like(X)
    options = {"output": "last", "state": str(random.choice(["sum", "mean"]))}
    if random.random() < 0.2:
        options = {"output": "sequence", "causal": bool(random.random() < 0.5), "state": "sum"}
    n_rows = n_samples * (X.shape[1] if options["output"] == "sequence" else 1)
    weights = 10.0 ** random.uniform(-9, 9, n_rows) if random.random() < 0.3 else None
    return X, weights, options


@pytest.mark.parametrize("seed", range(10))
def test_never_above_the_smallest_eigenvalue(seed):
    random = np.random.default_rng(seed)
    n_proven = 0
    for trial in range(1000):
        X, weights, options = random_case(random)
        bound = bound_of(X, weights, **options)
        n_proven += bound.proven
        if not bound.proven:
            assert bound.value == 0.0  # true of every sum of squares
            continue
        exact = ExactMoment.of(X, weights, **options)
        where = f"seed {seed}, trial {trial}: {bound}, {options}"
        assert exact.exceeds(bound.value), where
        assert exact.is_definite(), where
    assert 200 < n_proven < 800


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_width_one(n_tokens):
    X = reference.make_sequences(0.0, 50, n_tokens, 1)
    bound = bound_of(X)
    assert ExactMoment.of(X, None).exceeds(bound.value)
    assert not ExactMoment.of(X, None).exceeds(bound.value * (1.0 + 1e-3))


@pytest.mark.parametrize("token_dim", [2, 3, 4, 6])
@pytest.mark.parametrize("state", ["sum", "mean"])
def test_close_to_the_eigenvalue(token_dim, state):
    X = reference.make_sequences(0.3, 400, 5, token_dim)
    features = published_matrix(X, state=state)
    singular = np.linalg.svd(features, compute_uv=False)
    bound = bound_of(X, state=state)
    assert bound.proven
    assert 1.0 - 1e-3 < bound.value / (singular[-1] ** 2 / len(features)) < 1.0


def test_beyond_the_dense_order_and_one_block_of_residuals():
    X = reference.make_sequences(0.0, 1500, 5, 10)
    upper = np.triu_indices(10)
    features = np.einsum("na,nl->nal", (X.mT @ X)[:, *upper], X[:, -1]).reshape(len(X), -1)
    singular = np.linalg.svd(features, compute_uv=False)
    assert 1.0 - 1e-3 < bound_of(X).value / (singular[-1] ** 2 / len(X)) < 1.0


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_at_every_position(causal):
    X = reference.make_sequences(0.0, 60, 6, 3)
    features = published_matrix(X, output="sequence", causal=causal)
    eigenvalue = np.linalg.svd(features, compute_uv=False)[-1] ** 2 / len(features)
    assert 1.0 - 1e-3 < bound_of(X, output="sequence", causal=causal).value / eigenvalue < 1.0


def test_ragged_sequences():
    X = reference.make_ragged([2, 5, 3, 9, 1, 4] * 20, 2)
    eigenvalue = np.linalg.svd(published_matrix(X), compute_uv=False)[-1] ** 2 / len(X)
    assert 1.0 - 1e-3 < bound_of(X).value / eigenvalue < 1.0


def test_divides_by_the_sum_of_weights():
    X = reference.make_sequences(0.0, 40, 3, 2)
    counts = np.random.default_rng(0).integers(1, 5, len(X))
    weighted = bound_of(X, counts.astype(float))
    assert weighted.value == pytest.approx(bound_of(np.repeat(X, counts, axis=0)).value, rel=1e-4)


@pytest.mark.parametrize(
    "X",
    [
        pytest.param(reference.make_sequences(0.0, 500, 1, 3), id="one token"),
        pytest.param(reference.make_sequences(0.0, 5, 4, 2), id="fewer rows than features"),
        pytest.param(reference.make_sequences(0.0, 500, 4, 3)[..., [0, 1, 1]], id="equal columns"),
        pytest.param(reference.make_sequences(0.0, 500, 4, 3) * [1.0, 1.0, 0.0], id="zero column"),
        pytest.param(np.zeros((7, 2, 3)), id="zeros"),
        pytest.param(np.ones((1, 1, 2)), id="one row"),
        pytest.param(np.tile(reference.make_sequences(0.0, 4, 4, 2), (99, 1, 1)), id="tiled"),
    ],
)
def test_singular_is_never_proven(X):
    assert bound_of(X) == LowerBound(0.0, False)


@pytest.mark.parametrize("exponent", [-30, 1, 30])
def test_scales_like_the_sixth_power(exponent):
    X = reference.make_sequences(0.0, 100, 4, 2)
    scaled = bound_of(np.ldexp(X, exponent))
    assert scaled.value == pytest.approx(math.ldexp(bound_of(X).value, 6 * exponent), rel=1e-15)


@pytest.mark.parametrize("factor", [2.0**-40, 1e-8, 1e-30])
def test_units_of_a_column_do_not_matter_to_the_proof(factor):
    X = reference.make_sequences(0.2, 100, 4, 2) * [1.0, factor]
    bound = bound_of(X)
    assert bound.proven
    exact = ExactMoment.of(X, None)
    assert exact.exceeds(bound.value)
    assert not exact.exceeds(bound.value * (1.0 + 1e-3))


def test_eigenvalues_that_float64_cannot_hold():
    X = reference.make_sequences(0.0, 100, 4, 2)
    assert bound_of(X * 1e-90) == LowerBound(0.0, True)
    assert bound_of(X * 1e90) == LowerBound(np.finfo(np.float64).max, True)


def test_long_sequences_and_many_rows_lower_the_bound_only_a_little():
    X = reference.make_sequences(0.0, 20, 3000, 2)
    assert bound_of(X).proven
    few = Moments.from_data(reference.make_sequences(0.0, 100, 4, 2))
    values = [sums_lower_bound(few, longest=4).value]
    for few.n_rows in 10**9, 2 * 10**11:
        values.append(sums_lower_bound(few, longest=4).value)
    assert 0.99 * values[0] < values[1] < values[0]
    assert values[2] < 0.9995 * values[0]


def test_from_data_and_from_moments_agree():
    X = reference.make_sequences(0.0, 100, 4, 3)
    moments = Moments.from_data(X)
    assert sums_lower_bound(moments, longest=4) == bound_of(X)
    assert sums_lower_bound(moments, longest=40).value <= bound_of(X).value


def test_merged_moments_of_different_units():
    X = reference.make_sequences(0.0, 120, 4, 2)
    parts = [X[:40], 1e-5 * X[40:80], 300.0 * X[80:]]
    bound = sums_lower_bound(sum(Moments.from_data(part) for part in parts), longest=4)
    exact = ExactMoment.of(np.concatenate(parts), None)
    assert exact.exceeds(bound.value)
    assert not exact.exceeds(bound.value * (1.0 + 1e-3))


def test_too_many_roundings_are_refused():
    moments = Moments.from_data(reference.make_sequences(0.0, 10, 2, 2))
    with pytest.raises(ValueError, match=r"up to 2\*\*38 terms; these moments have n_rows=10 and"):
        sums_lower_bound(moments, longest=3 * 10**11)


def test_tokens_that_were_not_rescaled_are_refused():
    with pytest.raises(ValueError, match="rescale=True"):
        bound_of(reference.make_sequences(5.0, 10, 2, 2), rescale=False)


def test_torch_gives_a_bound_as_good():
    pytest.importorskip("torch")
    X = reference.make_sequences(0.0, 100, 4, 3)
    weights = np.random.default_rng(0).uniform(0.5, 2.0, len(X))
    by_torch = bound_of(X, weights, TorchBackend("cpu"))
    assert by_torch.value == pytest.approx(bound_of(X, weights).value, rel=1e-4)


def exact_norm_square(lower, factor):
    """``||A - L L^T||_F^2`` as a rational number."""
    order = len(lower)
    total = Fraction(0)
    for i in range(order):
        for j in range(i + 1):
            product = sum(
                (Fraction(factor[i, k]) * Fraction(factor[j, k]) for k in range(order)), Fraction(0)
            )
            total += (1 + (i > j)) * (Fraction(lower[i, j]) - product) ** 2
    return total


@pytest.mark.parametrize("distance", [0.0, 1e-15, 1e-3])
@pytest.mark.parametrize("order", [1, 2, 13])
def test_residual_bound_holds(order, distance):
    random = np.random.default_rng(order)
    root = random.standard_normal((order, order + 2))
    lower = np.tril(root @ root.T)
    factor = np.linalg.cholesky(lower) + distance * np.tril(random.random((order, order)))
    bound = residual_bound(lower, factor)
    assert Fraction(bound) ** 2 >= exact_norm_square(lower, factor)
    size = float((factor**2).sum())
    # The diagonal is counted twice.
    assert bound < 1.5 * math.sqrt(exact_norm_square(lower, factor)) + 1e-15 * order * size


def test_residual_bound_looks_at_every_block():
    lower = np.eye(1100)
    factor = np.eye(1100)
    for at in [(0, 0), (700, 3), (1099, 1098), (600, 590)]:
        wrong = factor.copy()
        wrong[at] += 0.5
        assert residual_bound(lower, wrong) > 0.5 > residual_bound(lower, factor)
