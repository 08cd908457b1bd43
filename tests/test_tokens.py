"""The one door: every form of the same data gives the same model, and bad data is refused.

The targets come from a teacher written out in loops, so a form that is read in the wrong order
(say, feature-major) is caught even if it is read wrongly twice.
"""

import re

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import torch
from reference import make_heads, make_ragged, make_sequences, predict_heads

from sklearn_mhla import MHLARegressor, _fitting, _tokens

N_TOKENS, TOKEN_DIM = 4, 2
COLUMNS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def flat(X):
    return X.reshape(len(X), -1)


def object_array(members):
    array = np.empty(len(members), dtype=object)
    array[:] = list(members)
    return array


def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


def reversed_view(X):
    """The same numbers behind three negative strides."""
    return X[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1]


def strided_view(X):
    """The same numbers as every other entry of a larger array."""
    wide = np.full(tuple(2 * size for size in X.shape), np.nan)
    view = wide[tuple(slice(None, None, 2) for _ in X.shape)]
    view[...] = X
    return view


FORMS = {
    "array": lambda X: X,
    "flat": flat,
    "list": list,
    "tuple": tuple,
    "nested lists": lambda X: X.tolist(),
    "nested lists, flat": lambda X: flat(X).tolist(),
    "object array of arrays": object_array,
    "object dtype": lambda X: X.astype(object),
    "object dtype, flat": lambda X: flat(X).astype(object),
    "big-endian": lambda X: X.astype(">f8"),
    "longdouble": lambda X: X.astype(np.longdouble),
    "longdouble, flat": lambda X: flat(X).astype(np.longdouble),
    "longdouble, list": lambda X: list(X.astype(np.longdouble)),
    "pandas": lambda X: pd.DataFrame(flat(X), columns=COLUMNS),
    "pandas, nullable": lambda X: pd.DataFrame(flat(X), columns=COLUMNS).astype("Float64"),
    "polars": lambda X: pl.DataFrame(flat(X), schema=COLUMNS),
    "list of pandas": lambda X: [pd.DataFrame(member) for member in X],
    "list of polars": lambda X: [pl.DataFrame(member) for member in X],
    "Fortran order": np.asfortranarray,
    "Fortran order, flat": lambda X: np.asfortranarray(flat(X)),
    "negative strides": reversed_view,
    "negative strides, list": lambda X: list(reversed_view(X)),
    "strided": strided_view,
    "strided, flat": lambda X: strided_view(flat(X)),
    "strided, list": lambda X: list(strided_view(X)),
    "read-only": lambda X: read_only(X.copy()),
    "tensor": lambda X: torch.tensor(X),
    "tensor, flat": lambda X: torch.tensor(flat(X)),
    "tensor, list": lambda X: [torch.tensor(member) for member in X],
    "tensor with gradient": lambda X: torch.tensor(X, requires_grad=True),
    "tensor with gradient, list": lambda X: [torch.tensor(m, requires_grad=True) for m in X],
    "tensor, transposed memory": lambda X: torch.tensor(X.swapaxes(0, 2).copy()).transpose(0, 2),
}


@pytest.fixture(scope="module")
def data():
    """Training and test sequences with exact targets, and the 3-D model's predictions."""
    X = make_sequences(0.3, 60, N_TOKENS, TOKEN_DIM)
    y = predict_heads(*make_heads(2, 1, TOKEN_DIM), X)[:, 0]
    model = MHLARegressor().fit(X[:40], y[:40])
    predictions = model.predict(X[40:])
    np.testing.assert_allclose(predictions, y[40:], rtol=1e-10, atol=1e-10)
    return X[:40], y[:40], X[40:], predictions


def assert_same(predictions, expected):
    np.testing.assert_allclose(np.asarray(predictions), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_forms_give_the_same_model(form, data):
    X, y, X_new, expected = data
    model = MHLARegressor(n_tokens=N_TOKENS).fit(FORMS[form](X), y)
    assert_same(model.predict(FORMS[form](X_new)), expected)
    assert model.token_dim_ == TOKEN_DIM


@pytest.mark.parametrize("fitted_on", ["array", "flat", "list"])
@pytest.mark.parametrize("predicted_on", ["array", "flat", "list"])
def test_fit_on_one_form_and_predict_on_another(fitted_on, predicted_on, data):
    X, y, X_new, expected = data
    model = MHLARegressor(n_tokens=N_TOKENS).fit(FORMS[fitted_on](X), y)
    assert_same(model.predict(FORMS[predicted_on](X_new)), expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("form", ["array", "flat", "list"])
def test_low_precision_is_widened_before_anything_else(dtype, form, data):
    # The reference sees the rounded values as float64: what is lost is lost in the input alone.
    X, y, X_new, _ = data
    rounded = [torch.tensor(part).to(getattr(torch, dtype)) for part in (X, X_new)]
    wide = [part.double().numpy() for part in rounded]
    expected = MHLARegressor().fit(wide[0], y).predict(wide[1])
    given = rounded if dtype == "bfloat16" else [part.numpy() for part in rounded]
    if form == "flat":
        given = [part.reshape(len(part), -1) for part in given]
    if form == "list":
        given = [list(part) for part in given]
    model = MHLARegressor(n_tokens=N_TOKENS).fit(given[0], y)
    predictions = model.predict(given[1])
    assert_same(predictions, expected)
    assert str(predictions.dtype).endswith("float64")


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("form", ["array", "flat", "list"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "bool"])
def test_integers_do_not_overflow(dtype, form, library):
    # The full range of int8 and uint8: squares and cubes leave both, and abs(-128) is -128.
    low, high = {"uint8": (0, 256), "bool": (0, 2)}.get(dtype, (-128, 128))
    X = np.random.default_rng(0).integers(low, high, (60, N_TOKENS, TOKEN_DIM))
    X[0, 0, 0], X[-1, -1, -1] = low, high - 1
    y = make_sequences(0, 40, 1, 1)[:, 0, 0]
    expected = MHLARegressor().fit(X[:40].astype(float), y).predict(X[40:].astype(float))
    small = X.astype(dtype) if library == "numpy" else torch.tensor(X.astype(dtype))
    if form == "flat":
        small = small.reshape(60, -1)
    train, test = small[:40], small[40:]
    if form == "list":
        train, test = list(train), list(test)
    model = MHLARegressor(n_tokens=N_TOKENS).fit(train, y)
    assert_same(model.predict(test), expected)


def test_extreme_integer_is_not_the_largest_negative():
    # max |x| must be 128, not -128: a wrong sign would disable the scaling of tokens.
    X = np.full((6, 3, 2), -128, dtype=np.int8)
    X[::2, :, 1] = 127
    y = np.arange(6.0)
    expected = MHLARegressor().fit(X.astype(float), y).predict(X.astype(float))
    assert_same(MHLARegressor().fit(X, y).predict(X), expected)


@pytest.mark.parametrize("form", ["array", "flat"])
def test_read_only_memory_map(form, data, tmp_path):
    X, y, X_new, expected = data
    np.save(tmp_path / "tokens.npy", FORMS[form](X))
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    model = MHLARegressor(n_tokens=N_TOKENS).fit(mapped, y)
    assert_same(model.predict(FORMS[form](X_new)), expected)
    assert_same(model.predict(mapped), model.predict(X))


@pytest.mark.parametrize(
    "form", ["array", "flat", "list", "pandas", "tensor", "tensor with gradient"]
)
def test_input_is_left_as_it_was(form, data):
    X, y, *_ = data
    given = FORMS[form](X.copy())
    targets, weights = y.copy(), np.linspace(0, 1, len(y))
    model = MHLARegressor(n_tokens=N_TOKENS, fit_intercept=True, alpha=0.1, state="mean")
    model.fit(given, targets, weights)
    model.predict(given)
    after = given.detach() if torch.is_tensor(given) else given
    np.testing.assert_array_equal(np.asarray(after).reshape(X.shape), X)
    np.testing.assert_array_equal(targets, y)
    np.testing.assert_array_equal(weights, np.linspace(0, 1, len(y)))


def test_list_may_mix_libraries_and_types():
    X = np.random.default_rng(0).integers(-9, 9, (30, 3, 2)).astype(float)
    y = np.random.default_rng(1).standard_normal(30)
    mixed = list(X)
    mixed[1] = torch.tensor(X[1])
    mixed[2] = X[2].astype(np.int8)
    mixed[3] = X[3].tolist()
    mixed[4] = pd.DataFrame(X[4])
    mixed[5] = X[5].astype(np.float32)
    expected = MHLARegressor().fit(X, y).predict(X)
    assert_same(MHLARegressor().fit(mixed, y).predict(mixed), expected)


def test_object_array_of_ragged_sequences():
    ragged = make_ragged([1, 3, 2, 5] * 8, TOKEN_DIM)
    y = np.arange(32.0)
    expected = MHLARegressor().fit(ragged, y).predict(ragged)
    packed = object_array(ragged)
    assert_same(MHLARegressor().fit(packed, y).predict(packed), expected)


def test_case_I02_ragged_list_equals_front_padded_array():
    sequences = make_ragged([1 + i % 9 for i in range(90)], 3)
    y = predict_heads(*make_heads(2, 1, 3), sequences)[:, 0]
    y = y + np.random.default_rng(5).standard_normal(90)
    padded = np.zeros((90, 9, 3))
    for i, sequence in enumerate(sequences):
        padded[i, 9 - len(sequence) :] = sequence
    for method in ("primal", "dual"):
        model = MHLARegressor(method=method, alpha=0.1, fit_intercept=True)
        expected = model.fit(padded, y).predict(padded)
        predictions = model.fit(sequences, y).predict(sequences)
        np.testing.assert_allclose(predictions, expected, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(model.predict(padded), expected, rtol=1e-10, atol=1e-10)


# Targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        pd.Series,
        lambda y: pd.Series(y, index=np.arange(len(y))[::-1]),  # an index is not an order
        lambda y: pd.Series(y).astype("Float64"),
        lambda y: pl.Series(y),
        lambda y: torch.tensor(y),
        lambda y: torch.tensor(y, requires_grad=True),
        lambda y: list(torch.tensor(y)),
        lambda y: y.astype(object),
        lambda y: y.astype(np.longdouble),
        lambda y: np.repeat(y, 2)[::2],
        lambda y: read_only(y.copy()),
    ],
)
def test_targets_in_every_form(convert, data):
    X, y, X_new, expected = data
    predictions = MHLARegressor().fit(X, convert(y)).predict(X_new)
    assert isinstance(predictions, np.ndarray)
    assert_same(predictions, expected)


@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize(
    "convert",
    [
        lambda Y: Y.tolist(),
        list,
        pd.DataFrame,
        lambda Y: pl.DataFrame(Y),
        lambda Y: torch.tensor(Y),
        np.asfortranarray,
    ],
)
def test_several_targets_in_every_form(convert, n_outputs, data):
    X, y, X_new, expected = data
    scale = np.arange(1.0, n_outputs + 1)
    predictions = MHLARegressor().fit(X, convert(y[:, None] * scale)).predict(X_new)
    assert_same(predictions, expected[:, None] * scale)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float32", "bool"])
def test_narrow_targets_are_widened(dtype, data):
    X, *_ = data
    y = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 128, len(X))
    expected = MHLARegressor(fit_intercept=True).fit(X, y.astype(float)).predict(X)
    predictions = MHLARegressor(fit_intercept=True).fit(X, y.astype(dtype)).predict(X)
    assert predictions.dtype == np.float64
    assert_same(predictions, expected)


@pytest.mark.parametrize(
    "convert", [list, pd.Series, pl.Series, torch.tensor, lambda w: w.astype(np.float32)]
)
def test_weights_in_every_form(convert, data):
    X, y, *_ = data
    y = y + np.random.default_rng(3).standard_normal(len(y))  # else weights would not matter
    weights = np.arange(len(y)) % 4 * 1.0
    expected = MHLARegressor().fit(X, y, weights).predict(X)
    assert np.abs(expected - MHLARegressor().fit(X, y).predict(X)).max() > 1e-3
    assert_same(MHLARegressor().fit(X, y, convert(weights)).predict(X), expected)


def test_ragged_targets_in_an_object_array():
    sequences = make_ragged([1, 3, 2, 5] * 8, TOKEN_DIM)
    y = [predict_heads(*make_heads(1, 1, TOKEN_DIM), [s], output="sequence") for s in sequences]
    model = MHLARegressor(output="sequence").fit(sequences, object_array(y))
    for predicted, expected in zip(model.predict(sequences), y, strict=True):
        np.testing.assert_allclose(predicted, expected, rtol=1e-9, atol=1e-9)


# What is refused -----------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch):
    """From here on, whoever starts to compute fails with something that is no ValueError."""

    def refuse(*args, **kwargs):
        raise AssertionError("work was started before the input was checked")

    monkeypatch.setattr(_fitting, "Design", refuse)
    monkeypatch.setattr(_fitting, "LeastSquaresProblem", refuse)


def fitting(X, y=None, sample_weight=None, **params):
    """Fit; targets of the right shape unless given."""
    y = np.ones(len(X)) if y is None else y
    return MHLARegressor(**params).fit(X, y, sample_weight)


def sample():
    return make_sequences(0, 12, N_TOKENS, TOKEN_DIM)


def all_of(*parts):
    """A pattern that finds every part, in any order."""
    return "(?s)" + "".join(f"(?=.*{part})" for part in parts)


def poked(array, at, value):
    array = array.copy()
    array[at] = value
    return array


def frame(X):
    return pd.DataFrame(flat(X), columns=COLUMNS)


def polars_frame(X):
    return pl.DataFrame(flat(X), schema=COLUMNS)


# The same place in every form: sequence 5, token 2, feature 1 is row 5, column 5, named "f".
LOCATED_FORMS = [
    (lambda X: X, "sequence 5, token 2, feature 1"),
    (list, "sequence 5, token 2, feature 1"),
    (lambda X: torch.tensor(X), "sequence 5, token 2, feature 1"),
    (lambda X: [torch.tensor(member) for member in X], "sequence 5, token 2, feature 1"),
    (flat, "row 5, column 5"),
    (lambda X: torch.tensor(flat(X)), "row 5, column 5"),
    (frame, "row 5, column 'f'"),
    (polars_frame, "row 5, column 'f'"),
]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("convert", "place"),
    [*LOCATED_FORMS, (lambda X: X.astype(np.float32), "sequence 5, token 2, feature 1")],
)
@pytest.mark.parametrize(
    ("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")]
)
def test_non_finite_input_is_located(convert, place, value, kind):
    X = convert(poked(sample(), (5, 2, 1), value))
    with pytest.raises(ValueError, match=rf"Input X contains {kind}.*{re.escape(place)}"):
        fitting(X, n_tokens=N_TOKENS)


@pytest.mark.usefixtures("no_work")
def test_non_finite_value_in_a_ragged_list_is_located():
    sequences = make_ragged([3, 1, 4, 2], 2)
    sequences[2][3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN, first at sequence 2, token 3, feature 1"):
        fitting(sequences)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("layout", ["array", "list"])
def test_non_finite_value_far_into_the_data_is_located(layout):
    # Beyond the first block of values that is looked at.
    X = np.zeros((3, 300_000, 2))
    X[2, 299_999, 0] = np.inf
    with pytest.raises(ValueError, match="infinity, first at sequence 2, token 299999, feature 0"):
        fitting(X if layout == "array" else list(X))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("convert", [convert for convert, _ in LOCATED_FORMS])
@pytest.mark.parametrize("value", [1e110, -1e110])
def test_cube_that_overflows_is_refused(convert, value):
    X = convert(poked(sample(), (5, 2, 1), value))
    with pytest.raises(ValueError, match=r"X holds a value of size 1e\+110; its cube .*overflow"):
        fitting(X, n_tokens=N_TOKENS)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("convert", [convert for convert, _ in LOCATED_FORMS])
def test_cube_that_underflows_is_refused(convert):
    X = np.full((12, N_TOKENS, TOKEN_DIM), 1e-110)
    with pytest.raises(ValueError, match=r"value of X is 1e-110; its cube .*underflow"):
        fitting(convert(X), n_tokens=N_TOKENS)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("convert", [lambda X: X, flat, list])
def test_longdouble_beyond_float64_is_refused(convert):
    if np.finfo(np.longdouble).max <= np.finfo(np.float64).max:
        pytest.skip("longdouble is float64 here")
    X = poked(sample().astype(np.longdouble), (5, 2, 1), np.longdouble("1e400"))
    with pytest.raises(ValueError, match=r"X (contains infinity|holds a value)"):
        fitting(convert(X), n_tokens=N_TOKENS)


def test_zero_tokens_are_no_underflow():
    X = np.zeros((4, 3, 2))
    model = MHLARegressor().fit(X, np.arange(4.0))
    np.testing.assert_array_equal(model.predict(X), np.zeros(4))


@pytest.mark.parametrize("scale", [1e-100, 1e-50, 1e50, 1e101])
def test_sizes_within_the_range_are_accepted(scale, data):
    X, y, X_new, expected = data
    model = MHLARegressor().fit(X * scale, y)
    np.testing.assert_allclose(model.predict(X_new * scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["array", "flat", "list"])
def test_tiny_tokens_can_be_predicted_but_not_fitted(form, data):
    X, y, X_new, _ = data
    model = MHLARegressor(n_tokens=N_TOKENS).fit(FORMS[form](X), y)
    np.testing.assert_allclose(model.predict(FORMS[form](X_new * 1e-120)), 0.0, atol=1e-300)
    with pytest.raises(ValueError, match="underflow"):
        model.fit(FORMS[form](X * 1e-120), y)


@pytest.mark.parametrize(("token_scale", "target_scale"), [(1e-100, 1e10), (1e-60, 1e200)])
def test_coefficients_that_overflow_are_refused(token_scale, target_scale, data):
    # y / X^3 is what the coefficients measure; infinite ones would predict NaN.
    X, y, *_ = data
    with pytest.raises(ValueError, match=r"(?i)overflow"):
        MHLARegressor().fit(X * token_scale, y * target_scale)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("to", [np.asarray, torch.tensor])
def test_wrong_number_of_dimensions(to):
    X = np.arange(48.0).reshape(2, 4, 3, 2)
    with pytest.raises(ValueError, match="Expected 2D array, got scalar array"):
        fitting(to(X[0, 0, 0, 0]), y=np.ones(1))
    with pytest.raises(ValueError, match="Expected 2D array, got 1D array"):
        fitting(to(X[0, 0, :, 0]))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("convert", [lambda X: X, torch.tensor, list, lambda X: X.tolist()])
def test_four_dimensions_are_refused_with_what_is_accepted(convert):
    # Three dimensions are fine, so the message must not say that two are the limit.
    X = np.arange(48.0).reshape(2, 4, 3, 2)
    with pytest.raises(ValueError, match=r"(?s)(4|dim).*3-?D"):
        fitting(convert(X))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "value", [3.0, "abc", None, [], {}, [1, 2, 3]], ids=["number", "text", "None", "[]", "{}", "1d"]
)
def test_what_is_no_table_is_refused(value):
    with pytest.raises(ValueError, match=r"(?s)(X|array)"):
        fitting(value, y=np.ones(3))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((0, 4, 2), "0 sample"),
        ((12, 0, 2), "0 token"),
        ((12, 4, 0), "0 feature"),
        ((0, 8), "0 sample"),
        ((12, 0), "0 feature"),
    ],
)
@pytest.mark.parametrize("to", [np.asarray, torch.tensor])
def test_empty_input_is_refused(shape, what, to):
    with pytest.raises(ValueError, match=what):
        fitting(to(np.empty(shape)))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("at", [0, 1, 11])
def test_bad_members_of_a_list_are_named(at):
    def with_member(member):
        members = list(sample())
        members[at] = member
        return members

    with pytest.raises(ValueError, match=rf"empty sequence: element {at} has"):
        fitting(with_member(np.empty((0, TOKEN_DIM))))
    with pytest.raises(ValueError, match=rf"element {max(at, 1)} has width"):
        fitting(with_member(np.ones((4, TOKEN_DIM + 1))))
    with pytest.raises(ValueError, match=rf"X\[{at}\].*numbers"):
        fitting(with_member(np.array([["a", "b"]])))
    with pytest.raises(ValueError, match=rf"X\[{at}\].*(date|numbers)"):
        fitting(with_member(np.array([["2024-02-29", "2024-03-01"]], dtype="M8[D]")))
    missing = rf"(sequence {at}, |X\[{at}\].*)token 0, feature 1"
    with pytest.raises(ValueError, match=missing):
        fitting(with_member(np.array([[1.0, None]], dtype=object)))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("at", [0, 1, 11])
@pytest.mark.parametrize(
    "member", [np.ones(2), np.ones((1, 2, 2)), 3.0, None], ids=["1-D", "3-D", "number", "None"]
)
def test_members_of_a_list_with_wrong_dimensions_are_named(at, member):
    members = list(sample())
    members[at] = member
    with pytest.raises(ValueError, match=rf"(element {at}\b|X\[{at}\])"):
        fitting(members)


@pytest.mark.usefixtures("no_work")
def test_ragged_nested_list_is_named():
    members = sample().tolist()
    members[3] = [[1.0, 2.0], [3.0]]
    with pytest.raises(ValueError, match=r"(element 3\b|X\[3\])"):
        fitting(members)


@pytest.mark.usefixtures("no_work")
def test_width_zero_tokens_are_refused():
    with pytest.raises(ValueError, match=r"element 0 has (shape \(3, 0\)|width 0)"):
        fitting([np.ones((3, 0))] * 4)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "convert", [lambda X: X, flat, list, frame, lambda X: torch.tensor(X), lambda X: X.astype("F")]
)
def test_complex_input_is_refused(convert):
    with pytest.raises(ValueError, match="Complex data not supported"):
        fitting(convert(sample() + 1j), n_tokens=N_TOKENS)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("kind", ["csr_array", "csr_matrix", "coo_array"])
def test_sparse_input_is_refused(kind):
    X = getattr(scipy.sparse, kind)(flat(sample()))
    with pytest.raises(TypeError, match=r"Sparse data was passed for X, but dense"):
        fitting(X, y=np.ones(12), n_tokens=N_TOKENS)
    with pytest.raises((TypeError, ValueError), match=r"(?i)sparse"):
        fitting([X] * 3)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("n_tokens", [3, 5, 9])
@pytest.mark.parametrize("convert", [flat, frame, polars_frame])
def test_n_tokens_must_divide_the_columns(convert, n_tokens):
    with pytest.raises(ValueError, match=rf"X has 8 columns, which n_tokens={n_tokens} does not"):
        fitting(convert(sample()), n_tokens=n_tokens)


# Text, dates and missing values


TEXT_COLUMNS = {
    "pandas": lambda values: pd.DataFrame(frame(sample()).assign(c=values)),
    "pandas, category": lambda values: frame(sample()).assign(
        c=pd.Series(values, dtype="category")
    ),
    "pandas, object": lambda values: frame(sample()).assign(c=pd.Series(values, dtype=object)),
    "polars": lambda values: polars_frame(sample()).with_columns(c=pl.Series(values)),
}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("kind", TEXT_COLUMNS)
def test_text_column_is_named(kind):
    X = TEXT_COLUMNS[kind](["1.5"] * 7 + ["north"] + ["2"] * 4)
    with pytest.raises(ValueError, match=all_of("X ", "column 'c'", "row 7", "north")):
        fitting(X, n_tokens=N_TOKENS)


DATES = np.array(["2024-02-29"] * 12, dtype="M8[us]")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    "X",
    [frame(sample()).assign(c=DATES), polars_frame(sample()).with_columns(c=pl.Series(DATES))],
    ids=["pandas", "polars"],
)
def test_date_column_is_named(X):
    # A date is no number: nanoseconds since 1970 would be a silent surprise.
    with pytest.raises(ValueError, match=r"X.*column 'c'"):
        fitting(X, n_tokens=N_TOKENS)


@pytest.mark.usefixtures("no_work")
def test_text_in_arrays_is_located():
    X = poked(sample().astype(object), (5, 2, 1), "north")
    with pytest.raises(ValueError, match=all_of("X ", "column 5", "row 5", "north")):
        fitting(flat(X), n_tokens=N_TOKENS)
    with pytest.raises(ValueError, match=all_of("X ", "sequence 5, token 2, feature 1", "north")):
        fitting(X)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("convert", [lambda X: X, flat])
@pytest.mark.parametrize("value", ["north", "1.5"])
def test_arrays_of_text_are_refused(convert, value):
    # Numbers written as text too: NumPy would not compute with them either.
    with pytest.raises(ValueError, match=r"(?i)(X .*(numbers|text)|strings.*numeric)"):
        fitting(convert(np.full((12, N_TOKENS, TOKEN_DIM), value)), n_tokens=N_TOKENS)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("Int64", [1, 2, None]),
        ("UInt8", [1, 2, None]),
        ("Float64", [1.5, 2.5, None]),
        ("boolean", [True, False, None]),
        ("object", [1.5, 2.5, pd.NA]),
        ("object", [1.5, 2.5, None]),
    ],
)
def test_missing_value_in_a_frame_is_located(dtype, values):
    X = pd.DataFrame({"left": np.arange(12.0), "right": pd.array(values * 4, dtype=dtype)})
    with pytest.raises(ValueError, match=r"row 2, column 'right'"):
        fitting(X)
    with pytest.raises(ValueError, match=r"sequence 0, token 2, feature 1|X\[0\]"):
        fitting([X, X])


@pytest.mark.usefixtures("no_work")
def test_missing_value_in_a_polars_frame_is_located():
    X = pl.DataFrame({"left": np.arange(12.0), "right": [1, 2, None] * 4})
    with pytest.raises(ValueError, match=r"row 2, column 'right'"):
        fitting(X)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("missing", [pd.NA, None])
def test_missing_value_in_an_object_array_is_located(missing):
    X = poked(sample().astype(object), (5, 2, 1), missing)
    with pytest.raises(ValueError, match=r"X.*sequence 5, token 2, feature 1"):
        fitting(X)
    with pytest.raises(ValueError, match=r"X.*row 5, column 5"):
        fitting(flat(X), n_tokens=N_TOKENS)


def test_case_I06_data_frames():
    integers = pd.DataFrame(
        {
            "first": pd.array([1, 2, 5, 3, 0, -4], dtype="Int64"),
            "second": pd.array([3, -1, 2, 2, 7, 1], dtype="Int8"),
        }
    )
    y = np.arange(6.0)
    expected = MHLARegressor().fit(integers.astype(float), y).predict(integers.astype(float))
    predictions = MHLARegressor().fit(integers, y).predict(integers)
    np.testing.assert_allclose(predictions, expected, rtol=1e-13, atol=1e-13)

    missing = integers.copy()
    missing.loc[3, "second"] = pd.NA
    with pytest.raises(ValueError, match="row 3, column 'second'"):
        MHLARegressor().fit(missing, y)
    text = integers.assign(second=["1", "2", "3", "four", "5", "6"])
    with pytest.raises(ValueError, match=all_of("column 'second'", "row 3", "'four'")):
        MHLARegressor().fit(text, y)
    huge = integers.astype(float)
    huge.loc[4, "first"] = 1e110
    with pytest.raises(ValueError, match=r"X holds a value of size 1e\+110; its cube .*overflow"):
        MHLARegressor().fit(huge, y)
    model = MHLARegressor().fit(integers, y)
    for wrong in (missing, text, huge):
        with pytest.raises(ValueError, match="X"):
            model.predict(wrong)


@pytest.mark.usefixtures("no_work")
def test_column_names_of_mixed_types_are_refused():
    X = frame(sample()).rename(columns={"c": 3})
    with pytest.raises(TypeError, match="Feature names are only supported if all input features"):
        fitting(X, n_tokens=N_TOKENS)


# Targets and weights


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "requires y to be passed"),
        (np.ones(11), "X has 12 sequences, y has 11 rows"),
        (np.ones((13, 2)), "X has 12 sequences, y has 13 rows"),
        (np.ones((12, 4, 2)), r"y has 3 dimensions \(shape \(12, 4, 2\)\)"),
        (3.0, "y has 0 dimensions"),
        (np.ones((12, 0)), "y has no outputs"),
        (poked(np.ones(12), 3, np.nan), "Input y contains NaN"),
        (poked(np.ones(12), 3, np.inf), "Input y contains infinity"),
        (pd.Series(np.ones(12)).astype("Float64").where(np.arange(12) != 3), "y contains NaN"),
        (np.ones(12) * 1j, "y cannot be read as numbers: Complex data"),
        (DATES, r"\by (holds|cannot)"),
        (["high"] * 12, r"\by cannot be read as numbers"),
        (["yearly"] * 12, r"\by cannot be read as numbers"),
        ([[1.0]] * 11 + [[1.0, 2.0]], r"\by cannot be read as numbers"),
    ],
)
def test_bad_targets_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        MHLARegressor().fit(sample(), y)


@pytest.mark.usefixtures("no_work")
def test_sparse_targets_are_refused():
    with pytest.raises((TypeError, ValueError), match="Sparse data was passed for y"):
        fitting(sample(), y=scipy.sparse.csr_array(np.ones((12, 1))))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(11), r"sample_weight.shape == \(11,\), expected \(12,\)"),
        (np.ones((12, 1)), r"sample_weight.shape == \(12, 1\), expected \(12,\)"),
        (poked(np.ones(12), 7, -2.0), r"sample_weight\[7\] = -2"),
        (-1.0, "sample_weight must not be negative"),
        (poked(np.ones(12), 7, np.nan), "sample_weight contains NaN"),
        (poked(np.ones(12), 7, np.inf), "sample_weight contains infinity"),
        (np.nan, "sample_weight contains NaN"),
        (np.zeros(12), "sample_weight is zero for every sample"),
        (0.0, "sample_weight is zero for every sample"),
        (["heavy"] * 12, "sample_weight cannot be read as numbers"),
        ("heavy", "sample_weight"),
        (np.ones(12) * 1j, "sample_weight cannot be read as numbers"),
        ([[1.0], [1.0, 2.0]] + [1.0] * 10, "sample_weight"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        fitting(sample(), sample_weight=weights)


SEQUENCE_Y = np.arange(48.0).reshape(12, 4)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (SEQUENCE_Y[:, :3], r"sequence 0 has 4 tokens, but y has shape \(12, 3\)"),
        (SEQUENCE_Y[:11], "X has 12 sequences, y has 11 rows"),
        (SEQUENCE_Y[:, 0], r"y has 1 dimensions .*needs \(n_samples, n_tokens\)"),
        (SEQUENCE_Y[None, :, :, None], "y has 4 dimensions"),
        (SEQUENCE_Y[:, :, None][:, :, :0], "y has no outputs"),
        ([*SEQUENCE_Y[:5], SEQUENCE_Y[5, :3], *SEQUENCE_Y[6:]], r"4 tokens, y\[5\] has 3 rows"),
        ([*SEQUENCE_Y[:5], SEQUENCE_Y[5, :, None], *SEQUENCE_Y[6:]], r"element 5 has shape"),
        (list(SEQUENCE_Y[:11]), "X has 12 sequences, y has 11 rows"),
        ([*SEQUENCE_Y[:5], np.full(4, np.nan), *SEQUENCE_Y[6:]], r"y\[5\] contains NaN"),
        ([*SEQUENCE_Y[:5], ["a"] * 4, *SEQUENCE_Y[6:]], r"y\[5\] cannot be read as numbers"),
        ([part[:, None, None] for part in SEQUENCE_Y], r"Every element of y must be"),
        ([part[:, None][:, :0] for part in SEQUENCE_Y], r"y.*(no outputs|at least (one|1))"),
    ],
)
def test_bad_sequence_targets_are_refused(y, message):
    for X in (sample(), list(sample())):
        with pytest.raises(ValueError, match=message):
            fitting(X, y=y, output="sequence")


@pytest.mark.usefixtures("no_work")
def test_sequence_targets_must_follow_ragged_lengths():
    sequences = make_ragged([4, 4, 2, 4], 2)
    with pytest.raises(ValueError, match=r"sequence 2 has 2 tokens, but y has shape \(4, 4\)"):
        fitting(sequences, y=np.ones((4, 4)), output="sequence")
    with pytest.raises(ValueError, match=r"sequence 2 has 2 tokens, y\[2\] has 4 rows"):
        fitting(sequences, y=list(np.ones((4, 4))), output="sequence")


# Tensors that stay on an accelerator have checks of their own; they run on any tensor.


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int8", "uint8", "bool"])
@pytest.mark.parametrize("form", ["array", "flat"])
def test_accelerator_tensors_are_understood_as_arrays_are(form, dtype):
    tokens = torch.tensor(sample() * 40).abs().to(getattr(torch, dtype))
    if dtype == "int8":
        tokens[3, 1, 0] = -128  # has no absolute value in int8
    given = tokens.reshape(12, -1) if form == "flat" else tokens
    found = _tokens._check_tensor(given, N_TOKENS, "cuda:0")
    expected = _tokens.check_sequences(given, n_tokens=N_TOKENS)
    assert (found.token_dim, found.largest) == (expected.token_dim, expected.largest)
    assert (found.layout, found.device) == (expected.layout, "cuda:0")
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    assert torch.equal(found.data, tokens)


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (torch.ones(3), "2-D or 3-D"),
        (torch.ones(2, 2, 2, 2), "2-D or 3-D"),
        (torch.ones(12, 9), "9 columns, which n_tokens=4 does not divide"),
        (torch.ones(12, 0, 2), "empty"),
        (torch.ones(0, 8), "empty"),
        (torch.full((12, 8), torch.nan), "X contains NaN"),
        (torch.full((12, 4, 2), -torch.inf), "X contains .*infinity"),
        (torch.ones(12, 4, 2) * 1j, "Complex data not supported"),
    ],
)
def test_bad_accelerator_tensors_are_refused(X, message):
    with pytest.raises(ValueError, match=message):
        _tokens._check_tensor(X, N_TOKENS, "cuda:0")


# A failed fit leaves a fitted model as it was


def _later_width(value=1.0):
    return np.full((5, 12), value)


FAILING_FITS = {
    "NaN": lambda model: model.fit(_later_width(np.nan), np.ones(5)),
    "overflow": lambda model: model.fit(_later_width(1e110), np.ones(5)),
    "3-D overflow": lambda model: model.fit(np.full((5, 3, 3), 1e110), np.ones(5)),
    "targets": lambda model: model.fit(_later_width(), np.ones(4)),
    "3-D targets": lambda model: model.fit(np.ones((5, 3, 3)), np.ones(4)),
    "other names": lambda model: model.fit(
        pd.DataFrame(np.ones((5, 8)), columns=[*"ABCDEFGH"]), np.ones(4)
    ),
    "weights": lambda model: model.fit(_later_width(), np.ones(5), -np.ones(5)),
    "columns": lambda model: model.fit(np.ones((5, 9)), np.ones(5)),
    "mixed names": lambda model: model.fit(
        pd.DataFrame(np.ones((5, 8)), columns=[*"ABCDEFG", 8]), np.ones(5)
    ),
}


@pytest.mark.parametrize("form", ["array", "flat", "list", "pandas"])
@pytest.mark.parametrize("failure", FAILING_FITS)
def test_failed_second_fit_leaves_the_model_usable(failure, form, data):
    X, y, X_new, expected = data
    model = MHLARegressor(n_tokens=N_TOKENS).fit(FORMS[form](X), y)
    n_features, heads = model.n_features_in_, model.value_
    with pytest.raises((TypeError, ValueError)):
        FAILING_FITS[failure](model)
    assert model.n_features_in_ == n_features
    assert hasattr(model, "feature_names_in_") == (form == "pandas")
    assert_same(model.predict(FORMS[form](X_new)), expected)
    if form != "pandas":
        assert_same(model.predict(flat(X_new)), expected)
    np.testing.assert_array_equal(model.value_, heads)
