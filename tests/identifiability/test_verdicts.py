"""Verdicts on data whose rank is known by algebra.

``p = d^2 (d + 1) / 2`` features ``S_jk q_l``, ``j <= k``. The arguments used below:

* *generic*: for Gaussian tokens, two or more per sequence, features are linearly independent
  polynomials of the coordinates, so ``n`` rows have rank ``min(n, p)``.
* *cubic*: one token per sequence leaves the cubic monomials, ``C(d + 2, 3)`` of them.
* *subspace*: tokens in a subspace of dimension ``r`` (or an invertible map of such) have the rank
  of tokens of width ``r``.
* *functions*: on finitely many symbols, count the linearly independent functions of what is drawn.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import comb

import numpy as np
import pytest
import reference

from sklearn_mhla import Moments, certify_identifiable
from sklearn_mhla.datasets import make_associative_memory, make_key_value

METHODS = ["primal", "span"]


def width(d):
    return d * d * (d + 1) // 2


def gaussian(n, T, d, center=0.0, seed=1):
    return reference.make_sequences(center, n, T, d, seed)


def one_hot(n, T, d, seed=1):
    return np.eye(d)[np.random.default_rng(seed).integers(0, d, (n, T))]


def drawn(name, shape, seed=1):
    """Independent coordinates of one of several distributions."""
    random = np.random.default_rng(seed)
    return {
        "normal": lambda: random.standard_normal(shape),
        "uniform": lambda: random.uniform(-1.0, 1.0, shape),
        "Laplace": lambda: random.laplace(size=shape),
        "exponential": lambda: random.exponential(size=shape),
        "Student": lambda: random.standard_t(5, shape),
        "three-valued": lambda: random.integers(-1, 2, shape).astype(float),
        "Rademacher": lambda: random.choice([-1.0, 1.0], shape),
    }[name]()


def mixed(X, seed=5):
    """All tokens multiplied by one invertible matrix of condition number about ten."""
    d = X.shape[-1]
    random = np.random.default_rng(seed)
    left, _ = np.linalg.qr(random.standard_normal((d, d)))
    right, _ = np.linalg.qr(random.standard_normal((d, d)))
    return X @ (left * np.linspace(1.0, 10.0, d)) @ right


def in_subspace(n, T, d, r):
    return gaussian(n, T, r) @ np.random.default_rng(3).standard_normal((r, d))


def orthogonal_coordinates(n, T, d):
    """Coordinates 0 and 1 orthogonal in every sequence, up to rounding."""
    X = gaussian(n, T, d)
    first, second = X[..., 0], X[..., 1]
    second -= ((first * second).sum(1) / (first**2).sum(1))[:, None] * first
    return X


def with_constant(X):
    return np.concatenate([np.ones((*X.shape[:2], 1)), X], axis=2)


def at_positions(n, T):
    """Tokens ``(one-hot position, number)``."""
    numbers = np.random.default_rng(1).standard_normal((n, T, 1))
    return np.concatenate([np.broadcast_to(np.eye(T), (n, T, T)), numbers], axis=2)


def haar_frames(n, d, seed=1):
    """The rows of a random orthogonal matrix: the state is the identity."""
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((n, d, d)))[0]


def ragged(lengths, d):
    return reference.make_ragged(lengths, d)


# name: data, options, rank, number of features
TABLE = {
    # Generic: full rank from p rows on.
    "d=1": (gaussian(5, 3, 1), {}, 1, 1),
    "d=1, one token": (gaussian(5, 1, 1), {}, 1, 1),  # C(3, 3) = 1 = p
    "d=2": (gaussian(50, 4, 2), {}, 6, 6),
    "d=2, two tokens": (gaussian(50, 2, 2), {}, 6, 6),  # (z z^T + q q^T) (x) q is generic already
    "d=3": (gaussian(100, 5, 3), {}, 18, 18),
    "d=4": (gaussian(200, 3, 4), {}, 40, 40),
    "d=5": (gaussian(400, 7, 5), {}, 75, 75),
    "d=6": (gaussian(600, 5, 6), {}, 126, 126),
    "p rows": (gaussian(18, 5, 3), {}, 18, 18),
    "offset 10": (gaussian(3000, 5, 3, 10.0), {}, 18, 18),
    "one long sequence each": (gaussian(60, 500, 3), {}, 18, 18),
    # Generic: as many as rows, if they are fewer.
    "one row": (gaussian(1, 5, 3), {}, 1, 18),
    "p - 1 rows": (gaussian(17, 5, 3), {}, 17, 18),
    "half the rows": (gaussian(20, 5, 4), {}, 20, 40),
    "d=8, 50 rows": (gaussian(50, 4, 8), {}, 50, 288),
    "d=16, 30 rows": (gaussian(30, 4, 16), {}, 30, 2176),
    "repeated rows": (np.tile(gaussian(7, 5, 3), (30, 1, 1)), {}, 7, 18),
    "repeated p rows": (np.tile(gaussian(18, 5, 3), (30, 1, 1)), {}, 18, 18),
    "10 rows and zeros": (np.r_[gaussian(10, 5, 3), np.zeros((40, 5, 3))], {}, 10, 18),
    "rows and their negatives": (np.r_[gaussian(9, 5, 3), -gaussian(9, 5, 3)], {}, 9, 18),
    "multiples of rows": (  # phi(c Z) = c^3 phi(Z)
        np.concatenate([c * gaussian(9, 5, 3) for c in (1.0, 2.0, -0.1)]),
        {},
        9,
        18,
    ),
    # Other orders of all tokens but the last change nothing.
    "permuted context": (
        np.r_[gaussian(9, 5, 3), gaussian(9, 5, 3)[:, [2, 0, 3, 1, 4]]],
        {},
        9,
        18,
    ),
    "nothing": (np.zeros((30, 4, 3)), {}, 0, 18),
    "one sequence over and over": (np.tile(gaussian(1, 5, 3), (40, 1, 1)), {}, 1, 18),
    # Cubic monomials.
    "one token, d=2": (gaussian(100, 1, 2), {}, 4, 6),
    "one token, d=3": (gaussian(2000, 1, 3), {}, 10, 18),
    "one token, d=4": (gaussian(300, 1, 4), {}, 20, 40),
    "one token, d=6": (gaussian(500, 1, 6), {}, 56, 126),
    "one token, few rows": (gaussian(8, 1, 3), {}, 8, 18),
    # A token repeated T times: S = T q q^T.
    "equal tokens": (np.repeat(gaussian(100, 1, 3), 4, axis=1), {}, 10, 18),
    "sequences of one token as a table": (gaussian(100, 1, 3)[:, 0], {}, 10, 18),
    "a table of three tokens": (gaussian(100, 3, 4).reshape(100, 12), {"n_tokens": 3}, 40, 40),
    # Subspaces.
    "equal columns": (gaussian(200, 5, 3)[..., [0, 1, 1]], {}, width(2), 18),
    "equal columns, d=5": (gaussian(300, 5, 5)[..., [0, 1, 2, 3, 3]], {}, width(4), 75),
    "opposite columns": (
        gaussian(200, 5, 3)[..., [0, 1, 1]] * [1.0, 1.0, -2.0],
        {},
        width(2),
        18,
    ),
    "zero column": (gaussian(200, 5, 3) * [1.0, 1.0, 0.0], {}, width(2), 18),
    "plane in d=5": (in_subspace(300, 6, 5, 2), {}, width(2), 75),
    "line in d=4": (in_subspace(200, 6, 4, 1), {}, 1, 40),
    "r=3 in d=6": (in_subspace(400, 6, 6, 3), {}, width(3), 126),
    "r=3 in d=6, one token": (in_subspace(400, 1, 6, 3), {}, comb(5, 3), 126),
    "invertible map": (mixed(gaussian(200, 5, 4)), {}, 40, 40),
    "invertible map, one token": (mixed(gaussian(200, 1, 4)), {}, 20, 40),
    # Units: an invertible map that is diagonal.
    "columns 1:1000": (gaussian(200, 5, 3) * [1.0, 1000.0, 1.0], {}, 18, 18),
    "columns 1e-6:1:1e6": (gaussian(200, 5, 3) * [1e-6, 1.0, 1e6], {}, 18, 18),
    "columns 1:1000, one token": (gaussian(200, 1, 3) * [1.0, 1000.0, 1.0], {}, 10, 18),
    "columns 1:1e5, equal": (
        gaussian(200, 5, 3)[..., [0, 1, 1]] * [1.0, 1e5, 1.0],
        {},
        width(2),
        18,
    ),
    "all times 1e-4": (1e-4 * gaussian(100, 5, 3), {}, 18, 18),
    "all times 1e4": (1e4 * gaussian(100, 5, 3), {}, 18, 18),
    "all times 1e60": (1e60 * gaussian(100, 5, 3), {}, 18, 18),
    "equal columns times 1e-4": (1e-4 * gaussian(100, 5, 3)[..., [0, 1, 1]], {}, width(2), 18),
    "equal columns times 1e4": (1e4 * gaussian(100, 5, 3)[..., [0, 1, 1]], {}, width(2), 18),
    "one token times 1e-4": (1e-4 * gaussian(100, 1, 3), {}, 10, 18),
    # The features S_01 q_l are 0 (d of them) but for rounding.
    "orthogonal coordinates": (orthogonal_coordinates(300, 6, 3), {}, 18 - 3, 18),
    "orthogonal coordinates, d=5": (orthogonal_coordinates(400, 8, 5), {}, 75 - 5, 75),
    # S = I: the d functions q_l remain.
    "orthonormal tokens": (haar_frames(100, 3), {}, 3, 18),
    "orthonormal tokens, d=5": (haar_frames(100, 5), {}, 5, 75),
    # Single precision.
    "float32": (gaussian(300, 5, 3).astype(np.float32), {}, 18, 18),
    "float32, offset 10": (gaussian(20000, 5, 3, 10.0).astype(np.float32), {}, 18, 18),
    "float32, one token": (gaussian(300, 1, 3).astype(np.float32), {}, 10, 18),
    "float32, equal columns": (
        gaussian(300, 5, 3)[..., [0, 1, 1]].astype(np.float32),
        {},
        width(2),
        18,
    ),
    "float32, few rows": (gaussian(11, 5, 3).astype(np.float32), {}, 11, 18),
    "float32, repeated": (np.tile(gaussian(7, 5, 3), (300, 1, 1)).astype(np.float32), {}, 7, 18),
    # Lengths.
    "ragged": (ragged(list(range(1, 10)) * 6, 3), {}, 18, 18),
    "ragged, few": (ragged([2, 5, 3, 4], 3), {}, 4, 18),
    "ragged, mean states": (ragged(list(range(1, 10)) * 6, 3), {"state": "mean"}, 18, 18),
    "zeros in front": (np.concatenate([np.zeros((9, 3, 3)), gaussian(9, 5, 3)], 1), {}, 9, 18),
    "mean states": (gaussian(100, 5, 3), {"state": "mean"}, 18, 18),
    # Outputs at every position: the first is cubic, later ones are generic.
    "every position": (gaussian(40, 5, 3), {"output": "sequence"}, 18, 18),
    "every position, one sequence": (gaussian(1, 9, 3), {"output": "sequence"}, 9, 18),
    "every position, two sequences": (gaussian(2, 6, 3), {"output": "sequence"}, 12, 18),
    "every position, one token": (gaussian(50, 1, 3), {"output": "sequence"}, 10, 18),
    # S (x) span of the tokens: rank min(T, d) for every independent state.
    "whole states": (gaussian(40, 5, 3), {"output": "sequence", "causal": False}, 18, 18),
    "whole states, four": (gaussian(4, 7, 3), {"output": "sequence", "causal": False}, 12, 18),
    "whole states, two tokens": (
        gaussian(5, 2, 3),
        {"output": "sequence", "causal": False},
        10,
        18,
    ),
    # Constant coordinate, fixed T: T, T q, m, m q, S', S' q are independent functions: all p.
    "constant coordinate": (with_constant(gaussian(200, 5, 2)), {}, 18, 18),
    # With one token they are the monomials of degree at most 3 in d - 1 variables.
    "constant coordinate, one token": (with_constant(gaussian(200, 1, 2)), {}, comb(5, 3), 18),
    # {1, x_1 .. x_T, sum x^2} times {1, x_T}, x_T twice: 2 (T + 2) - 1.
    "positions and numbers": (at_positions(300, 4), {}, 11, width(5)),
    # Functions on symbols. One-hot: S is the diagonal of counts N; given q = e_l the N_j are d
    # independent functions once another token is drawn, else N = e_l.
    "one-hot, one token": (one_hot(100, 1, 4), {}, 4, 40),
    "one-hot, two tokens": (one_hot(400, 2, 4), {}, 16, 40),
    "one-hot, five tokens": (one_hot(400, 5, 3), {}, 9, 18),
    "one-hot, mapped": (mixed(one_hot(400, 5, 3)), {}, 9, 18),
    "one-hot of int8": (one_hot(400, 5, 4).astype(np.int8), {}, 16, 40),
    "one-hot, every position": (one_hot(200, 4, 3), {"output": "sequence"}, 9, 18),
    # Signs: S_jj = T leaves T q_l (d), and S_jk q_l is independent for all j < k and l.
    "signs": (drawn("Rademacher", (600, 4, 3)), {}, 3 + 9, 18),
    "signs, d=4": (drawn("Rademacher", (900, 5, 4)), {}, 4 + 24, 40),
    # One token: q_l (d) and q_j q_k q_l with j < k < l.
    "signs, one token": (drawn("Rademacher", (300, 1, 4)), {}, 4 + comb(4, 3), 40),
    # Zero and signs: z^3 = z, but all cubic monomials stay different functions.
    "three values, one token": (drawn("three-valued", (900, 1, 3)), {}, 10, 18),
    # Key-value tables: for each of K queries {1, S_kv}, where S_kv is one-hot in v for every k.
    "key-value": (make_key_value(600, 4, 3, random_state=0)[0], {}, 4 * (1 + 4 * 2), width(7)),
    "key-value, more keys": (
        make_key_value(900, 6, 2, random_state=0)[0],
        {},
        6 * (1 + 6),
        width(8),
    ),
    # Half of the memories have Gaussian keys and values (all of them orthogonal: see below).
    "memories": (make_associative_memory(2000, p_orthogonal=0.5, random_state=0)[0], {}, 40, 40),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TABLE)
def test_rank_is_that_of_algebra(name, method):
    X, options, rank, n_features = TABLE[name]
    certificate = certify_identifiable(X, method=method, **options)
    assert (certificate.rank, certificate.n_features) == (rank, n_features)
    assert certificate.nullity == n_features - rank
    identifiable = rank == n_features
    assert certificate.verdict == ("identifiable" if identifiable else "not identifiable")
    assert bool(certificate) is identifiable


def test_the_table_is_large_and_has_both_verdicts():
    full = sum(rank == p for _, _, rank, p in TABLE.values())
    assert len(TABLE) >= 60
    assert full >= 20
    assert len(TABLE) - full >= 20


# Moments of wide tokens are large.
@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name][3] <= width(8)])
def test_moments_know_the_rank(name):
    X, options, rank, _ = TABLE[name]
    assert certify_identifiable(Moments.from_data(X, **options)).rank == rank


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("distribution", ["normal", "uniform", "Laplace", "exponential", "Student"])
@pytest.mark.parametrize("d", [2, 4])
def test_independent_noise_of_a_density_identifies(distribution, d, method):
    # Whatever the tokens were before: here constant, on which the rank is 1.
    signal = np.ones((20 * width(d), 3, d))
    assert certify_identifiable(signal, method=method).rank == 1
    noisy = signal + 0.5 * drawn(distribution, signal.shape)
    certificate = certify_identifiable(noisy, method=method)
    assert certificate.verdict == "identifiable"
    assert certificate.proven


def test_noise_of_two_values_need_not_identify():
    # Without a density the statement is wrong: z_j^2 is constant on signs.
    noise = drawn("Rademacher", (2000, 5, 3))
    assert certify_identifiable(noise).verdict == "not identifiable"
    assert certify_identifiable(noise, method="exact").proven


SYMBOLS = [n for n in TABLE if n.startswith(("one-hot", "signs", "key")) and "mapped" not in n]


@pytest.mark.parametrize("name", SYMBOLS)
def test_exact_rank_agrees_and_proves(name):
    pytest.importorskip("flint")
    X, options, rank, n_features = TABLE[name]
    certificate = certify_identifiable(X, method="exact", **options)
    assert certificate.rank == rank < n_features
    assert certificate.method == "exact"
    assert certificate.proven


def exact_rank(rows):
    """Gaussian elimination in rational numbers."""
    rows, rank = [list(map(Fraction, row)) for row in rows], 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            factor = rows[i][column] / rows[rank][column]
            if factor:
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


def rotation(t, sign):
    """A rational orthogonal matrix; with ``sign=-1`` a reflection."""
    c, s = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    return [[c, -s * sign], [s, c * sign]]


@pytest.mark.parametrize(
    ("orthogonal", "signs", "nullity"), [("haar", (1, -1), 4), ("qr", (-1,), 12)]
)
def test_orthogonal_memories_have_the_rank_of_rational_ones(orthogonal, signs, nullity):
    angles = [Fraction(n, 7) for n in (-9, -4, -1, 2, 3, 8)]
    rows = []
    for (t, u), sign, other, asked in product(
        zip(angles, reversed(angles), strict=True), signs, signs, (0, 1)
    ):
        for noise in [(1, 0), (0, 1), (2, -1), (Fraction(1, 2), 3), (-1, 5), (3, 2)]:
            keys, values = rotation(t, sign), rotation(u, other)
            tokens = [
                [keys[0][i], keys[1][i], values[0][i], values[1][i]] for i in (0, 1)
            ]  # columns
            tokens.append([*tokens[asked][:2], *noise])
            rows.append(
                [
                    sum(z[j] * z[k] for z in tokens) * tokens[-1][position]
                    for j in range(4)
                    for k in range(j, 4)
                    for position in range(4)
                ]
            )
    assert exact_rank(rows) == 40 - nullity
    X, _ = make_associative_memory(2000, p_orthogonal=1.0, orthogonal=orthogonal, random_state=0)
    for method in METHODS:
        assert certify_identifiable(X, method=method).nullity == nullity
