"""Static int8 products on the tensor cores: the same codes as XLA's integers."""

import jax.numpy as jnp
import numpy as np
import pytest
from static_cases import expected_codes, random_layer

import jax_wonly as jw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("bits", "activation"), [(8, None), (8, "relu"), (4, None)])
def test_matmul(rng, bits, activation):
    for m, k, n in ((300, 512, 200), (1, 77, 33), (257, 4096, 1000)):
        layer, weights, *_ = random_layer(rng, k, n, bits=bits, activation=activation)
        q = jnp.asarray(rng.integers(-128, 128, (m, k)), jnp.int8)
        np.testing.assert_array_equal(
            jw.static.matmul(q, layer, implementation="cuda"), expected_codes(q, layer, weights)
        )


def test_conv(rng):
    layer, weights, *_ = random_layer(rng, 3 * 3 * 32, 64, kernel=(3, 3))
    q = jnp.asarray(rng.integers(-128, 128, (4, 12, 12, 32)), jnp.int8)
    np.testing.assert_array_equal(
        jw.static.conv(q, layer, implementation="cuda"), jw.static.conv(q, layer, implementation="xla")
    )
