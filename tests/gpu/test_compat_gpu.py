"""Conversions of other systems' weights on a GPU, and products with what they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compat_cases import awq_arrays, block_bytes, codes_of, dense, gptq_arrays

import jax_wonly as jw
from jax_wonly.compat import awq, faster_transformer, gptq, llama_cpp, paddle

pytestmark = pytest.mark.gpu


def check_product(rng, weight, value, tolerance=2e-2):
    for m in (1, 5, 40):
        x = jnp.asarray(rng.normal(0.3, 1, (m, value.shape[0])), jnp.bfloat16)
        exact = np.asarray(x, np.float64) @ value
        error = np.linalg.norm(np.asarray(x @ weight, np.float64) - exact)
        assert error < tolerance * np.linalg.norm(exact)


def test_awq(rng):
    *arrays, value = awq_arrays(rng, 512, 192, 128)
    weight = jax.jit(awq.decode)(*arrays)
    np.testing.assert_array_equal(dense(weight), value)
    check_product(rng, weight, value)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_act_order(rng, bits):
    *arrays, value = gptq_arrays(rng, 512, 192, 128, bits, 1, True)
    weight = gptq.decode(*arrays, bits=bits)
    np.testing.assert_array_equal(dense(weight), value)
    check_product(rng, weight, value)


@pytest.mark.parametrize("kind", list(llama_cpp.KINDS))
def test_llama_cpp(rng, kind):
    blocks = block_bytes(rng, kind, 192, 512)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(llama_cpp.dequantize(blocks, kind))
    np.testing.assert_array_equal(llama_cpp.dequantize(blocks, kind), expected)
    if kind != "Q6_K":
        weight = llama_cpp.decode(blocks, kind)
        np.testing.assert_array_equal(dense(weight), expected)
        check_product(rng, weight, expected)


@pytest.mark.parametrize("arch", [70, 80])
@pytest.mark.parametrize("bits", [4, 8])
def test_layouts(rng, bits, arch):
    codes = codes_of(rng, (512, 192), bits)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(faster_transformer.pack_bytes(codes, bits, arch))
    packed = faster_transformer.pack_bytes(codes, bits, arch)
    np.testing.assert_array_equal(packed, expected)
    qvalue = faster_transformer.decode(packed, bits=bits, k=512, n=192, arch=arch)
    np.testing.assert_array_equal(qvalue, jw.pack(codes, bits))


@pytest.mark.parametrize("algo", ["weight_only_int8", "weight_only_int4", "llm.int8"])
def test_paddle(rng, algo):
    w = rng.normal(0.1, 1, (512, 192)).astype(np.float16)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = [np.asarray(a) for a in paddle.weight_quantize(w, algo)]
    out, scale = paddle.weight_quantize(w, algo)
    # A device may divide otherwise in the last bit, which moves a weight that lies between two codes.
    bits = 4 if algo == "weight_only_int4" else 8
    found, wanted = (np.asarray(jw.unpack(a, bits, 512, 192)).astype(int) for a in (out, expected[0]))
    assert np.abs(found - wanted).max() <= 1 and (found != wanted).mean() < 1e-3
    np.testing.assert_allclose(scale, expected[1], rtol=2e-3 if expected[1].dtype == np.float16 else 1e-6)
    x = rng.normal(0.3, 1, (5, 512)).astype(np.float16)
    x[2, 7] = 30
    if algo == "llm.int8":
        y = paddle.llm_int8_linear(x, out, weight_scale=scale)
    else:
        y = paddle.weight_only_linear(x, out, weight_scale=scale, weight_dtype=algo.removeprefix("weight_only_"))
    exact = x.astype(np.float64) @ np.asarray(paddle.weight_dequantize(out, scale, algo, jnp.float32), np.float64)
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) < 2e-2 * np.linalg.norm(exact)
