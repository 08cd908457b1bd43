"""
Does the certificate predict generalisation?
============================================

The experiment on associative memories of Yau et al. (arXiv 2410.10101, Figure 2). Each sequence
holds two pairs of a key and a value and a query; with probability ``p`` keys and values are
orthogonal. The states of orthogonal keys carry no information, so the smallest eigenvalue of the
second moment of the features falls to zero as ``p`` goes to 1. The script asks

* how the smallest eigenvalue depends on ``p`` and on how the orthogonal matrices are drawn;
* how far the exact solver and an iterative one are from the teacher (Figure 2a);
* how far models with 1, 2, 4 and 8 heads are from it after training by gradients, and what that
  distance has to do with the training loss (Figure 2b).

It takes less than a minute. With ``--full`` (about 10 minutes on one core) it uses 2^14
sequences, 2^13 for the runs by gradients, and writes the figures and tables of
``docs/certificate_experiment.md``.
"""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import MHLARegressor, certify_identifiable, function_distance
from sklearn_mhla.datasets import make_associative_memory
from sklearn_mhla.preprocessing import LinearAttentionFeatures

full = "--full" in sys.argv
FOLDER = Path("docs/figures")
N_TABLE = 2**14
N_SAMPLES = 2**14 if full else 2**12
EPOCHS = 100 if full else 20
ADAM_RATE = 1e-3 if full else 1e-2


def memories(p, orthogonal="haar", n_samples=N_SAMPLES, seed=0):
    """Inputs, targets and teacher."""
    return make_associative_memory(
        n_samples, p_orthogonal=p, orthogonal=orthogonal, return_teacher=True, random_state=seed
    )


def write(name, header, rows):
    """Keep a table with the documentation."""
    if full:
        lines = [header, *(",".join(map(str, row)) for row in rows)]
        (FOLDER / name).write_text("\n".join(lines) + "\n")


# %%
# Smallest eigenvalues
# --------------------
# Mean and standard deviation over seeds at 2^14 sequences, and one set of 2^20. The smallest
# eigenvalue of a sample is on average below that of the distribution.

n_seeds = 40 if full else 5
rows = []
for orthogonal in ("haar", "qr"):
    for p in (0.0, 0.5, 0.9, 0.95, 0.99, 1.0):
        sample = [
            certify_identifiable(memories(p, orthogonal, N_TABLE, seed)[0])
            for seed in range(n_seeds)
        ]
        smallest = [certificate.min_eigenvalue for certificate in sample]
        large = (
            certify_identifiable(memories(p, orthogonal, 2**20)[0]).min_eigenvalue
            if full
            else np.nan
        )
        rows.append(
            (
                orthogonal,
                p,
                f"{np.mean(smallest):.5f}",
                f"{np.std(smallest, ddof=1):.5f}",
                f"{large:.5f}",
                sample[0].nullity,
            )
        )
        print("{}, p={}: {} +- {}, 2^20 rows: {}, nullity {}".format(*rows[-1]), flush=True)
write("certificate_eigenvalues.csv", "orthogonal,p,mean,deviation,large,nullity", rows)

# %%
# What stays unknown at p = 1
# ---------------------------
# Uniform orthogonal matrices leave 4 functions undetermined, and none of them has a coefficient
# in common with the teacher. So the teacher is orthogonal to the null space: it is itself the
# solution of minimum norm. The factors of LAPACK's QR decomposition are reflections, so products of
# two have equal diagonals; this adds 8 functions, and they involve the teacher's coefficients.

for orthogonal in ("haar", "qr"):
    X, y, teacher = memories(1.0, orthogonal)
    null = certify_identifiable(X).null_space()
    used = np.abs(teacher.coefficients()).max(0) > 0.0
    share = np.abs(null[:, used]).max()
    distance = function_distance(MHLARegressor().fit(X, y), teacher)
    print(
        f"{orthogonal}: {len(null)} undetermined functions, largest coefficient where the teacher "
        f"has one: {share:.1e}; distance of the minimum-norm solution: {distance:.1e}"
    )

# %%
# Distance against smallest eigenvalue
# ------------------------------------
# The exact solver needs no more than a positive eigenvalue. Adam on the coefficients (from random
# ones, batches of 64) slows down along directions of small eigenvalue and is
# stopped before it is there.


def adam_distance(X, y, teacher, seed=0):
    """Distance from the teacher after a fixed number of epochs on the coefficients."""
    features = torch.from_numpy(LinearAttentionFeatures().fit_transform(X))
    targets = torch.from_numpy(y)
    generator = torch.Generator().manual_seed(seed)
    shape = y.shape[1], features.shape[1]
    coef = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    adam = torch.optim.Adam([coef], lr=ADAM_RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(X), generator=generator).split(64):
            adam.zero_grad()
            (features[batch] @ coef.mT - targets[batch]).square().sum(1).mean().backward()
            adam.step()
    model = SimpleNamespace(coef_=coef.detach().numpy(), token_dim_=X.shape[2])
    return function_distance(model, teacher)


torch.set_num_threads(1)
rows = []
for p in (0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0):
    X, y, teacher = memories(p)
    X_qr, y_qr, _ = memories(p, "qr")
    rows.append(
        (
            p,
            certify_identifiable(X).min_eigenvalue,
            function_distance(MHLARegressor().fit(X, y), teacher),
            certify_identifiable(X_qr).min_eigenvalue,
            function_distance(MHLARegressor().fit(X_qr, y_qr), teacher),
            adam_distance(X, y, teacher),
        )
    )
    print("p={}: haar {:.5f} exact {:.1e}; qr {:.5f} exact {:.1e}; Adam {:.4f}".format(*rows[-1]))
write("certificate_distance.csv", "p,haar,exact_haar,qr,exact_qr,adam", rows)

_, haar, exact_haar, qr, exact_qr, adam = np.array(rows).T
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.semilogy(haar, adam, "o-", label=f"Adam on the coefficients, {EPOCHS} epochs")
axes.semilogy(qr, exact_qr, "s-", label="exact, minimum norm (qr)")
axes.semilogy(haar, exact_haar, "^-", label="exact, minimum norm (haar)")
axes.set(xlabel="smallest eigenvalue of the second moment", ylabel="distance from the teacher")
axes.legend()
if full:
    figure.savefig(FOLDER / "certificate_distance.png", dpi=150)

# %%
# Number of heads, distance and training loss
# -------------------------------------------
# The targets hold no noise, so the training loss of a model at difference ``E`` from the teacher
# is exactly ``tr(E Lambda E^T)``. Hence
#
# .. math:: \frac{L}{\lambda_{max}} \le \|E\|^2 \le \frac{L}{\lambda_{min}},
#
# whatever the number of heads and however the model was found. Gradients (Adam, learning rate
# 1e-2, batches of 32) run once at a constant rate and once with the estimator's schedule. A run
# has failed if it leaves more than 1 % of the mean square of the targets.

HEADS = (1, 2, 4, 8)
CHECKPOINTS = (1, 3, 10, 30, 100) if full else (1, 3, 10, 20)
N_RUNS = 4 if full else 2
N_TRAINED = 2**13 if full else 2**12


def measured(model, X, y, teacher):
    """Training loss (squared residual, mean over rows) and distance."""
    loss = np.square(model.predict(X) - y).sum(1).mean()
    return loss, function_distance(model, teacher)


def gradient_runs(n_heads, seed, data):
    """Rate, epochs, loss and distance."""
    X, y, _ = data
    model = MHLARegressor(n_heads, solver="sgd", random_state=seed)
    for epoch in range(1, EPOCHS + 1):
        model.partial_fit(X, y)
        if epoch in CHECKPOINTS:
            yield "constant", epoch, *measured(model, *data)
    model = MHLARegressor(n_heads, solver="sgd", max_iter=EPOCHS, random_state=seed)
    yield "schedule", EPOCHS, *measured(model.fit(X, y), *data)


rows, extremes, power = [], {}, {}
for p in (0.95, 1.0):
    data = memories(p, n_samples=N_TRAINED)
    certificate = certify_identifiable(data[0])
    extremes[p] = certificate.min_eigenvalue, certificate.max_eigenvalue
    power[p] = np.square(data[1]).sum(1).mean()
    for n_heads in HEADS:
        verdict = certify_identifiable(data[0], n_heads=n_heads, n_outputs=2).verdict
        print(f"p={p}, {n_heads} heads: {verdict}")
        runs = [run for seed in range(N_RUNS) for run in gradient_runs(n_heads, seed, data)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            exact = MHLARegressor(n_heads, max_iter=100, random_state=0).fit(*data[:2])
        for rate, epochs, loss, distance in [*runs, ("exact", 0, *measured(exact, *data))]:
            failed = int(loss > 0.01 * power[p])
            rows.append((p, n_heads, rate, epochs, f"{loss:.3e}", f"{distance:.3e}", failed))
            if epochs in (0, EPOCHS):
                note = ", failed" if failed else ""
                print(f"  {rate}: loss {loss:.1e}, distance {distance:.1e}{note}", flush=True)
write("certificate_runs.csv", "p,heads,rate,epochs,loss,distance,failed", rows)

# %%
# Above: distance after the last epoch by number of heads; crosses are failed runs. Below: distance
# against training loss at all checkpoints, between the two bounds (grey).

MARKERS = {"constant": "o", "schedule": "^", "exact": "D"}
OFFSETS = {"constant": -0.2, "schedule": 0.0, "exact": 0.25}
SMALLEST = 1e-33  # a logarithm has no zero
figure, panels = plt.subplots(2, 2, figsize=(9, 7.5), sharey="row", layout="constrained")
for (above, below), p in zip(panels.T, extremes, strict=True):
    for row_p, n_heads, rate, epochs, loss, distance, failed in rows:
        if row_p != p:
            continue
        color = f"C{HEADS.index(n_heads)}" if rate != "exact" else "k"
        marker = "x" if failed else MARKERS[rate]
        loss, distance = max(float(loss), SMALLEST), max(float(distance), 1e-17)
        if epochs in (0, EPOCHS):
            above.semilogy(
                HEADS.index(n_heads) + OFFSETS[rate], distance, marker, color=color, ms=5
            )
        below.loglog(loss, distance, marker, color=color, ms=4)
    smallest, largest = extremes[p]
    ratios = [
        float(distance) ** 2 / float(loss)
        for row_p, _, _, _, loss, distance, _ in rows
        if row_p == p and float(loss) > 1e-20  # below, both are rounding errors
    ]
    print(
        f"p={p}: squared distance over loss from {min(ratios):.3g} to {max(ratios):.3g}, bounds "
        f"{1 / largest:.3g} and {1 / smallest if smallest > 0.0 else np.inf:.3g}"
    )
    losses = np.array([SMALLEST, 10.0])
    upper = np.sqrt(losses / smallest) if smallest > 0.0 else np.full(2, 1e2)
    below.fill_between(losses, np.sqrt(losses / largest), upper, color="0.9", zorder=0)
    above.set(title=f"p = {p}", xticks=range(4), xticklabels=HEADS, xlabel="heads")
    below.set(xlabel="training loss", ylim=(1e-17, 1e2))
panels[0, 0].set_ylabel("distance from the teacher")
panels[1, 0].set_ylabel("distance from the teacher")
for rate, marker in MARKERS.items():
    panels[0, 0].plot([], [], marker, color="0.4", label=rate)
panels[0, 0].plot([], [], "x", color="0.4", label="failed")
panels[0, 0].legend(loc=(0.72, 0.25))
for color, n_heads in enumerate(HEADS):
    panels[1, 0].plot([], [], "s", color=f"C{color}", label=f"{n_heads} heads")
panels[1, 0].legend()
if full:
    figure.savefig(FOLDER / "certificate_heads.png", dpi=150)
plt.show()
