"""Layers of flash-linear-attention and xlstm, started from heads.

The names and shapes of their parameters are written out below, as flash-linear-attention 0.6.0 and
xlstm 2.0.6 have them. Where the libraries are installed, their layers are loaded and run:
flash-linear-attention with its naive operators in place of the kernels, which need a GPU.
"""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest
import torch
from torch.nn.functional import normalize, softplus
from warm_starts import make_module, make_tokens, relative_error

from sklearn_mhla.interop import (
    MLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LinearAttention,
    hidden_states,
    to_library,
)

# For d = 5, m = 4, H = 3, so hidden_size = 6; a weight has the shape (out, in).
PARAMETERS = {
    LinearAttention: {
        "q_proj.weight": (15, 6),
        "k_proj.weight": (15, 6),
        "v_proj.weight": (15, 6),
        "o_proj.weight": (6, 15),
    },
    GatedLinearAttention: {
        "q_proj.weight": (15, 6),
        "k_proj.weight": (15, 6),
        "v_proj.weight": (15, 6),
        "gk_proj.0.weight": (16, 6),
        "gk_proj.1.weight": (15, 16),
        "gk_proj.1.bias": (15,),
        "g_norm.weight": (5,),
        "o_proj.weight": (6, 15),
    },
    DeltaNet: {
        "q_proj.weight": (21, 6),
        "k_proj.weight": (21, 6),
        "v_proj.weight": (30, 6),
        "b_proj.weight": (3, 6),
        "o_norm.weight": (10,),
        "o_proj.weight": (6, 30),
    },
    GatedDeltaNet: {
        "q_proj.weight": (72, 6),
        "k_proj.weight": (72, 6),
        "v_proj.weight": (72, 6),
        "a_proj.weight": (6, 6),
        "b_proj.weight": (6, 6),
        "A_log": (6,),
        "dt_bias": (6,),
        "o_norm.weight": (12,),
        "o_proj.weight": (6, 72),
    },
    MLSTM: {
        "q.weight": (18, 6),
        "k.weight": (18, 6),
        "v.weight": (36, 6),
        "ogate_preact.weight": (36, 6),
        "igate_preact.weight": (3, 6),
        "igate_preact.bias": (3,),
        "fgate_preact.weight": (3, 6),
        "fgate_preact.bias": (3,),
        "multihead_norm.weight": (36,),
        "out_proj.weight": (6, 36),
    },
}


@pytest.mark.parametrize("layer_class", PARAMETERS)
def test_parameters_have_the_names_and_shapes_of_the_libraries(layer_class):
    layer = layer_class.from_model(make_module())
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == PARAMETERS[
        layer_class
    ]


def naive_operators():
    """The naive operators, with the arguments of the kernels that the layers call."""
    naive = {
        name: importlib.import_module(f"fla.ops.{name}.naive")
        for name in ("gla", "delta_rule", "gated_delta_rule")
    }

    def linear(q, k, v, **_):
        return naive["gla"].naive_recurrent_gla(q, k, v, torch.zeros_like(k))

    def gla(q, k, v, gk, **_):
        return naive["gla"].naive_recurrent_gla(q, k, v, gk)

    def delta(q, k, v, beta, use_qk_l2norm_in_kernel, **_):
        assert use_qk_l2norm_in_kernel
        q, k = (normalize(x, dim=-1) for x in (q, k))
        q, k, v, beta = (x.transpose(1, 2) for x in (q, k, v, beta))
        output, state = naive["delta_rule"].delta_rule_recurrence(q, k, v, beta)
        return output.transpose(1, 2), state

    def gated_delta(q, k, v, g, beta, A_log, dt_bias, **options):
        for wanted in ("use_qk_l2norm", "use_gate", "use_beta_sigmoid"):
            assert options[f"{wanted}_in_kernel"]
        assert not options["allow_neg_eigval"]
        q, k = (normalize(x, dim=-1) for x in (q, k))
        log_decay = -A_log.exp() * softplus(g + dt_bias)
        run = naive["gated_delta_rule"].naive_recurrent_gated_delta_rule
        return run(q, k, v, beta.sigmoid(), log_decay)

    return {
        "linear_attn.fused_recurrent_linear_attn": linear,
        "gla.fused_recurrent_gla": gla,
        "delta_net.fused_recurrent_delta_rule": delta,
        "gated_deltanet.fused_recurrent_gated_delta_rule": gated_delta,
    }


@pytest.mark.parametrize(
    ("layer_class", "bound"),
    [
        (LinearAttention, 1e-6),
        (GatedLinearAttention, 2e-6),
        (DeltaNet, 1.5e-5),
        (GatedDeltaNet, 1.5e-5),
    ],
)
def test_layers_of_flash_linear_attention(layer_class, bound, monkeypatch):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing GPU
            fla_layers = importlib.import_module("fla.layers")
            operators = naive_operators()
    except ImportError as error:
        pytest.skip(f"flash-linear-attention cannot be imported: {error}")
    for path, operator in operators.items():
        module, name = path.split(".")
        monkeypatch.setattr(importlib.import_module(f"fla.layers.{module}"), name, operator)
    layer, tokens = layer_class.from_model(make_module()), make_tokens()
    library_layer = to_library(layer).eval()
    assert type(library_layer) is getattr(fla_layers, layer_class.__name__)
    norm = getattr(library_layer, "g_norm", getattr(library_layer, "o_norm", None))
    if norm is not None:
        ours = torch.nn.RMSNorm(norm.hidden_size, norm.eps)
        ours.load_state_dict(norm.state_dict())
        monkeypatch.setattr(norm, "forward", ours.forward)
    with torch.no_grad():
        output = library_layer(hidden_states(tokens, layer.hidden_size).float())[0]
    assert relative_error(output, tokens) < bound


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_layer_of_xlstm(mode):
    try:
        backend_module = importlib.import_module("mlstm_kernels.torch.backend_module")
        importlib.import_module("xlstm.xlstm_large.model")
    except ImportError as error:
        pytest.skip(f"xlstm cannot be imported: {error}")
    backend = backend_module.mLSTMBackendConfig(mode=mode, autocast_kernel_dtype="float32")
    layer, tokens = MLSTM.from_model(make_module()), make_tokens()
    library_layer = to_library(layer, mlstm_backend=backend)
    with torch.no_grad():
        output = library_layer(hidden_states(tokens, layer.hidden_size).float())[0]
    # The kernels add 1e-6 to the normaliser.
    assert relative_error(output, tokens) < 3e-6


@pytest.mark.parametrize("layer_class", PARAMETERS)
def test_a_missing_library_is_named(layer_class, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    monkeypatch.setitem(sys.modules, "xlstm.xlstm_large.model", None)
    package = "xlstm" if layer_class is MLSTM else "flash-linear-attention"
    with pytest.raises(ImportError, match=f"pip install {package}"):
        to_library(layer_class.from_model(make_module()))


def test_what_the_libraries_lack_is_refused():
    with pytest.raises(ValueError, match="norm_eps"):
        to_library(DeltaNet.from_model(make_module(), norm_eps=None))
    with pytest.raises(TypeError, match="got Linear"):
        to_library(torch.nn.Linear(2, 2))


def fake_library(monkeypatch, name):
    """A stand-in for a library's class that records its arguments."""
    seen = {}

    class Recorder(torch.nn.Module):
        def __init__(self, **arguments):
            super().__init__()
            seen.update(arguments)

        def load_state_dict(self, state):
            seen["state"] = state

    module = type(sys)("fake")
    setattr(module, name, Recorder)
    return module, Recorder, seen


@pytest.mark.parametrize("layer_class", [c for c in PARAMETERS if c is not MLSTM])
def test_arguments_give_the_widths_that_the_library_computes(layer_class, monkeypatch):
    module, _, seen = fake_library(monkeypatch, layer_class.__name__)
    monkeypatch.setitem(sys.modules, "fla.layers", module)
    for hidden_size in (6, 7, 11, 64):
        layer = layer_class.from_model(make_module(), hidden_size)
        to_library(layer, layer_idx=3)
        assert seen["layer_idx"] == 3
        assert seen["hidden_size"] == hidden_size
        if layer_class is GatedDeltaNet:
            widths = (
                seen["num_heads"] * seen["head_dim"],
                seen["num_heads"] * int(seen["head_dim"] * seen["expand_v"]),
            )
        else:
            widths = tuple(round(hidden_size * seen[x]) for x in ("expand_k", "expand_v"))
        state = seen["state"]
        assert widths == (len(state["q_proj.weight"]), len(state["v_proj.weight"]))


def test_arguments_of_xlstm(monkeypatch):
    module, layer_type, seen = fake_library(monkeypatch, "mLSTMLayer")
    module.mLSTMLayer = lambda config: layer_type(**config)
    module.mLSTMLayerConfig = lambda **options: options
    monkeypatch.setitem(sys.modules, "xlstm.xlstm_large.model", module)
    for hidden_size in (6, 7, 11, 64):
        to_library(MLSTM.from_model(make_module(), hidden_size), mlstm_backend="any")
        assert seen["mlstm_backend"] == "any"
        assert seen["gate_soft_cap"] == 60.0
        state = seen["state"]
        assert int(hidden_size * seen["qk_dim_factor"]) == len(state["q.weight"])
        assert int(hidden_size * seen["v_dim_factor"]) == len(state["v.weight"])
