"""Export to ONNX: a graph of a dozen nodes, built from the heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sklearn_mhla.interop._module import MultiHeadLinearAttention, as_module

if TYPE_CHECKING:
    import onnx


def to_onnx(model: Any, *, flat: bool | None = None, dtype: Any = "float32") -> onnx.ModelProto:
    """A fitted model as an ONNX graph that computes what `predict` does.

    Batch size and number of tokens stay free. The graph has no padding: in a batch of sequences of
    different lengths, put zero tokens in front, which changes nothing for ``state="sum"``.

    Parameters
    ----------
    model : MHLARegressor, MHLARegressorCV or MultiHeadLinearAttention
        Fitted.
    flat : bool, default=None
        Whether the input has the shape (n, n_tokens * d), each row a sequence, or (n, n_tokens, d).
        None takes the form that the estimator was fitted on; for a module, the latter.
    dtype : {"float32", "float64"}, default="float32"
        Type of input, output and computation.

    Returns
    -------
    onnx.ModelProto
        With one input, ``X``, and one output, ``y``, of the shape that `predict` returns. Checked;
        ``onnx.save(proto, path)`` stores it.

    Raises
    ------
    ValueError
        If ``dtype`` is another.
    TypeError
        If ``model`` is of another class.
    ImportError
        If onnx is not installed.

    Examples
    --------
    >>> from sklearn_mhla import MHLARegressor
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> from sklearn_mhla.interop import to_onnx
    >>> X, y = make_linear_attention(200, n_tokens=8, n_features=3, random_state=0)
    >>> proto = to_onnx(MHLARegressor().fit(X, y))
    >>> [value.name for value in proto.graph.input]
    ['X']
    """
    try:
        import onnx
    except ImportError as error:
        raise ImportError(
            "to_onnx() needs onnx, which could not be imported. Install it with `pip install onnx`."
        ) from error
    if np.dtype(dtype) not in (np.dtype("float32"), np.dtype("float64")):
        raise ValueError(f"dtype must be 'float32' or 'float64'; got {dtype!r}.")
    module = as_module(model)
    if flat is None:
        flat = module is not model and model._rows_are_flat
    graph = _Graph(onnx.helper, np.dtype(dtype))
    _attention(graph, module, flat)
    shape: list[Any] = ["n", "n_tokens * d"] if flat else ["n", "n_tokens", module.token_dim]
    outputs: list[Any] = ["n"] if module.output == "last" else ["n", "n_tokens"]
    if not module.squeeze:
        outputs.append(module.value.shape[1])
    kind = onnx.helper.np_dtype_to_tensor_dtype(graph.dtype)
    describe = onnx.helper.make_tensor_value_info
    proto: onnx.ModelProto = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes,
            "multi_head_linear_attention",
            [describe("X", kind, shape)],
            [describe("y", kind, outputs)],
            graph.constants,
        ),
        producer_name="sklearn_mhla",
        # Of 2022; runtimes read older versions.
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.checker.check_model(proto, full_check=True)
    return proto


class _Graph:
    """Nodes and constants of a graph in the making."""

    def __init__(self, helper: Any, dtype: np.dtype) -> None:
        self.helper, self.dtype = helper, dtype
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, values: Any) -> str:
        """Store an array (integers as int64, the others in the graph's type); its name."""
        values = np.asarray(values)
        values = values.astype(np.int64 if values.dtype.kind == "i" else self.dtype)
        kind = self.helper.np_dtype_to_tensor_dtype(values.dtype)
        self.constants.append(self.helper.make_tensor(name, kind, values.shape, values.ravel()))
        return name

    def add(self, operator: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Apply an operator; the name of what it computes."""
        self.nodes.append(self.helper.make_node(operator, inputs, [name], name, **attributes))
        return name


def _attention(graph: _Graph, module: MultiHeadLinearAttention, flat: bool) -> None:
    """Nodes from ``X`` to ``y``: states (n, t, j, k), queries (n, t, l), heads (n, t, h, j)."""
    add, constant = graph.add, graph.constant
    tokens = "X"
    if flat:
        tokens = add("Reshape", "X", constant("form", [0, -1, module.token_dim]), name="tokens")
    first = constant("one", [1])
    length = add("Gather", add("Shape", tokens, name="shape"), first, name="length")
    kind = graph.helper.np_dtype_to_tensor_dtype(graph.dtype)
    queries = tokens
    if module.output == "last":
        queries = add("Gather", tokens, constant("last", [-1]), name="queries", axis=1)
    if module.output == "sequence" and module.causal:
        outer = add("Einsum", tokens, tokens, name="outer", equation="ntj,ntk->ntjk")
        states = add("CumSum", outer, first, name="total")
        ones = add("Expand", constant("unit", [1.0]), length, name="ones")
        counts = add("CumSum", ones, constant("zero", 0), name="count")
        counts = add("Reshape", counts, constant("column", [-1, 1, 1]), name="counts")
    else:
        states = add("Einsum", tokens, tokens, name="sum", equation="ntj,ntk->njk")
        states = add("Unsqueeze", states, first, name="total")
        counts = add("Cast", length, name="counts", to=kind)
    if module.state == "mean":
        states = add("Div", states, counts, name="mean")
    value, key_query = (
        parameter.detach().cpu().numpy() for parameter in (module.value, module.key_query)
    )
    key_query = constant("key_query", key_query)
    asked = add("Einsum", key_query, queries, name="asked", equation="hkl,ntl->nthk")
    heads = add("MatMul", asked, states, name="heads")
    value = constant("value", value)
    outputs = add("Einsum", value, heads, name="read", equation="haj,nthj->nta")
    if module.bias is not None:
        bias = constant("bias", module.bias.detach().cpu().numpy())
        outputs = add("Add", outputs, bias, name="outputs")
    axes = [1] * (module.output == "last") + [2] * module.squeeze
    if axes:
        add("Squeeze", outputs, constant("axes", axes), name="y")
    else:
        add("Identity", outputs, name="y")
