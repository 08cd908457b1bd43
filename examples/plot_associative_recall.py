"""
Associative recall: how many pairs a state of fixed size holds
==============================================================

Every sequence is a table of pairs (key, name), then a key whose name is asked for. The state of
linear attention is one matrix, whatever the number of pairs: keys that are not orthogonal disturb
each other. We learn the look-up from tables, compare it with the ideal one and with theory, and see
how many tables it takes. The derivations are in :doc:`/associative_recall`.

Training data have the seed 0, held-out data the seed 1000. Run as ``python
plot_associative_recall.py`` to see the figure, or as ``python plot_associative_recall.py
figure.png`` to save it.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import norm

from sklearn_mhla import MHLARegressor

# %%
# Tables
# ------
# A token is ``(key, one-hot name)``, the last one ``(key, 0)``. Names are drawn uniformly, so a
# table may hold a name several times. Keys have norm one: rows of a random orthogonal matrix (at
# most as many as they are wide), uniform on the sphere, or random signs.

NAMES = np.array(["Ada", "Emmy", "Kurt", "Leonhard"])
V = len(NAMES)


def make_tables(n_tables, n_pairs, width, keys, seed):
    """Sequences of shape (n_tables, n_pairs + 1, width + V) and the names asked for."""
    random = np.random.default_rng(seed)
    if keys == "orthogonal":
        drawn = np.linalg.qr(random.standard_normal((n_tables, width, width)))[0][:, :n_pairs]
    elif keys == "sphere":
        drawn = random.standard_normal((n_tables, n_pairs, width))
    else:
        drawn = random.choice([-1.0, 1.0], size=(n_tables, n_pairs, width))
    drawn /= np.linalg.norm(drawn, axis=2, keepdims=True)
    names = random.integers(V, size=(n_tables, n_pairs))
    table, asked = np.arange(n_tables), random.integers(n_pairs, size=n_tables)
    X = np.zeros((n_tables, n_pairs + 1, width + V))
    X[:, :-1, :width], X[:, :-1, width:] = drawn, np.eye(V)[names]
    X[:, -1, :width] = drawn[table, asked]
    return X, NAMES[names[table, asked]]


def fit(n_heads, X, names):
    """Least squares on one-hot names."""
    return MHLARegressor(n_heads, heads="svd", random_state=0).fit(
        X, 1.0 * (names[:, None] == NAMES)
    )


def accuracy(scores, names):
    """Share of tables whose largest score is at the name asked for."""
    return np.mean(NAMES[scores.argmax(1)] == names)


# %%
# The ideal look-up and its crosstalk
# -----------------------------------
# One head with :math:`V = [0, I]` and :math:`Q = diag(I, 0)` gives every name the sum of the
# similarities :math:`k_t^T q` of its pairs: one for the key asked for, plus crosstalk from the
# other ``N - 1`` pairs. For random keys of width ``K`` a similarity has mean 0 and variance
# ``1 / K``, so the crosstalk of a name has variance :math:`\sigma^2 = (N - 1) / (V K)`. If it is
# nearly normal, the right name wins with probability
# :math:`\int \varphi(u) \Phi(u + 1 / \sigma)^{V - 1} du`.


def look_up(X):
    """Scores of the ideal head."""
    width = X.shape[2] - V
    similarity = X[:, -1:, :width] @ X[:, :, :width].mT
    return (similarity @ X[:, :, width:])[:, 0]


def expected_accuracy(n_pairs, width):
    """The integral above, for independent normal crosstalk."""
    deviation = np.sqrt((n_pairs - 1) / (V * width))
    u = np.linspace(-8, 8, 2001)
    return np.trapezoid(norm.pdf(u) * norm.cdf(u + 1 / deviation) ** (V - 1), u)


# %%
# Accuracy against the number of pairs
# ------------------------------------
# One head is fitted per key width and kind of keys, on 2000 tables of ``N = K`` pairs, and asked
# about tables of other sizes, too.

all_pairs = np.array([2, 4, 8, 16, 32, 64])
curves = {}
print("accuracy on 5000 held-out tables: learned, ideal look-up, theory for random keys")
for width in (8, 16):
    for keys in ("orthogonal", "sphere", "signs"):
        model = fit(1, *make_tables(2000, width, width, keys, 0))
        curve = []
        for n_pairs in all_pairs[all_pairs <= width] if keys == "orthogonal" else all_pairs:
            X, names = make_tables(5000, n_pairs, width, keys, 1000)
            learned, ideal = accuracy(model.predict(X), names), accuracy(look_up(X), names)
            theory = "" if keys == "orthogonal" else f"{expected_accuracy(n_pairs, width):.3f}"
            curve.append([n_pairs, learned, ideal])
            print(
                f"  K = {width:2d}, {keys:10}, N = {n_pairs:2d}: {learned:.3f} {ideal:.3f} {theory}"
            )
        curves[width, keys] = np.array(curve)

# %%
# The gain
# --------
# Least squares knows about the crosstalk and shrinks. For random keys its optimum over all
# cubic features is the ideal look-up times ``K / (K + N - 1)``, for ``N = K`` orthogonal keys the
# look-up itself; the largest score stays where it is. Below, the mean of the coefficients that
# should equal the gain, from an unrestricted fit to 8000 tables, ``K = 8``.


def gain(model):
    """Mean coefficient of ``(sum_t v_ta k_tj) q_j``."""
    weights = np.einsum("haj,hkl->ajkl", model.value_, model.key_query_)
    width = model.token_dim_ - V
    name, key = weights[:, width:, :width, :width], weights[:, :width, width:, :width]
    return np.einsum("aajj->", name + key.swapaxes(1, 2)) / (V * width)


gains = {"sphere": [], "signs": []}
for keys, found in gains.items():
    for n_pairs in all_pairs:
        found.append(gain(fit(None, *make_tables(8000, n_pairs, 8, keys, 0))))
        print(f"{keys}, N = {n_pairs:2d}: gain {found[-1]:.3f}, theory {8 / (7 + n_pairs):.3f}")
whole = gain(fit(None, *make_tables(8000, 8, 8, "orthogonal", 0)))
print(f"orthogonal, N =  8: gain {whole:.12f}")

# %%
# Tables needed
# -------------
# Tokens have width ``d = K + V = 12`` and ``p = 936`` cubic features, 568 of which are independent
# on these tables (``rank_``). With about as many tables the unrestricted fit interpolates and gets
# worse before it gets better. One head has ``V d + d^2 = 192`` numbers.

all_tables = [64, 125, 250, 500, 1000, 2000, 4000, 8000]
X_new, names_new = make_tables(5000, 8, 8, "sphere", 1000)
best = accuracy(look_up(X_new), names_new)
needed = []
print(f"N = K = 8, sphere; ideal look-up {best:.3f}. Accuracy unrestricted, one head:")
for n_tables in all_tables:
    X, names = make_tables(n_tables, 8, 8, "sphere", 0)
    unrestricted, one_head = fit(None, X, names), fit(1, X, names)
    needed.append([accuracy(m.predict(X_new), names_new) for m in (unrestricted, one_head)])
    shares = f"{needed[-1][0]:.3f} {needed[-1][1]:.3f}"
    print(f"  {n_tables:5d} tables (rank {unrestricted.rank_}): {shares}")

# %%

figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
panel = panels[0]
fine = np.geomspace(2, 64, 50)
for color, width in enumerate((8, 16)):
    panel.plot(fine, [expected_accuracy(n, width) for n in fine], "-", color=f"C{color}")
    for keys, marker in (("orthogonal", "*"), ("sphere", "o"), ("signs", "x")):
        curve = curves[width, keys]
        panel.plot(
            curve[:, 0], curve[:, 1], marker, color=f"C{color}", label=f"K = {width}, {keys}"
        )
panel.axhline(1 / V, color="0.6", ls=":", label="guessing")
panel.set_xscale("log", base=2)
panel.set(xlabel="stored pairs N", ylabel="accuracy", title="Learned (marks) and theory (lines)")
panel.legend(fontsize=8)

panel = panels[1]
panel.plot(fine, 8 / (7 + fine), "k-", label="K / (K + N - 1)")
for (keys, found), marker in zip(gains.items(), "ox", strict=True):
    panel.plot(all_pairs, found, marker, label=keys)
panel.plot([8], [whole], "*", label="orthogonal")
panel.set_xscale("log", base=2)
panel.set(xlabel="stored pairs N", ylabel="gain", title="Learned gain, K = 8", ylim=(0, 1.05))
panel.legend(fontsize=8)

panel = panels[2]
panel.semilogx(all_tables, needed, "o-", label=["unrestricted", "one head"])
panel.axhline(best, color="k", lw=1, label="ideal look-up")
panel.axhline(1 / V, color="0.6", ls=":", label="guessing")
panel.set(xlabel="tables", ylabel="accuracy", title="Tables needed, N = K = 8")
panel.legend(fontsize=8)

if len(sys.argv) > 1:
    figure.savefig(sys.argv[1], dpi=120)
else:
    plt.show()
