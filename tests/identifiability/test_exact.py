"""Exact ranks against elimination with fractions, and against ranks known by algebra."""

from __future__ import annotations

import builtins
import math
from fractions import Fraction
from math import comb

import numpy as np
import pytest
import reference

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability import _exact
from sklearn_mhla.identifiability._exact import exact_rank, import_flint

pytest.importorskip("flint")


def rank_of(X, **options):
    return exact_rank(Design(check_sequences(X), NumpyBackend(), **options))


def fraction_rank(X, output="last", causal=True):
    """Rank of the published features by Gaussian elimination with fractions."""
    rows = []
    for sequence in X:
        tokens = [[Fraction(float(value)) for value in token] for token in sequence]
        d = len(tokens[0])
        for t in range(len(tokens)) if output == "sequence" else [len(tokens) - 1]:
            seen = tokens[: t + 1] if causal or output == "last" else tokens
            state = [[sum(z[j] * z[k] for z in seen) for k in range(d)] for j in range(d)]
            rows.append([state[j][k] * q for j in range(d) for k in range(j, d) for q in tokens[t]])
    rank = 0
    for column in range(len(rows[0])):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][column] != 0), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            if rows[i][column] != 0:
                ratio = rows[i][column] / rows[rank][column]
                rows[i] = [a - ratio * b for a, b in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


OUTPUTS = [
    {"output": "last"},
    {"output": "sequence", "causal": True},
    {"output": "sequence", "causal": False},
]


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("seed", range(12))
def test_random_integers(seed, options):
    random = np.random.default_rng(seed)
    d = int(random.integers(1, 4))
    shape = (int(random.integers(1, 25)), int(random.integers(1, 4)), d)
    X = random.integers(-1, 2, shape) if seed % 2 else random.integers(-40, 41, shape)
    assert rank_of(X, **options) == fraction_rank(X, **options)


@pytest.mark.parametrize("options", OUTPUTS)
def test_ragged(options):
    random = np.random.default_rng(3)
    X = [random.integers(-1, 2, (length, 3)) for length in [1, 1, 3, 2, 2, 5, 1, 4]]
    assert rank_of(X, **options) == fraction_rank(X, **options)


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_single_tokens_have_as_many_as_cubic_monomials(d):
    assert rank_of(reference.make_sequences(0.0, 150, 1, d)) == comb(d + 2, 3)


def test_floats_whose_columns_are_equal_but_for_one_unit_in_the_last_place():
    X = reference.make_sequences(0.0, 40, 4, 2)[..., [0, 1, 1]]
    assert rank_of(X) == 6
    X[5, 2, 2] = np.nextafter(X[5, 2, 2], np.inf)
    assert rank_of(X) == fraction_rank(X) == 7


def test_rows_beyond_the_first_blocks_count(monkeypatch):
    monkeypatch.setattr(_exact, "_BLOCK_ENTRIES", 40)
    X = np.zeros((60, 2, 2), dtype=int)
    X[:, :, 0] = 1
    assert rank_of(X) == 1
    X[57] = [[0, 1], [2, 3]]
    X[59] = [[5, 1], [1, 1]]
    assert rank_of(X) == fraction_rank(X) == 3


@pytest.mark.parametrize(
    "X",
    [
        pytest.param(np.zeros((4, 2, 2)), id="zeros"),
        pytest.param(-np.zeros((4, 2, 2)), id="negative zeros"),
        pytest.param(np.eye(3)[:, None, :], id="one-hot"),
        pytest.param(np.ones((1, 1, 3)), id="one row"),
        pytest.param(np.full((3, 2, 2), 1e-90) * [1.0, 2.0**-300], id="far apart"),
        pytest.param(np.array([[[1.0, 5e-324]], [[2.0, 1.0]], [[1.0, 3.0]]]), id="subnormal"),
        pytest.param(np.array([[[2**31 - 1, 1]], [[1, 2**31 - 1]], [[0, 2**31 - 1]]]), id="prime"),
        pytest.param(
            (2**31 - 1) * np.random.default_rng(0).integers(-1, 2, (20, 2, 2)), id="modulus times"
        ),
        pytest.param(np.float32(reference.make_sequences(0.0, 30, 3, 2)), id="float32"),
    ],
)
def test_edge_cases(X):
    assert rank_of(X) == fraction_rank(X)


def test_independent_only_modulo_other_primes():
    # Modulo the first prime the last row is twice the first.
    prime = 2**31 - 1
    X = np.array([[[1.0, 1.0]], [[2.0, 2.0 + prime]]])
    assert rank_of(X) == 2
    Y = np.array([[[1.0, 1.0]], [[2.0, 2.0 + prime]], [[3.0, 3.0]], [[1.0, 1.0 - prime]]])
    assert rank_of(Y) == fraction_rank(Y) == 3


def test_rows_that_agree_modulo_the_first_prime_are_told_apart():
    flint = pytest.importorskip("flint")
    prime = next(_exact._primes(math.isqrt(2**53 // 6)))
    X = np.array([[[1.0, 1.0]], [[1.0, 1.0 + prime]]])
    first = np.array([0])
    assert not _exact._spans_all_rows(Design(check_sequences(X), NumpyBackend()), first, flint)
    same = Design(check_sequences(X[[0, 0]]), NumpyBackend())
    assert _exact._spans_all_rows(same, first, flint)


def test_a_null_space_of_large_entries():
    random = np.random.default_rng(0)
    mixing = random.integers(-(10**7), 10**7, (2, 3))
    X = random.integers(-3, 4, (60, 3, 2)) @ mixing
    assert rank_of(X) == 6


def test_a_null_space_beyond_int64():
    mixing = np.array([[2.0**40 + 1, 3.0**20, 1.0], [5.0**17, 7.0**14, 2.0]])
    X = np.random.default_rng(0).integers(-1, 2, (40, 3, 2)) @ mixing
    assert (np.abs(X) < 2**53).all()
    assert rank_of(X) == 6


def test_weights_states_and_units_do_not_enter():
    X = reference.make_sequences(0.0, 30, 1, 3)
    assert rank_of(X, state="mean") == rank_of(np.ldexp(X, 30)) == rank_of(X, rescale=False) == 10


def test_what_to_install(monkeypatch):
    original = builtins.__import__

    def without_flint(name, *args, **kwargs):
        if name == "flint":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_flint)
    with pytest.raises(ImportError, match=r"pip install sklearn-mhla\[exact\]"):
        import_flint()
