"""
Quickstart: the fat content of meat from its near-infrared spectrum
===================================================================

The Tecator data hold 215 absorbance spectra of meat samples (100 channels from 850 to 1050 nm)
and their fat content in percent. We turn every spectrum into a sequence of tokens, fit
:class:`~sklearn_mhla.MHLARegressor` inside a scikit-learn pipeline, choose its ridge penalty by
cross-validation and compare it with what one would otherwise reach for.

The data ship with sktime. Run as ``python plot_quickstart.py`` to see the figure, or as
``python plot_quickstart.py figure.png`` to save it.
"""

import sys
import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score, root_mean_squared_error
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sktime.datasets import load_tecator

from sklearn_mhla import MHLARegressor

# %%
# Data
# ----
# The split is the one that comes with the data: 172 samples to train, 43 to test. Level and slope
# of a spectrum depend on how the light scatters and say little about fat, so all models also get
# to see the standardised second differences of the spectrum, called the curve below.

X_train, y_train = load_tecator(split="train", return_type="numpy3D")
X_test, y_test = load_tecator(split="test", return_type="numpy3D")
X_train, X_test = X_train[:, 0], X_test[:, 0]  # there is one channel only


def curves(spectra):
    """Second differences of each spectrum, with mean 0 and standard deviation 1."""
    curve = np.diff(spectra, n=2, axis=1)
    return (curve - curve.mean(axis=1, keepdims=True)) / curve.std(axis=1, keepdims=True)


# %%
# Tokens
# ------
# The model computes sums of ``S[j, k] * q[l]``, where the state ``S`` is the sum of
# ``outer(token, token)`` over all tokens and the query ``q`` is the last token. So a token should
# hold what is to be multiplied and summed, and the last token what the answer depends on:
#
# * one token per position of the curve: its value there, and cosines of the position (the first
#   one is the constant 1). The state then holds the cosine transform of the curve;
# * a last token that asks the question: the constant 1 and that same cosine transform.


def tokens(spectra, n_cosines=17):
    """Sequences of shape (n_spectra, n_positions + 1, 1 + n_cosines)."""
    curve = curves(spectra)
    n_spectra, n_positions = curve.shape
    phase = np.pi * (np.arange(n_positions) + 0.5) / n_positions
    cosines = np.cos(np.outer(phase, np.arange(n_cosines)))
    position = np.broadcast_to(cosines, (n_spectra, n_positions, n_cosines))
    query = np.column_stack([np.ones(n_spectra), curve @ cosines / np.sqrt(n_positions)])
    return np.concatenate([np.dstack([curve, position]), query[:, None]], axis=1)


# %%
# Fit
# ---
# Fitting is solving a ridge regression, to its global optimum: nothing to initialise and no
# learning rate. The penalty is the one thing to choose, by cross-validation on the training data
# (which is also where the tokens and their number of cosines were settled).

folds = KFold(10, shuffle=True, random_state=0)
mhla = GridSearchCV(
    make_pipeline(FunctionTransformer(tokens), MHLARegressor()),
    {"mhlaregressor__alpha": np.logspace(-2, 4, 7)},
    scoring="neg_root_mean_squared_error",
    cv=folds,
)
kernel_ridge = GridSearchCV(
    make_pipeline(StandardScaler(), KernelRidge(kernel="poly", degree=3)),
    {"kernelridge__alpha": np.logspace(-8, 2, 11)},
    scoring="neg_root_mean_squared_error",
    cv=folds,
)
ridge = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-8, 3, 34)))
boosting = HistGradientBoostingRegressor(random_state=0)
to_curve = FunctionTransformer(curves)
models = {
    "MHLARegressor": mhla,
    "KernelRidge, poly 3, on the curve": make_pipeline(to_curve, kernel_ridge),
    "RidgeCV on the curve": make_pipeline(to_curve, ridge),
    "HistGradientBoosting on the curve": make_pipeline(to_curve, boosting),
    "KernelRidge, poly 3, on the spectrum": kernel_ridge,
    "RidgeCV on the spectrum": ridge,
    "HistGradientBoosting on the spectrum": boosting,
}

predicted = {}
print(f"{'':36} {'RMSE':>6} {'R2':>6} {'fit [s]':>8}")
for name, model in models.items():
    start = time.perf_counter()
    model.fit(X_train, y_train)
    seconds = time.perf_counter() - start
    predicted[name] = model.predict(X_test)
    rmse = root_mean_squared_error(y_test, predicted[name])
    print(f"{name:36} {rmse:6.3f} {r2_score(y_test, predicted[name]):6.3f} {seconds:8.2f}")

# %%
# The times include the search over penalties. For MHLARegressor it chose this one, and promised
# this error:

best = mhla.best_estimator_["mhlaregressor"]
print(f"alpha = {best.alpha:g}, RMSE {-mhla.best_score_:.3f} in cross-validation")
print(f"{best.method_} form, rank {best.rank_}, tokens of width {best.token_dim_}")

# %%
# Predicted against measured
# --------------------------

figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
axes.axline((0, 0), slope=1, color="0.6", linewidth=1, zorder=0)
for name, color, fill in [
    ("RidgeCV on the spectrum", "0.6", "none"),
    ("MHLARegressor", "C0", "full"),
]:
    axes.plot(y_test, predicted[name], "o", color=color, fillstyle=fill, label=name)
axes.set(
    xlabel="measured fat content [%]",
    ylabel="predicted fat content [%]",
    title="43 held-out meat samples",
    aspect="equal",
)
axes.legend(frameon=False)

if len(sys.argv) > 1:
    figure.savefig(sys.argv[1], dpi=120)
else:
    plt.show()
