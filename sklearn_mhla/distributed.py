"""Dask collections: moments partition by partition, added up along a tree.

A partition is what one task holds: a chunk of samples of an array, a partition of a data frame.
Data stay with the task that loads or makes them; what moves between workers are moments, whose
size does not depend on the number of rows. Everything here works on Dask's own schedulers and, if
the process has a ``distributed.Client``, on its cluster.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from sklearn_mhla._backend import Array, NumpyBackend, backend_for, is_dask
from sklearn_mhla._fitting import check_memory
from sklearn_mhla._moments import Moments, check_options, rows_of
from sklearn_mhla._targets import check_sample_weights, check_targets
from sklearn_mhla._tokens import (
    check_sequences,
)

__all__ = ["moments", "predict", "score"]

# Moments that one task adds up, and so those that it holds at a time.
_FAN_IN = 8


def moments(
    X: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    n_tokens: int | None = None,
    output: str = "last",
    causal: bool = True,
    state: str = "sum",
    device: str | None = None,
) -> Moments:
    """Sum over the rows of Dask collections.

    One task per partition, and a tree of tasks that add up eight results each in a fixed order,
    so that running it again gives the same numbers. Tasks are pure: one that is repeated because
    its worker was lost counts no row twice.

    Parameters
    ----------
    X : dask.array.Array or dask.dataframe.DataFrame
        Sequences as rows of a table (n_samples, n_tokens * d), or an array
        (n_samples, n_tokens, d). Numbers of rows may be unknown, partitions may be empty.
    y : dask.array.Array, dask.dataframe.DataFrame, dask.dataframe.Series or array-like, \
default=None
        Targets, in the form that :class:`~sklearn_mhla.MHLARegressor` accepts; None leaves the
        moments of the features alone. They are cut like ``X`` where numbers of rows (or divisions)
        are known; elsewhere they must have the same partitions.
    sample_weight : dask.array.Array, dask.dataframe.Series or array-like, default=None
        Weight of each sequence, not negative; partitioned like ``y``.
    n_tokens : int, default=None
        How many tokens one row of a 2-D input holds; None means one.
    output : {"last", "sequence"}, default="last"
        One row per sequence, or one per token.
    causal : bool, default=True
        For ``output="sequence"``: whether position `t` reads the state of the first `t` tokens.
    state : {"sum", "mean"}, default="sum"
        Whether states are divided by their number of tokens.
    device : str, default=None
        "cpu", "cuda" or "cuda:<index>", where the workers compute.

    Returns
    -------
    Moments
        Of all rows, in the memory of this process.

    Raises
    ------
    ValueError
        If the data or an option are invalid; names the partition where that was found.
    MemoryError
        If the moments do not fit into the memory of a worker.

    Examples
    --------
    >>> import dask.array as da
    >>> from sklearn_mhla import distributed
    >>> X = da.random.default_rng(0).standard_normal((1000, 8, 4), chunks=(300, 8, 4))
    >>> distributed.moments(X, X[:, -1, 0]).n_rows
    1000
    """
    check_options(output, state)
    header = check_sequences(_stand_in(X, "X"), n_tokens=n_tokens)
    if y is not None:
        check_targets(_stand_in(y, "y"), header, output, "Moments")
    options = {
        "n_tokens": n_tokens,
        "output": output,
        "causal": causal,
        "state": state,
        "device": device,
    }
    parts = _map_partitions(_moments_of, X, y, sample_weight, options)
    total: Moments | None = _reduce(parts).compute()
    if total is None:
        raise ValueError(
            f"There is nothing to sum: none of the {len(parts)} partition(s) of X holds a sequence "
            "of positive weight."
        )
    total = total.copy()  # a scheduler may have kept what it returned, or made it read-only
    total.n_tokens, total.device = n_tokens, device
    return total


def predict(model: Any, X: Any) -> Any:
    """Evaluate a fitted model on a Dask collection, when the result is asked for.

    Parameters
    ----------
    model : MHLARegressor
        Fitted, on whatever input.
    X : dask.array.Array or dask.dataframe.DataFrame
        Sequences, as for :func:`moments`.

    Returns
    -------
    dask.array.Array
        Predictions in float64, one chunk per partition of ``X``; numbers of rows are known where
        they are known of ``X``.

    Raises
    ------
    ValueError
        If the width of ``X`` is not that of the fit, at once, or if values are invalid, when they
        are computed.

    Examples
    --------
    >>> import dask.array as da
    >>> from sklearn_mhla import MHLARegressor, distributed
    >>> X = da.random.default_rng(0).standard_normal((1000, 8, 4), chunks=(300, 8, 4))
    >>> model = MHLARegressor().fit(X, X[:, -1, 0])
    >>> distributed.predict(model, X).chunks
    ((300, 300, 300, 100),)
    """
    import dask.array as da

    model = _without_moments(model)
    header = model._check_new(_stand_in(X, "X"))
    tail = (int(header.lengths[0]),) if model.output == "sequence" else ()
    if model._target_ndim:
        tail = (*tail, model._n_outputs)
    blocks = _blocks(X, "X")
    new_axes = {blocks.ndim + axis: size for axis, size in enumerate(tail)}
    return da.blockwise(
        _predictions_of,
        (0, *new_axes),
        *_numbered(blocks),
        *(blocks, tuple(range(blocks.ndim)), _delayed(model), None, tail, None),
        new_axes=new_axes,
        adjust_chunks={0: blocks.chunks[0]},
        concatenate=False,
        align_arrays=False,
        dtype=np.float64,
        meta=np.empty((0,) * (1 + len(tail))),
    )


def score(model: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Coefficient of determination on Dask collections, averaged over outputs.

    Parameters
    ----------
    model : MHLARegressor
        Fitted, on whatever input.
    X : dask.array.Array or dask.dataframe.DataFrame
        Sequences, as for :func:`moments`.
    y : dask.array.Array, dask.dataframe.DataFrame, dask.dataframe.Series or array-like
        True targets.
    sample_weight : dask.array.Array, dask.dataframe.Series or array-like, default=None
        Weight of each sequence.

    Returns
    -------
    float
        As ``model.score`` of the same data in memory; no predictions are gathered.

    Raises
    ------
    ValueError
        If the data do not fit the model.

    Examples
    --------
    >>> import dask.array as da
    >>> from sklearn_mhla import MHLARegressor, distributed
    >>> X = da.random.default_rng(0).standard_normal((600, 8, 3), chunks=(200, 8, 3))
    >>> y = X[:, -1, 0] * (X**2).sum(axis=(1, 2))
    >>> round(distributed.score(MHLARegressor().fit(X, y), X, y), 6)
    1.0
    """
    import dask

    model = _without_moments(model)
    check_targets(
        _stand_in(y, "y"), model._check_new(_stand_in(X, "X")), model.output, type(model).__name__
    )
    parts = dask.compute(*_map_partitions(_residuals_of, X, y, sample_weight, _delayed(model)))
    parts = [part for part in parts if part is not None]
    if not parts:
        raise ValueError("There is nothing to score: no sequence has a positive weight.")
    weight, mean, squares, residual = (np.array(column) for column in zip(*parts, strict=True))
    share = weight[:, None] / weight.sum()
    spread = mean - (share * mean).sum(0)
    total = squares.sum(0) + (weight[:, None] * spread**2).sum(0)
    missed = residual.sum(0)
    # scikit-learn's convention for constant targets: 1 if they are met, else 0.
    ratio = np.divide(missed, total, out=(missed > 0.0).astype(float), where=total > 0.0)
    return float(1.0 - ratio.mean())


def sum_for(
    model: Any, X: Any, y: Any, sample_weight: Any, refit: bool = True
) -> tuple[Moments, dict[str, Any]]:
    """Moments that an estimator is to be fitted on, and the attributes that do not need them."""
    if model.solver != "convex":
        raise ValueError(
            f"Dask collections are fitted from their moments; solver={model.solver!r} needs the "
            "rows. Use solver='convex', or give partial_fit one partition at a time."
        )
    if model.method not in ("auto", "primal"):
        raise ValueError(
            "Dask collections are fitted from their moments: method must be 'auto' or 'primal'; "
            f"got method={model.method!r}."
        )
    rows, attributes = model._validated(_stand_in(X, "X"), _stand_in(y, "y"), None, refit=refit)
    check_memory(model, rows, NumpyBackend())
    names = ("n_tokens", "output", "causal", "state", "device")
    options = {name: getattr(model, name) for name in names}
    return moments(X, y, sample_weight=sample_weight, **options), attributes


def _moments_of(index: Any, X: Any, y: Any, weights: Any, options: dict[str, Any]) -> Any:
    """Moments of one partition; None if no row counts."""
    with _naming(index):
        X, y, weights = _only(X), _only(y), _only(weights)
        if _is_void(X, y, weights):
            return None
        sequences = check_sequences(X, n_tokens=options["n_tokens"])
        kinds = {name: options[name] for name in ("output", "causal", "state")}
        rows = rows_of(sequences, y, weights, options["output"])
        return Moments.from_rows(rows, backend_for(options["device"], sequences.device), **kinds)


def _predictions_of(index: Any, X: Any, model: Any, tail: tuple[int, ...]) -> Array:
    X = _only(X)
    if not len(X):
        return np.empty((0, *tail))
    with _naming(index):
        return model.predict(X)


def _residuals_of(index: Any, X: Any, y: Any, weights: Any, model: Any) -> Any:
    """Weight, and per output mean, squares about it and squared residuals of one partition."""
    with _naming(index):
        X, y, weights = _only(X), _only(y), _only(weights)
        if _is_void(X, y, weights):
            return None
        sequences = model._check_new(X)
        targets, _ = check_targets(y, sequences, model.output, type(model).__name__)
        checked = check_sample_weights(weights, len(sequences))
        weight = np.ones(len(sequences)) if checked is None else checked
        if model.output == "sequence":
            weight = np.repeat(weight, sequences.lengths)
        mean = weight @ targets / weight.sum()
        residual = targets - model._predict_rows(sequences)
        return weight.sum(), mean, weight @ (targets - mean) ** 2, weight @ residual**2


def _merge(parts: list[Moments | None]) -> Moments | None:
    """The sum of some partitions; what is added stays as it is."""
    full = [part for part in parts if part is not None]
    if not full:
        return None
    total = full[0].copy()
    for part in full[1:]:
        total._add(part, 1)
    return total


def _reduce(parts: list[Any]) -> Any:
    """Add up along a tree."""
    merge = _delayed(_merge)
    while len(parts) > 1:
        groups = range(0, len(parts), _FAN_IN)
        parts = [merge(parts[start : start + _FAN_IN]) for start in groups]
    return parts[0]


def _map_partitions(function: Any, X: Any, y: Any, sample_weight: Any, option: Any) -> list[Any]:
    """One delayed call per partition, with the partition's number, ``X``, ``y`` and weights."""
    import dask.array as da

    blocks = _blocks(X, "X")
    arguments = [*_numbered(blocks), blocks, tuple(range(blocks.ndim))]
    for name, values in (("y", y), ("sample_weight", sample_weight)):
        if values is None:
            arguments += [None, None]
        else:
            aligned = _aligned(values, name, X, blocks)
            # The sample axis is shared, the others are not.
            axes = tuple(range(blocks.ndim, blocks.ndim + aligned.ndim - 1))
            arguments += [aligned, (0, *axes)]
    results = da.blockwise(
        function,
        (0,),
        *arguments,
        *(option, None),
        concatenate=False,
        align_arrays=False,
        dtype=object,
        meta=np.empty(0, dtype=object),
    )
    return _fused(results.to_delayed())


def _fused(calls: Any) -> list[Any]:
    """Make one task of each call and of all that only it needs, so that no data move to it.

    Dask itself fuses chains; here targets may be a slice of the block that ``X`` comes from.
    """
    from dask._task_spec import Task, convert_legacy_graph
    from dask.core import reverse_dict
    from dask.delayed import Delayed

    graph = convert_legacy_graph(dict(calls[0].__dask_graph__()))
    dependents = reverse_dict({key: node.dependencies for key, node in graph.items()})
    for call in calls:
        owned, waiting = {call.key: graph[call.key]}, [call.key]
        while waiting:
            for key in graph[waiting.pop()].dependencies:
                if key in graph and key not in owned and dependents[key] <= owned.keys():
                    owned[key] = graph[key]
                    waiting.append(key)
        for key in owned:
            del graph[key]
        graph[call.key] = Task.fuse(*owned.values())
    return [Delayed(call.key, graph) for call in calls]


def _aligned(values: Any, name: str, X: Any, blocks: Any) -> Any:
    """Targets or weights in the partitions of ``X``."""
    import dask.array as da

    n_rows, n_blocks = blocks.shape[0], blocks.numblocks[0]
    if not is_dask(values):
        values = np.asarray(values)
        if np.isnan(n_rows):
            raise ValueError(
                f"{name} is in memory, but the numbers of rows of X's partitions are unknown: give "
                f"{name} as a Dask collection of {n_blocks} partitions, or compute the sizes "
                "(X.compute_chunk_sizes(), X.to_dask_array(lengths=True))."
            )
        one_for_all = values.ndim == 0
        values = da.from_array(np.full(n_rows, values) if one_for_all else values, chunks=-1)
    elif (
        _is_frame(X)
        and _is_frame(values)
        and X.known_divisions
        and values.known_divisions
        and X.divisions != values.divisions
    ):
        values = values.repartition(divisions=X.divisions, force=True)
    parts = _blocks(values, name)
    if not (np.isnan(n_rows) or np.isnan(parts.shape[0])):
        if parts.shape[0] != n_rows:
            raise ValueError(
                f"Found input variables with inconsistent numbers of samples: X has {n_rows} "
                f"sequences, {name} has {parts.shape[0]} rows."
            )
        return parts.rechunk({0: blocks.chunks[0]})
    if parts.numblocks[0] != n_blocks:
        raise ValueError(
            f"X has {n_blocks} partition(s), {name} has {parts.numblocks[0]}, and how many rows "
            "they hold is unknown. Cut both alike, or compute the sizes "
            "(to_dask_array(lengths=True), compute_chunk_sizes())."
        )
    return parts


def _blocks(values: Any, name: str) -> Any:
    """An array that is cut along its samples only; that of a frame has frames for blocks."""
    import dask.array as da

    if _is_frame(values):
        meta = np.empty((0, *values._meta.shape[1:]))
        return values.map_partitions(_unchanged, enforce_metadata=False, meta=meta)
    if not isinstance(values, da.Array):
        raise ValueError(
            f"{name} must be a Dask array or data frame; got {type(values).__module__}."
            f"{type(values).__name__}."
        )
    if values.ndim == 0 or any(np.isnan(size) for size in values.shape[1:]):
        raise ValueError(
            f"{name} has shape {values.shape}; only the number of samples may be unknown. Call "
            f"{name}.compute_chunk_sizes() first."
        )
    return values.rechunk(dict.fromkeys(range(1, values.ndim), -1))


def _stand_in(values: Any, name: str) -> Any:
    """One row of ones with the columns of a collection, for what can be checked at once."""
    if values is None:
        return None
    if not is_dask(values):
        return np.ones((1, *np.shape(values)[1:]))
    if _is_frame(values):
        meta = values._meta
        ones = np.ones((1, *meta.shape[1:]))
        return ones if meta.ndim == 1 else type(meta)(ones, columns=meta.columns)
    return np.ones((1, *_blocks(values, name).shape[1:]))


def _is_frame(values: Any) -> bool:
    """Whether a collection is a data frame or a series; Delayed objects have any attribute."""
    return hasattr(type(values), "known_divisions")


def _is_void(X: Any, y: Any, weights: Any) -> bool:
    """Whether a partition adds nothing; refuses one whose parts differ in length."""
    for name, values in (("y", y), ("sample_weight", weights)):
        if values is not None and len(values) != len(X):
            raise ValueError(
                "Found input variables with inconsistent numbers of samples: X has "
                f"{len(X)} sequences, {name} has {len(values)} rows."
            )
    return not len(X) or (weights is not None and not np.any(weights))


def _numbered(blocks: Any) -> tuple[Any, tuple[int]]:
    """Numbers of partitions, as an argument of a blockwise function."""
    import dask.array as da

    return da.arange(blocks.numblocks[0], chunks=1), (0,)


@contextmanager
def _naming(index: np.ndarray) -> Iterator[None]:
    """Say in which partition something is wrong."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Partition {int(index[0])}: {error}") from error


def _only(block: Any) -> Any:
    """The block itself; blockwise functions get a list for every axis that is not in the result."""
    while isinstance(block, list):
        (block,) = block
    return block


def _unchanged(frame: Any) -> Any:
    return frame


def _without_moments(model: Any) -> Any:
    """The model as its predictions need it, small enough to be sent around."""
    check_is_fitted(model)
    model = copy.copy(model)
    assert model.coef_ is not None  # solved for now, not once per task
    for name in ("_moments", "_optimizer"):
        vars(model).pop(name, None)
    return model


def _delayed(thing: Any) -> Any:
    import dask

    return dask.delayed(thing, pure=True, traverse=False)
