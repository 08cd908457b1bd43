"""Real data: one table of this package, of what one would otherwise take, and of their fit times.

Four data sets that come with installed packages, on the splits that come with them. All choices
are made by cross-validation on the training data unless a comment says otherwise; fit seconds
include them. Rocket appears where numba is installed, for sktime needs it there.

Run as ``python real_data.py`` for the table, or as ``python real_data.py vic_elec`` for one part.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import RidgeClassifierCV, RidgeCV
from sklearn.metrics import (
    accuracy_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, TimeSeriesSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sktime.datasets import load_covid_3month, load_japanese_vowels, load_tecator

from sklearn_mhla import MHLAClassifier, MHLARegressorCV
from sklearn_mhla.preprocessing import PositionFeatures, QueryToken, TokenScaler

HAS_NUMBA = importlib.util.find_spec("numba") is not None
STDS = (1.0, 0.3, 0.1)  # sizes of readings to choose from: the smaller, the more linear


class BestOf:
    """The candidate with the best score in cross-validation."""

    def __init__(self, candidates):
        self.candidates = candidates

    def fit(self, X, y):
        """Fit all candidates, each of which ends in an estimator that has ``best_score_``."""
        fitted = [candidate.fit(X, y) for candidate in self.candidates]
        self.best = max(fitted, key=lambda model: model[-1].best_score_)
        return self

    def predict(self, X):
        """Predict with the best."""
        return self.best.predict(X)


# --------------------------------------------------------------------------------------------------
# Data: (X, y), (X_test, y_test); regression rows are series after series, token by token.


def tecator():
    """Near-infrared spectra of meat, 100 wavelengths; fat content in percent."""
    parts = (load_tecator(split=split, return_type="numpy3D") for split in ("train", "test"))
    return tuple((X[:, 0], y) for X, y in parts)


def covid():
    """Daily cases of 84 days in a country; death rate."""
    parts = (load_covid_3month(split=split) for split in ("train", "test"))
    return tuple((np.stack(X.iloc[:, 0]), y.astype(float)) for X, y in parts)


def vic_elec():
    """Demand in GW and temperature in 48 half hours of a day; peak of the next day."""
    folder = Path(importlib.util.find_spec("tsdata").submodule_search_locations[0])
    table = pd.read_csv(folder / "fpp3" / "vic_elec.csv")
    demand = table["Demand"].to_numpy().reshape(-1, 48) / 1000.0
    temperature = table["Temperature"].to_numpy().reshape(-1, 48)
    X = np.dstack([demand, temperature])[:-1].reshape(len(demand) - 1, 96)
    y = demand.max(axis=1)[1:]
    return (X[:731], y[:731]), (X[731:], y[731:])


def vowels():
    """Nine speakers, 12 cepstral coefficients over 7 to 29 frames: lists of (n_frames, 12)."""

    def sequences(table):
        return [np.column_stack([*row]) for row in table.itertuples(index=False)]

    parts = (load_japanese_vowels(split=split) for split in ("train", "test"))
    return tuple((sequences(X), y) for X, y in parts)


# --------------------------------------------------------------------------------------------------
# Models of this package


def attention(*steps, n_tokens, n_features, std, n_components, cv):
    """Readings of size ``std``, their positions, their cosine transform as the query."""
    return make_pipeline(
        *steps,
        TokenScaler(std=std, n_tokens=n_tokens),
        PositionFeatures("cosine", n_components, n_tokens=n_tokens),
        QueryToken("cosine", n_components, features=range(n_features), n_tokens=n_tokens),
        MHLARegressorCV(cv=cv, fit_intercept=True, n_tokens=n_tokens + 1),
    )


def curve(spectra):
    """Second differences of each spectrum, with mean 0 and standard deviation 1."""
    differences = np.diff(spectra, n=2, axis=1)
    return StandardScaler().fit_transform(differences.T).T


def log_counts(X):
    """Logarithms of counts; corrections make a few of them negative."""
    return np.log1p(np.maximum(X, 0.0))


SHUFFLED = KFold(10, shuffle=True, random_state=0)
IN_TIME = TimeSeriesSplit(5)


def of_tecator():
    """Curvature of the spectrum; the number of cosines is chosen."""
    to_curve = FunctionTransformer(curve)
    return BestOf(
        [
            attention(to_curve, n_tokens=98, n_features=1, std=1.0, n_components=k, cv=SHUFFLED)
            for k in (8, 12, 16, 20)
        ]
    )


def of_covid():
    """Logarithms of counts; the size of the readings is chosen."""
    to_logs = FunctionTransformer(log_counts)
    return BestOf(
        [
            attention(to_logs, n_tokens=84, n_features=1, std=std, n_components=8, cv=SHUFFLED)
            for std in STDS
        ]
    )


class Change:
    """A model of the change from today's peak to tomorrow's."""

    def __init__(self, model):
        self.model = model

    def fit(self, X, y):
        """Fit the change."""
        self.model.fit(X, y - today(X))
        return self

    def predict(self, X):
        """Add the predicted change to today's peak."""
        return today(X) + self.model.predict(X)


def today(X):
    """Peak of the day that a row shows."""
    return X[:, ::2].max(axis=1)


def of_vic_elec(limit=2.0):
    """Deviations from the usual day, limited; the size of the readings is chosen.

    The limit and the forecast of the change instead of the level are not chosen by the folds,
    which would do without; they are there because another year leaves the range of the two before.
    """
    limited = FunctionTransformer(np.clip, kw_args={"a_min": -limit, "a_max": limit})
    steps = (StandardScaler(), limited)
    return BestOf(
        [
            attention(*steps, n_tokens=48, n_features=2, std=std, n_components=16, cv=IN_TIME)
            for std in STDS
        ]
    )


def of_vowels():
    """Frames and where they stand; size of the readings and penalty are chosen."""
    model = make_pipeline(
        TokenScaler(),
        PositionFeatures("cosine", 3),
        QueryToken("constant"),
        MHLAClassifier(state="mean"),
    )
    grid = {"tokenscaler__std": STDS, "mhlaclassifier__alpha": np.logspace(-5, 0, 6)}
    return GridSearchCV(model, grid, cv=StratifiedKFold(5, shuffle=True, random_state=0))


# --------------------------------------------------------------------------------------------------
# What one would otherwise take


def regressors(cv):
    """Models of flattened series."""
    return {
        "RidgeCV": make_pipeline(StandardScaler(), RidgeCV(np.logspace(-8, 5, 40))),
        "KernelRidge, poly 3": make_pipeline(
            StandardScaler(),
            GridSearchCV(KernelRidge(kernel="poly"), {"alpha": np.logspace(-8, 4, 13)}, cv=cv),
        ),
        "HistGradientBoosting": HistGradientBoostingRegressor(random_state=0),
        "RandomForest, 200 trees": RandomForestRegressor(200, random_state=0),
    }


def resampled(sequences, n_frames=29):
    """Sequences stretched to one length by linear interpolation, (n, n_frames, n_features)."""

    def stretched(Z):
        at = np.linspace(0, len(Z) - 1, n_frames)
        return np.column_stack([np.interp(at, np.arange(len(Z)), column) for column in Z.T])

    return np.stack([stretched(Z) for Z in sequences])


def flattened(sequences):
    """Resampled sequences, one per row."""
    return resampled(sequences).reshape(len(sequences), -1)


def classifiers():
    """Models of resampled and flattened sequences."""
    to_rows = FunctionTransformer(flattened)
    return {
        "RidgeClassifierCV": make_pipeline(
            to_rows, StandardScaler(), RidgeClassifierCV(np.logspace(-4, 5, 19))
        ),
        "HistGradientBoosting": make_pipeline(
            to_rows, HistGradientBoostingClassifier(random_state=0)
        ),
        "RandomForest, 200 trees": make_pipeline(
            to_rows, RandomForestClassifier(200, random_state=0)
        ),
        "1-NN, DTW": NearestInTimeWarping(),
    }


class NearestInTimeWarping:
    """One nearest neighbour in dynamic time warping of all features together."""

    def fit(self, X, y):
        """Keep the sequences, standardised and padded."""
        self.scaler = TokenScaler().fit(X)
        self.lengths = np.array([len(Z) for Z in X])
        self.padded = np.zeros((len(X), self.lengths.max(), X[0].shape[1]))
        for row, Z in zip(self.padded, self.scaler.transform(X), strict=True):
            row[: len(Z)] = Z
        self.y = y
        return self

    def predict(self, X):
        """Label of the nearest sequence."""
        return self.y[[self._distances(Z).argmin() for Z in self.scaler.transform(X)]]

    def _distances(self, Z):
        """Squared distances D[i, j] = |z_i - x_j|^2 + min(D[i-1, j], D[i, j-1], D[i-1, j-1])."""
        total = np.full((len(Z) + 1, self.padded.shape[1] + 1, len(self.padded)), np.inf)
        total[0, 0] = 0.0
        for i, z in enumerate(Z):
            cost = ((self.padded - z) ** 2).sum(axis=2)
            for j in range(self.padded.shape[1]):
                best = np.minimum(total[i, j + 1], np.minimum(total[i + 1, j], total[i, j]))
                total[i + 1, j + 1] = cost[:, j] + best
        return total[-1, self.lengths, np.arange(len(self.lengths))]


class Rocket:
    """Ten thousand random convolutions and ridge regression or classification on top."""

    def __init__(self, n_features, *, classify, normalise):
        from sktime.transformations.panel import rocket

        self.n_features = n_features
        self.convolutions = rocket.Rocket(normalise=normalise, random_state=0)
        ridge = (RidgeClassifierCV if classify else RidgeCV)(np.logspace(-3, 3, 10))
        self.model = make_pipeline(StandardScaler(with_mean=False), ridge)

    def fit(self, X, y):
        """Fit."""
        self.model.fit(self.convolutions.fit_transform(self._channels(X)), y)
        return self

    def predict(self, X):
        """Predict."""
        return self.model.predict(self.convolutions.transform(self._channels(X)))

    def _channels(self, X):
        """Arrays of (n, n_features, n_tokens)."""
        rows = resampled(X) if isinstance(X, list) else X.reshape(len(X), -1, self.n_features)
        return np.ascontiguousarray(rows.transpose(0, 2, 1))


def rockets(n_features, classify):
    """With every series standardised by itself, which is the default, and as it is."""
    options = {"n_features": n_features, "classify": classify}
    return {
        "Rocket, 10 000 kernels": Rocket(**options, normalise=True),
        "Rocket, series not standardised": Rocket(**options, normalise=False),
    }


# --------------------------------------------------------------------------------------------------
# The table


def tasks():
    """Name -> data, models."""
    forecasts = {
        "sklearn-mhla": Change(of_vic_elec()),
        "sklearn-mhla, level instead of change, no limit": of_vic_elec(limit=np.inf),
        "RidgeCV, change": Change(regressors(IN_TIME)["RidgeCV"]),
        "RandomForest, change": Change(regressors(IN_TIME)["RandomForest, 200 trees"]),
    }
    return {
        "Tecator": (tecator, {"sklearn-mhla": of_tecator()} | regressors(SHUFFLED), 1),
        "Covid3Month": (covid, {"sklearn-mhla": of_covid()} | regressors(SHUFFLED), 1),
        "vic_elec": (vic_elec, forecasts | regressors(IN_TIME), 2),
        "JapaneseVowels": (vowels, {"sklearn-mhla": of_vowels()} | classifiers(), 12),
    }


def promised(model):
    """Error or accuracy in cross-validation of what this package chose, as text."""
    model = model.model if isinstance(model, Change) else model
    if isinstance(model, BestOf):
        return f"{(-model.best[-1].best_score_) ** 0.5:#.3g}"
    return f"{model.best_score_:.3f}" if isinstance(model, GridSearchCV) else ""


def measure(model, train, test, classify):
    """Scores in cross-validation and on the test set as text, and fit seconds."""
    (X, y), (X_test, y_test) = train, test
    start = time.perf_counter()
    model.fit(X, y)
    seconds = time.perf_counter() - start
    predicted = model.predict(X_test)
    if classify:
        return f"{promised(model)} | {accuracy_score(y_test, predicted):.3f} | | | {seconds:.2g}"
    rmse, r2 = root_mean_squared_error(y_test, predicted), r2_score(y_test, predicted)
    mae = mean_absolute_error(y_test, predicted)
    return f"{promised(model)} | {rmse:#.3g} | {mae:#.3g} | {r2:.3f} | {seconds:.2g}"


def main():
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(tasks()))
    chosen = parser.parse_args().names or list(tasks())
    warnings.filterwarnings("ignore", message=".*(Ill-conditioned|Singular).*")  # of KernelRidge
    print("| data | model | in folds | RMSE or accuracy | MAE | R2 | fit, s |")
    print("|---|---|---|---|---|---|---|")
    for name in chosen:
        load, models, n_features = tasks()[name]
        train, test = load()
        classify = name == "JapaneseVowels"
        if HAS_NUMBA:
            models |= rockets(n_features, classify)
        for label, model in models.items():
            print(f"| {name} | {label} | {measure(model, train, test, classify)} |", flush=True)


if __name__ == "__main__":
    main()
