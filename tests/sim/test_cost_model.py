"""The cost model of an engine's step: its laws, and its distance from what others measured."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.common.files import read_json
from sglang_fair.sim.cost_model import (
    HOPPER,
    Fitted,
    Roofline,
    Scaled,
    from_json,
    kv_tokens,
    make_cost_model,
    pairs,
    to_json,
)
from sglang_fair.sim.gpus import GPUS, Gpu
from sglang_fair.sim.shapes import SHAPES, ModelShape

A100_8B = make_cost_model("a100-80g/llama-3.1-8b")
A10G_7B = make_cost_model("a10g/llama-2-7b")
FITTED = Fitted(0.004, 2e-5, 3e-9, 2e-4, 0.003, 1.5e-4, 4e-8, 1e-7)
MODELS = (A100_8B, A10G_7B, make_cost_model("h200/llama-3.2-3b"), FITTED, Scaled(FITTED, 0.25))

any_model = st.sampled_from(MODELS)
extends = st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 30_000)), min_size=1, max_size=8)


# ---- laws


@given(any_model, extends, st.data())
def test_more_prefill_never_takes_less(model, batch, data):
    at = data.draw(st.integers(0, len(batch) - 1))
    extend, cached = batch[at]
    more_extend = [*batch[:at], (extend + 1, cached), *batch[at + 1 :]]
    more_cached = [*batch[:at], (extend, cached + 1), *batch[at + 1 :]]
    before = model.prefill_s(batch)
    assert before > 0
    for larger in (more_extend, more_cached, [*batch, (1, 0)]):
        assert model.prefill_s(larger) >= before


@given(any_model, st.integers(1, 512), st.integers(0, 10**6))
def test_more_decoding_never_takes_less(model, requests, context):
    before = model.decode_s(requests, context)
    assert before > 0
    assert model.decode_s(requests + 1, context) >= before
    assert model.decode_s(requests, context + 1) >= before


@given(any_model, st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 200))
def test_a_run_of_steps_is_the_sum_of_its_steps(model, requests, context, steps):
    one_by_one = sum(model.decode_s(requests, context + step * requests) for step in range(steps))
    assert model.decode_s(requests, context, steps) == pytest.approx(one_by_one, rel=1e-9, abs=1e-12)


@given(any_model, st.integers(2, 30_000), st.integers(0, 30_000), st.data())
def test_chunks_take_at_least_as_long_as_the_whole(model, extend, cached, data):
    cut = data.draw(st.integers(1, extend - 1))
    chunked = model.prefill_s([(cut, cached)]) + model.prefill_s([(extend - cut, cached + cut)])
    assert chunked >= model.prefill_s([(extend, cached)])


@given(any_model, extends, extends)
def test_a_batch_takes_at_most_as_long_as_its_parts(model, one, other):
    assert model.prefill_s([*one, *other]) <= model.prefill_s(one) + model.prefill_s(other)


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 5000))
def test_pairs_do_not_depend_on_the_cut(first, cached, rest):
    assert pairs(first + rest, cached) == pairs(first, cached) + pairs(rest, cached + first)
    assert pairs(3, 10) == 11 + 12 + 13


@given(any_model, st.floats(1e-3, 1e3), st.integers(1, 100), st.integers(0, 10**5))
def test_a_time_scale_scales_everything(model, factor, requests, context):
    scaled = Scaled(model, factor)
    assert scaled.prefill_s([(requests, context)]) == factor * model.prefill_s([(requests, context)])
    assert scaled.decode_s(requests, context) == factor * model.decode_s(requests, context)
    assert scaled.decode_s(requests, context, 9) == factor * model.decode_s(requests, context, 9)


def test_a_cached_prefix_is_read_however_little_attends_to_it():
    read_s = 100_000 * 131_072 / (0.8 * 2_039e9)
    assert A100_8B.prefill_s([(1, 100_000)]) - A100_8B.prefill_s([(1, 0)]) == pytest.approx(read_s, rel=1e-3)
    assert FITTED.prefill_s([(1, 100_000)]) - FITTED.prefill_s([(1, 0)]) == pytest.approx(
        100_000 * (1e-7 + 3e-9)
    )


# ---- names, JSON, errors


@pytest.mark.parametrize("model", [*MODELS, Scaled(A100_8B, 2.0), Scaled(Scaled(FITTED, 2.0), 0.5)])
def test_json_has_everything(model, tmp_path):
    told = json.loads(json.dumps(to_json(model)))
    assert from_json(told) == model
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"cost_model": told, "seed": 0}))
    assert make_cost_model(str(path), read_json) == model


def test_parts_of_the_efficiency_can_be_named_with_it():
    changed = make_cost_model("h100/llama-2-7b: decode_overhead_s=0.01, mbu=0.7")
    plain = make_cost_model("h100/llama-2-7b")
    assert changed == replace(plain, efficiency=replace(HOPPER, decode_overhead_s=0.01, mbu=0.7))
    assert make_cost_model("h100/llama-2-7b:") == plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100-80g", "unknown cost model 'a100-80g': it is GPU/MODEL"),
        ("a100/llama-3.1-8b", "of the GPUs a10g, a100-80g, h100, h200"),
        ("h100/llama-2-7b:speed=2", "a cost model has no 'speed'; there are mfu"),
        ("h100/llama-2-7b:mbu=fast", "mbu of a cost model must be a number, not 'fast'"),
        ("h100/llama-2-7b:mbu=2", "mbu must be above 0 and at most 1"),
        ("none/such.json", "cannot read none/such.json: No such file or directory"),
    ],
)
def test_a_name_that_there_is_not_is_refused_in_one_line(text, says):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        make_cost_model(text, read_json)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"kind": "guess"},
        {"kind": "fitted", "prefill_base_s": 1.0},
        {"kind": "fitted", **{own.name: -1.0 for own in fields(Fitted)}},
        {"kind": "fitted", **{own.name: float("nan") for own in fields(Fitted)}},
        {"kind": "scaled", "factor": 0, "model": to_json(FITTED)},
        {"kind": "roofline", "gpu": 1},
        {"cost_model": 7},
    ],
)
def test_json_of_something_else_is_refused(told):
    with pytest.raises(ValueError, match=r"^not a cost model: [^\n]*$"):
        from_json(told)


# ---- published figures


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("llama-3.2-3b", 3_212_749_824, 114_688),
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("llama-2-7b", 6_738_415_616, 524_288),
        ("llama-2-13b", 13_015_864_320, 819_200),
        ("vicuna-13b", 13_015_864_320, 819_200),
        ("mistral-7b", 7_241_732_096, 131_072),
    ],
)
def test_shapes_have_their_published_sizes(name, parameters, kv_bytes):
    shape = SHAPES[name]
    assert shape.parameters == parameters
    assert shape.weight_bytes == 2 * parameters
    assert shape.kv_bytes_per_token == kv_bytes


def test_quantized_layers_take_a_quarter():
    shape = SHAPES["llama-2-70b-4bit"]
    assert shape.parameters == 68_976_648_192
    assert shape.weight_bytes == shape.layer_parameters // 2 + 2 * (shape.parameters - shape.layer_parameters)
    assert shape.kv_bytes_per_token == 327_680
    assert shape.read_bytes < shape.weight_bytes < 0.27 * 2 * shape.parameters
    assert kv_tokens(GPUS["a100-80g"], shape) > 100_000


def test_pools_hold_what_the_memory_leaves():
    """VTC's pools (10,000 tokens; 35,000 and 65,000) fit the GPUs they were used on."""
    assert 10_000 < kv_tokens(GPUS["a10g"], SHAPES["llama-2-7b"]) < 16_000
    assert kv_tokens(GPUS["a100-80g"], SHAPES["llama-2-13b"]) == pytest.approx(65_000, rel=0.1)
    assert kv_tokens(GPUS["a100-80g"], SHAPES["llama-3.1-8b"]) == pytest.approx(450_000, rel=0.05)


A6000 = Gpu("a6000", 154.8e12, 768e9, 48 * 2**30)
MISTRAL_7B = ModelShape("mistral-7b", 32, 4096, 14_336, 32, 8, 128, 32_000, False, 32_768)
OPT_13B = ModelShape("opt-13b", 40, 5120, 20_480, 40, 40, 128, 50_272, True, 2048, mlp_matrices=2)
A6000_MISTRAL = Roofline(A6000, MISTRAL_7B)
A100_OPT = Roofline(GPUS["a100-80g"], OPT_13B)
H100_8B = make_cost_model("h100/llama-3.1-8b")


def vtc_profile_s(input_tokens, output_tokens):
    """VTC's artifact: milliseconds of one request on an A10G when such requests fill a pool of 10,000 tokens."""
    x, y = input_tokens, output_tokens
    return (0.21001891 * x + 0.10075395 * y + 0.0039868 * x * y + 0.00324733 * y**2 + 1.14601454) / 1e3


def vtc_modelled_s(input_tokens, output_tokens):
    """The same from the model: a batch that fills the pool at its end, divided by its size."""
    requests = 10_000 // (input_tokens + output_tokens)
    prefill_s = A10G_7B.prefill_s([(input_tokens, 0)] * requests)
    return (prefill_s + A10G_7B.decode_s(requests, requests * input_tokens, output_tokens)) / requests


def preble_prefill_s(tokens):
    """Preble's fit for Mistral-7B under SGLang on an A6000: one prompt, nothing cached."""
    linear = 0.115 * tokens - 1.13
    attention = 1.86e-4 * tokens + 0.159
    square = 1.13e-3 * tokens + 1.75e-3 * tokens + 2.19e-6 * tokens**2 if tokens > 1024 else 0
    return (linear + attention + square) / 0.95 / 1e3


def distserve_prefill_s(tokens):
    """DistServe's fit for OPT-13B on an A100-80G: one prompt."""
    return (16.457 + 0.092648 * tokens + 6.4748e-6 * tokens**2) / 1e3


def distserve_decode_s(requests, context):
    """Likewise, of a batch below 95 requests."""
    return (19.9347 + 0.00062694 * context + 0.038507 * requests) / 1e3


# What, by the model, as measured, how far the two may be apart. Sources: VTC, figure 4, tables 4 to 6 and its
# artifact's cost_profile.json; Preble's model_equations.py; DistServe's profiler-a100-80g.json; Vidur's profile of
# Meta-Llama-3-8B on A100 (sum of one layer's operators); SGLang's pull request 1060 (prompts of 4,065 tokens).
POINTS = [
    ("VTC, 64 in 64 out, s", vtc_modelled_s(64, 64), vtc_profile_s(64, 64), 0.1),
    ("VTC, 256 in 256 out, s", vtc_modelled_s(256, 256), vtc_profile_s(256, 256), 0.1),
    ("VTC, 512 in 64 out, s", vtc_modelled_s(512, 64), vtc_profile_s(512, 64), 0.15),
    ("VTC, 64 in 512 out, s", vtc_modelled_s(64, 512), vtc_profile_s(64, 512), 0.1),
    ("VTC, 512 in 512 out, s", vtc_modelled_s(512, 512), vtc_profile_s(512, 512), 0.1),
    ("VTC overload, tokens/s", 512 / vtc_modelled_s(256, 256), 893, 0.1),
    ("VTC figure 4, requests/min", 60 / vtc_modelled_s(256, 256), 97, 0.15),
    ("Preble, prefill of 1024, s", A6000_MISTRAL.prefill_s([(1024, 0)]), preble_prefill_s(1024), 0.15),
    ("Preble, prefill of 8192, s", A6000_MISTRAL.prefill_s([(8192, 0)]), preble_prefill_s(8192), 0.1),
    ("Preble, decode of 1 x 1024, s", A6000_MISTRAL.decode_s(1, 1024), 0.02349, 0.1),
    ("Preble, decode of 32 x 1024, s", A6000_MISTRAL.decode_s(32, 32_768), 0.02974, 0.1),
    ("DistServe, prefill of 512, s", A100_OPT.prefill_s([(512, 0)]), distserve_prefill_s(512), 0.1),
    ("DistServe, prefill of 2048, s", A100_OPT.prefill_s([(2048, 0)]), distserve_prefill_s(2048), 0.1),
    ("DistServe, decode of 1 x 512, s", A100_OPT.decode_s(1, 512), distserve_decode_s(1, 512), 0.2),
    ("DistServe, decode of 32 x 512, s", A100_OPT.decode_s(32, 16_384), distserve_decode_s(32, 16_384), 0.25),
    ("Vidur, 32,768 tokens, s", A100_8B.prefill_s([(16, 0)] * 2048), 32 * 0.0676, 0.1),
    ("Vidur, 1 token and the head, s", A100_8B.decode_s(1, 0), 32 * 0.000303 + 0.00064, 0.1),
    ("SGLang on H100, input tokens/s", 8130 / H100_8B.prefill_s([(4065, 0)] * 2), 27_670, 0.25),
]


@pytest.mark.parametrize(
    ("ours", "measured", "apart"), [point[1:] for point in POINTS], ids=[p[0] for p in POINTS]
)
def test_the_roofline_is_near_what_was_measured(ours, measured, apart):
    assert ours == pytest.approx(measured, rel=apart)
