"""
In-context regression: what one layer of linear attention learns
================================================================

Every sequence is a regression task of its own: examples ``(x_i, y_i)`` of a linear function drawn
at random, then a query ``(x, 0)``; the target is the function's value at ``x``. A model fitted on
many tasks has to learn how to regress. For linear attention the best way is known in closed form,
so every number that :class:`~sklearn_mhla.MHLARegressor` learns can be compared with what it
should be. The derivations are in :doc:`/in_context_regression`.

Training data have seeds below 1000, held-out data the seed 1000. Run as ``python
plot_in_context_regression.py`` to see the figure, or as ``python plot_in_context_regression.py
figure.png`` to save it.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhla import Heads, MHLARegressor, function_distance, minimal_heads
from sklearn_mhla.datasets import make_in_context_regression
from sklearn_mhla.preprocessing import LinearAttentionFeatures

# %%
# The best linear attention
# -------------------------
# With ``n`` examples, inputs from :math:`N(0, \Sigma)` and noise of standard deviation
# :math:`\sigma` in the examples, the least-squares optimum over **all** cubic features is
#
# .. math:: \hat y = \sum_i y_i x_i^T \Gamma x, \qquad
#    \Gamma = ((n + 1) \Sigma + (tr \Sigma + \sigma^2) I)^{-1} .
#
# One head computes it: its value vector reads ``y``, its key-query matrix is :math:`\Gamma`.


def best_gamma(sigma, n_context, noise=0.0):
    """Closed form of the k x k block."""
    k = len(sigma)
    return np.linalg.inv((n_context + 1) * sigma + (np.trace(sigma) + noise**2) * np.eye(k))


def best_error(sigma, n_context, noise=0.0):
    """Mean squared error of the optimum, ``tr(Sigma) - n tr(Sigma Gamma Sigma)``."""
    gamma = best_gamma(sigma, n_context, noise)
    return np.trace(sigma) - n_context * np.trace(sigma @ gamma @ sigma)


def best_head(gamma):
    """The head that reads ``sum_i y_i x_i^T gamma x``."""
    k = len(gamma)
    value, key_query = np.zeros((1, 1, k + 1)), np.zeros((1, k + 1, k + 1))
    value[0, 0, k], key_query[0, :k, :k] = 1.0, gamma
    return Heads(value, key_query)


def linear_attention(X, gamma):
    """The predictions ``sum_i y_i x_i^T gamma x``."""
    read = (X[:, :-1, -1:].mT @ X[:, :-1, :-1])[:, 0]
    return ((read @ gamma) * X[:, -1, :-1]).sum(1)


def learned_gamma(model):
    """Coefficients of ``(sum_i y_i x_ij) x_l``: the state is symmetric, so two entries add."""
    weights = np.einsum("haj,hkl->ajkl", model.value_, model.key_query_)[0]
    k = model.token_dim_ - 1
    return weights[k, :k, :k] + weights[:k, k, :k]


# %%
# Coefficients against rows
# -------------------------
# Besides the block there are 44 other monomials that are not identically zero for ``k = 4``: 40
# in :math:`\sum_i x_i x_i^T` times the query and 4 in :math:`\sum_i y_i^2`. They are even in ``y``
# and the target is odd, so their best coefficients are zero. The distance of the learned block to
# the closed form and the norm of all other coefficients both have to fall like ``rows ** -0.5``,
# and theory says how large they are: for features :math:`\phi` and residuals :math:`r` of the
# optimum, the covariance of the estimate is
# :math:`E[\phi \phi^T]^{-1} E[r^2 \phi \phi^T] E[\phi \phi^T]^{-1}` divided by the rows.


def sampling_error(sigma, gamma, n_context):
    """Root mean square distance of block and others for one row; divide by ``sqrt(rows)``."""
    k = len(sigma)
    X, y = make_in_context_regression(2**16, k, n_context, covariance=sigma, random_state=1000)
    features = LinearAttentionFeatures(basis="published").fit(X[:1])
    names = features.get_feature_names_out()
    seen = [not name.endswith(f"q[x{k}]") for name in names]  # the query's y is zero
    phi = features.transform(X)[:, seen]
    residual = y - linear_attention(X, gamma)
    bread = np.linalg.inv(phi.T @ phi / len(X))
    variance = np.diag(bread @ (phi.T @ (residual[:, None] ** 2 * phi) / len(X)) @ bread)
    block = np.array([f",x{k}]" in name and f"S[x{k}," not in name for name in names[seen]])
    return np.sqrt([variance[block].sum(), variance[~block].sum()])


k, n = 4, 16
root = np.random.default_rng(0).standard_normal((k, k)) / 2
covariances = {"identity": np.eye(k), "general": root @ root.T + 0.2 * np.eye(k)}
all_rows = 2 ** np.arange(8, 17)
distances, expected_distances = {}, {}
print(f"k = {k}, n = {n}; medians over 5 seeds")
for name, sigma in covariances.items():
    teacher = best_head(best_gamma(sigma, n))
    size = np.linalg.norm(teacher.key_query)
    medians = []
    for rows in all_rows:
        trials = []
        for seed in range(5):
            X, y = make_in_context_regression(rows, k, n, covariance=sigma, random_state=seed)
            model = MHLARegressor(heads="svd").fit(X, y)
            block = np.linalg.norm(learned_gamma(model) - teacher.key_query[0, :k, :k])
            others = np.sqrt(function_distance(model, teacher) ** 2 - block**2)
            trials.append([block / size, others / size])
        medians.append(np.median(trials, axis=0))
    distances[name] = np.array(medians)
    expected_distances[name] = (
        sampling_error(sigma, best_gamma(sigma, n), n) / size / np.sqrt(all_rows)[:, None]
    )
    slopes = np.polyfit(np.log(all_rows), np.log(distances[name]), 1)[0]
    print(f"covariance {name}, relative to the norm of Gamma")
    for rows, found, theory in zip(all_rows, medians, expected_distances[name], strict=True):
        print(
            f"  {rows:6d} rows: block {found[0]:.4f} away (theory {theory[0]:.4f}), "
            f"others {found[1]:.4f} (theory {theory[1]:.4f})"
        )
    print(f"  fitted slopes: block {slopes[0]:.2f}, others {slopes[1]:.2f}")

# %%
# One head
# --------
# The last unrestricted model needs five heads, all that one output can have, because the others are
# small but not zero. The optimum needs one, and a model restricted to one head finds it:

print(f"heads of the unrestricted model: {model.n_heads_}")
print(f"heads of the optimum: {len(minimal_heads(teacher.coefficients(), k + 1).value)}")
one_head = MHLARegressor(n_heads=1, random_state=0).fit(X, y)
scale = one_head.value_[0, 0, k]
head = Heads(one_head.value_ / scale, one_head.key_query_ * scale)
distance = function_distance(head, teacher) / np.linalg.norm(teacher.key_query)
with np.printoptions(precision=3, suppress=True):
    print(f"one head, {all_rows[-1]} rows, covariance general")
    print("value:", head.value[0, 0])
    print("key-query:", head.key_query[0], "closed form:", teacher.key_query[0], sep="\n")
print(f"relative distance of the functions: {distance:.4f}")

# %%
# Held-out error against the number of examples
# ---------------------------------------------
# One step of gradient descent from zero on the examples predicts
# :math:`\eta \sum_i y_i x_i^T x`. With the best step size it *is* the optimum for a covariance
# :math:`\Sigma = I`; otherwise the learned block is the better, preconditioned step. The Bayes
# optimum, the posterior mean under ``w ~ N(0, I)``, is not a cubic of the tokens: it needs the
# inverse of :math:`\sum_i x_i x_i^T + \sigma^2 I`. Without noise it is the least-squares solution
# of minimum norm and exact from ``n = k`` on.


def posterior_mean(X, noise):
    """Predictions of the Bayes optimum."""
    inputs, outputs, query = X[:, :-1, :-1], X[:, :-1, -1:], X[:, -1, :-1]
    if noise == 0.0:
        weights = np.linalg.pinv(inputs) @ outputs
    else:
        gram = inputs.mT @ inputs + noise**2 * np.eye(query.shape[1])
        weights = np.linalg.solve(gram, inputs.mT @ outputs)
    return (query * weights[:, :, 0]).sum(1)


def gradient_step(X, y):
    """One step of gradient descent from zero, with the step size that is best on these data."""
    step = linear_attention(X, np.eye(X.shape[2] - 1))
    return (step @ y) / (step @ step) * step


settings = {
    "no noise": {"covariance": np.eye(k)},
    "noise 1": {"covariance": np.eye(k), "noise": 1.0},
    "general covariance": {"covariance": covariances["general"]},
}
contexts = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
errors = {}
print("held-out mean squared error: learned, optimum, gradient step, Bayes; formula of the optimum")
for name, setting in settings.items():
    sigma, noise = setting["covariance"], setting.get("noise", 0.0)
    found = []
    for n_context in contexts:
        X, y = make_in_context_regression(20_000, k, n_context, **setting, random_state=0)
        X_new, y_new = make_in_context_regression(
            20_000, k, n_context, **setting, random_state=1000
        )
        predictions = [
            MHLARegressor().fit(X, y).predict(X_new),
            linear_attention(X_new, best_gamma(sigma, n_context, noise)),
            gradient_step(X_new, y_new),
            posterior_mean(X_new, noise),
        ]
        found.append([np.mean((predicted - y_new) ** 2) for predicted in predictions])
        print(
            f"  {name}, n = {n_context:2d}: "
            + " ".join(f"{error:.4f}" for error in found[-1])
            + f"; {best_error(sigma, n_context, noise):.4f}"
        )
    errors[name] = np.array(found)

# %%
# Rows needed
# -----------
# With ``k = 8`` the unrestricted model has 405 coefficients, 360 of which the data see, and one
# head has 90 numbers. The residual of the optimum is orthogonal to all cubic features, so the error
# that a model has beyond the optimum's is the mean square of what their predictions differ by.

k_wide = 8
X_new, _ = make_in_context_regression(20_000, k_wide, n, random_state=1000)
optimum = best_error(np.eye(k_wide), n)
best = linear_attention(X_new, best_gamma(np.eye(k_wide), n))
few_rows = [64, 128, 256, 320, 512, 1024, 2048, 4096, 8192, 16384]
excess = []
print(f"k = {k_wide}, n = {n}; error beyond the optimum's {optimum:.3f}: unrestricted, one head")
for rows in few_rows:
    trials = []
    for seed in range(3):
        X, y = make_in_context_regression(rows, k_wide, n, random_state=seed)
        models = [MHLARegressor(), MHLARegressor(n_heads=1, random_state=0)]
        trials.append([np.mean((m.fit(X, y).predict(X_new) - best) ** 2) for m in models])
    excess.append(np.median(trials, axis=0) / optimum)
    print(f"  {rows:5d} rows: " + " ".join(f"{ratio:8.1%}" for ratio in excess[-1]))

# %%

figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
panel = panels[0, 0]
for color, (name, pairs) in enumerate(distances.items()):
    panel.loglog(all_rows, pairs[:, 0], "o-", color=f"C{color}", label=f"block, {name}")
    panel.loglog(all_rows, pairs[:, 1], "s--", color=f"C{color}", label=f"others, {name}")
    panel.loglog(all_rows, expected_distances[name], ":", color=f"C{color}")
panel.plot([], [], "k:", label="theory")
panel.set(xlabel="rows", ylabel=r"norm relative to $\Gamma$", title="Coefficients")
panel.legend(fontsize=8)

panel = panels[0, 1]
learned = np.vstack([head.value[0], np.full((1, k + 1), np.nan), head.key_query[0]])
closed = np.vstack([teacher.value[0], np.full((1, k + 1), np.nan), teacher.key_query[0]])
both = np.hstack([learned, np.full((k + 3, 1), np.nan), closed])
limit = np.abs(teacher.key_query).max()
image = panel.imshow(both, cmap="RdBu_r", vmin=-limit, vmax=limit)
names = [*(f"x{j}" for j in range(k)), "y"]
panel.set_xticks([*range(k + 1), *range(k + 2, 2 * k + 3)], names * 2)
panel.set_yticks([0, *range(2, k + 3)], ["value", *names])
panel.set_title("One head: learned (left), closed form (right)")
figure.colorbar(image, ax=panel, extend="max")

panel = panels[1, 0]
for color, (name, found) in enumerate(errors.items()):
    found = found / np.trace(settings[name]["covariance"])
    panel.plot(contexts, found[:, 0], "o", color=f"C{color}", label=name)
    panel.plot(contexts, found[:, 1], "-", color=f"C{color}")
    panel.plot(contexts, found[:, 2], "x", color=f"C{color}")
    panel.plot(contexts, found[:, 3], ":", color=f"C{color}")
for style, label in [("ko", "learned"), ("k-", "optimum"), ("kx", "gradient step")]:
    panel.plot([], [], style, label=label)
panel.plot([], [], "k:", label="Bayes")
panel.set(xlabel="examples n", ylabel=r"held-out error / tr $\Sigma$", title="Held-out error")
panel.legend(fontsize=8)

panel = panels[1, 1]
panel.loglog(few_rows, excess, "o-", label=["unrestricted", "one head"])
panel.axvline(k_wide * (k_wide * (k_wide + 1) // 2 + 1 + k_wide), color="0.6", lw=1)
panel.set(xlabel="rows", ylabel="excess error / error of the optimum", title="Rows needed, k = 8")
panel.legend(fontsize=8)

if len(sys.argv) > 1:
    figure.savefig(sys.argv[1], dpi=120)
else:
    plt.show()
