"""NumPy and torch: the same operations, and whole solves that agree."""

from __future__ import annotations

import builtins
import sys

import numpy as np
import pytest
import reference

from sklearn_mhla import MHLARegressor
from sklearn_mhla._backend import (
    NotPositiveDefiniteError,
    NumpyBackend,
    TorchBackend,
    as_input_kind,
    backend_for,
    import_torch,
    is_tensor,
    tensor_device,
    to_numpy,
)
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.solvers import SOLVERS, LeastSquaresProblem

torch = pytest.importorskip("torch")

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)
DEVICES = ["cpu", CUDA]


@pytest.fixture(params=["numpy", "cpu", CUDA])
def backend(request):
    return NumpyBackend() if request.param == "numpy" else TorchBackend(request.param)


def positive_definite(order, seed=0):
    root = np.random.default_rng(seed).standard_normal((order, 2 * order))
    return root @ root.T


DATA = {
    "rows < p": lambda: reference.make_sequences(0.0, 10),
    "rows > p": lambda: reference.make_sequences(0.0, 24),
    "offset": lambda: reference.make_sequences(5.0, 24),
    "float32": lambda: reference.make_sequences(0.0, 24).astype(np.float32),
    "one row": lambda: reference.make_sequences(0.0, 1),
    "width one": lambda: reference.make_sequences(0.0, 9, 3, 1),
    "equal coordinates": lambda: reference.make_sequences(0.0, 24, 5, 2)[:, :, [0, 1, 1]],
    "one token": lambda: reference.make_sequences(0.0, 24, 1),
    "ragged": lambda: reference.make_ragged([9, 1, 5, 2, 8, 3, 7, 4, 6, 1] * 3, 3),
    "scale 1e50": lambda: 1e50 * reference.make_sequences(0.0, 24),
    "scale 1e-50": lambda: 1e-50 * reference.make_sequences(0.0, 24),
}
OUTPUTS = {
    "last": {"output": "last"},
    "causal": {"output": "sequence", "state": "mean"},
    "shared": {"output": "sequence", "causal": False},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("fit_intercept", [False, True], ids=["through 0", "intercept"])
@pytest.mark.parametrize("alpha", [0.0, 1e-3])
@pytest.mark.parametrize("name", DATA)
def test_whole_solves_agree(name, alpha, fit_intercept, output, method, device):
    X = DATA[name]()
    coefs, intercepts = [], []
    for backend in (NumpyBackend(), TorchBackend(device)):
        design = Design(check_sequences(X), backend, **OUTPUTS[output])
        random = np.random.default_rng(7)
        y = random.standard_normal((design.n_rows, 2))
        weights = random.uniform(0.1, 5.0, design.n_rows)
        problem = LeastSquaresProblem(
            design, backend.asarray(y), backend.asarray(weights), fit_intercept
        )
        solution = SOLVERS[method](problem).solve(alpha)
        coefs.append(backend.to_numpy(solution.coef))
        intercepts.append(backend.to_numpy(solution.intercept))
        scale = 2.0 ** (-3 * design.exponent)
    assert all(type(coef) is np.ndarray for coef in coefs)
    features = reference.feature_matrix(X, **OUTPUTS[output]) * scale
    coef, _ = reference.ridge(features, y, alpha, fit_intercept, weights)
    # What is zero in exact arithmetic is compared with the size of coefficients that matter.
    size = max(np.linalg.norm(coef), 1e-2 * np.linalg.norm(y) / np.linalg.norm(features))
    allowed = 1e-10 * size
    if name == "offset":
        # Kernels of condition 1e7 with targets outside their range: 1e7 eps, and a factor of 5.
        allowed = 1e-8 * size
    assert np.linalg.norm(coefs[0] - coefs[1]) <= allowed
    assert np.linalg.norm(coefs[0] - coef) <= max(allowed, 1e-8 * size)
    assert np.linalg.norm(intercepts[0] - intercepts[1]) <= allowed * max(
        1.0, np.linalg.norm(features, axis=1).max()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", SOLVERS)
def test_equal_coordinates_give_the_minimum_norm_solution(method, device):
    """Case T06: rank 6 of 18."""
    X = reference.make_sequences(0.0, 60, 5, 2)[:, :, [0, 1, 1]]
    y = np.random.default_rng(7).standard_normal((60, 1))
    backend = TorchBackend(device)
    design = Design(check_sequences(X), backend, rescale=False)
    solution = SOLVERS[method](LeastSquaresProblem(design, backend.asarray(y), None, False)).solve(
        0.0
    )
    assert solution.rank == 6
    coef, _ = reference.ridge(reference.feature_matrix(X), y)
    assert reference.relative_error(backend.to_numpy(solution.coef), coef) < 1e-10


def test_arrays_are_contiguous_float64(backend):
    for values in (
        np.arange(6).reshape(2, 3),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T,
        torch.arange(6).reshape(2, 3),
        torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).T,
        [[1, 2], [3, 4]],
    ):
        array = backend.asarray(values)
        expected = to_numpy(values)
        assert str(array.dtype).endswith("float64")
        assert np.array_equal(backend.to_numpy(array), expected)
        if isinstance(array, np.ndarray):
            assert array.flags.c_contiguous
        else:
            assert array.is_contiguous()


def test_read_only_memory_is_accepted(backend):
    values = np.arange(6.0)
    values.flags.writeable = False
    assert np.array_equal(backend.to_numpy(backend.asarray(values)), values)


def test_a_tensor_with_a_gradient_is_accepted(backend):
    values = torch.arange(3.0, requires_grad=True)
    assert np.array_equal(backend.to_numpy(backend.asarray(values)), [0.0, 1.0, 2.0])


def test_elementary_operations(backend):
    random = np.random.default_rng(0)
    left, right = random.standard_normal((3, 4)), random.standard_normal((4, 2))
    a, b = backend.asarray(left), backend.asarray(right)
    out = backend.empty((3, 2))
    assert np.allclose(backend.to_numpy(backend.matmul(a, b, out=out)), left @ right, rtol=1e-14)
    assert np.allclose(backend.to_numpy(out), left @ right, rtol=1e-14)
    backend.add_product(out, a, b)
    assert np.allclose(backend.to_numpy(out), 2 * left @ right, rtol=1e-14)
    out = backend.empty((3, 4))
    backend.multiply(a, a, out=out)
    assert np.array_equal(backend.to_numpy(out), left * left)
    columns = backend.take(a, backend.index([2, 0, 2]))
    assert np.array_equal(backend.to_numpy(columns), left[:, [2, 0, 2]])
    assert np.array_equal(backend.to_numpy(backend.tril(a)), np.tril(left))
    assert not backend.to_numpy(backend.zeros((2, 3))).any()
    assert backend.empty((2, 3)).shape == (2, 3)
    for axis in (0, 1):
        array = backend.asarray(left.copy())
        summed = backend.cumulative_sum(array, axis)
        assert np.allclose(backend.to_numpy(summed), np.cumsum(left, axis), rtol=1e-14)
        assert np.array_equal(backend.to_numpy(array), backend.to_numpy(summed))  # in place


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 3), (4, 1, 1), (2, 3, 1), (1, 1, 4)])
def test_add_product_accumulates_into_a_part(backend, shape):
    rows, inner, columns = shape
    random = np.random.default_rng(0)
    left, right = random.standard_normal((rows, inner)), random.standard_normal((inner, columns))
    total = backend.zeros((rows + 2, columns)) + 1.0
    backend.add_product(total[1:-1], backend.asarray(left), backend.asarray(right))
    expected = np.ones((rows + 2, columns))
    expected[1:-1] += left @ right
    assert reference.relative_error(backend.to_numpy(total), expected) < 1e-14


@pytest.mark.parametrize("order", [1, 2, 7])
def test_cholesky_reads_the_lower_triangle(backend, order):
    matrix = positive_definite(order)
    rubbish = np.tril(matrix) + np.triu(np.full((order, order), 1e9), 1)
    factor = backend.cholesky(backend.asarray(rubbish))
    rhs = np.random.default_rng(1).standard_normal((order, 3))
    solution = backend.to_numpy(backend.cholesky_solve(factor, backend.asarray(rhs)))
    assert reference.relative_error(matrix @ solution, rhs) < 1e-12
    lower = np.tril(backend.to_numpy(factor))
    assert reference.relative_error(lower @ lower.T, matrix) < 1e-13
    exact = np.linalg.norm(np.linalg.inv(matrix), 1)
    estimate = backend.inverse_one_norm(factor)
    assert exact / 3 <= estimate <= exact * (1 + 1e-10)  # a lower bound, rarely below a third


@pytest.mark.parametrize("order", [1, 4, 5, 8, 11])
def test_cholesky_in_panels(monkeypatch, order):
    """Panels of four rows give the factor of the whole."""
    monkeypatch.setattr("sklearn_mhla._backend._PANEL", 4)
    random = np.random.default_rng(order)
    root = random.standard_normal((order, order + 2))
    matrix = np.tril(root @ root.T) + np.triu(np.full((order, order), np.nan), 1)
    factor = np.tril(NumpyBackend().cholesky(matrix))
    np.testing.assert_allclose(factor, np.linalg.cholesky(root @ root.T), rtol=1e-10)
    for pivot in range(order):
        broken = root @ root.T
        broken[pivot, pivot] = -1.0
        with pytest.raises(NotPositiveDefiniteError, match=f"pivot {pivot + 1} "):
            NumpyBackend().cholesky(broken)


@pytest.mark.parametrize("matrix", [[[-1.0]], [[1.0, 0.0], [2.0, 1.0]], [[0.0]]])
def test_cholesky_says_what_is_not_positive_definite(backend, matrix):
    with pytest.raises(NotPositiveDefiniteError, match="pivot"):
        backend.cholesky(backend.asarray(matrix))


@pytest.mark.parametrize(("order", "rank"), [(1, 1), (4, 4), (6, 2), (200, 30)])
def test_range_eigh(backend, order, rank):
    random = np.random.default_rng(0)
    root = random.standard_normal((order, rank))
    matrix = root @ root.T
    rubbish = np.tril(matrix) + np.triu(np.full((order, order), 1e9), 1)
    floor = 1e-12 * np.linalg.norm(matrix)
    basis, eigenvalues = backend.range_eigh(backend.asarray(rubbish), floor)
    basis = backend.to_numpy(basis)[:, :rank]
    eigenvalues = backend.to_numpy(eigenvalues)
    assert (np.diff(eigenvalues) <= 0).all()
    assert (eigenvalues[rank:] < floor).all()
    assert (
        reference.relative_error(eigenvalues[:rank], np.linalg.eigvalsh(matrix)[::-1][:rank])
        < 1e-12
    )
    assert reference.relative_error(basis.T @ basis, np.eye(rank)) < 1e-12
    assert reference.relative_error(basis * eigenvalues[:rank] @ basis.T, matrix) < 1e-12


def test_eigh_reads_the_lower_triangle(backend):
    random = np.random.default_rng(0)
    root = random.standard_normal((6, 4))
    matrix = root @ root.T
    rubbish = np.tril(matrix) + np.triu(np.full((6, 6), 1e9), 1)
    eigenvalues, basis = map(backend.to_numpy, backend.eigh(backend.asarray(rubbish)))
    assert (np.diff(eigenvalues) >= 0).all()
    assert reference.relative_error(basis.T @ basis, np.eye(6)) < 1e-12
    assert reference.relative_error(basis * eigenvalues @ basis.T, matrix) < 1e-12


def test_solve_many_systems(backend):
    random = np.random.default_rng(0)
    matrices, rhs = random.standard_normal((5, 4, 4)), random.standard_normal((5, 4, 2))
    solved = backend.to_numpy(backend.solve(backend.asarray(matrices), backend.asarray(rhs)))
    for matrix, right, solution in zip(matrices, rhs, solved, strict=True):
        assert reference.relative_error(matrix @ solution, right) < 1e-12


def test_range_of_nothing(backend):
    basis, eigenvalues = backend.range_eigh(backend.zeros((3, 3)), 0.0)
    assert basis.shape == (3, 0)
    assert eigenvalues.shape == (0,)


def test_inverse_root_power_of_two(backend):
    values = np.array([1.0, 0.25, 3.0, 1e-200, 1e200, 0.0, -1.0])
    powers = backend.to_numpy(backend.inverse_root_power_of_two(backend.asarray(values)))
    assert np.array_equal(np.frexp(powers)[0], np.full(7, 0.5))  # exact powers of two
    scaled = powers[:5] ** 2 * values[:5]
    assert ((scaled >= 0.25) & (scaled <= 4.0)).all()
    assert np.isfinite(powers).all()


def test_available_memory_is_a_number_of_bytes(backend):
    assert 2**20 < backend.available_memory() < 2**50


def test_available_memory_where_the_system_does_not_tell(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(builtins, "open", refuse)
    assert NumpyBackend().available_memory() > 2**20
    monkeypatch.setattr("os.sysconf", refuse)
    assert NumpyBackend().available_memory() == 8 * 2**30


@pytest.mark.parametrize(
    ("device", "input_device"), [(None, None), ("cpu", None), (None, "cpu"), ("cpu", "cuda:0")]
)
def test_the_cpu_is_numpy(device, input_device):
    assert isinstance(backend_for(device, input_device), NumpyBackend)


@pytest.mark.parametrize("device", ["gpu", "mps", "", 0, torch.device("cpu")])
def test_an_unknown_device_is_named(device):
    with pytest.raises(ValueError, match="device must be None, 'cpu', 'cuda'"):
        backend_for(device, None)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_missing_device_is_named(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device='{device}'.*no CUDA device"):
        backend_for(device, None)
    X = reference.make_sequences(0.0, 5)
    with pytest.raises(ValueError, match="no CUDA device"):
        MHLARegressor(device=device).fit(X, np.zeros(5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_torch():
    assert isinstance(backend_for("cuda", None), TorchBackend)
    assert isinstance(backend_for(None, "cuda:0"), TorchBackend)


def test_what_a_tensor_is():
    tensor = torch.zeros(2)
    assert is_tensor(tensor)
    assert tensor_device(tensor) == "cpu"
    for other in (np.zeros(2), [0.0], None, "cpu"):
        assert not is_tensor(other)
        assert tensor_device(other) is None
        assert to_numpy(other) is other


def test_results_leave_as_the_input_came():
    values = np.arange(3.0)
    assert as_input_kind(values, None) is values
    tensor = as_input_kind(values, "cpu")
    assert tensor.dtype == torch.float64
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_without_torch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (lambda: import_torch("this"), lambda: TorchBackend("cpu")):
        with pytest.raises(ImportError, match="pip install torch"):
            call()
    with pytest.raises(ImportError, match="device='cuda' needs torch"):
        backend_for("cuda", None)
    X = reference.make_sequences(0.0, 60)
    y = np.random.default_rng(0).standard_normal(60)
    coef, _ = reference.ridge(reference.feature_matrix(X), y[:, None])
    assert reference.relative_error(MHLARegressor().fit(X, y).coef_, coef) < 1e-10
