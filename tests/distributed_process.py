"""One of two processes of ``test_sharding.py``: products whose weights are split over the devices of both.

python distributed_process.py ADDRESS SEED PROCESS
"""

import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import random_weight, random_x

import jax_wonly as jw


def main(address: str, seed: str, process: str) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=int(process))
    assert jax.process_count() == 2 and jax.device_count() == 4 and jax.local_device_count() == 2
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(int(seed))  # both processes draw the same
    weight = random_weight(rng, 256, 256, group_size=64, mode="offsets")
    experts = random_weight(rng, 64, 70, group_size=32, lead=(8,))
    x, tokens = np.asarray(random_x(rng, (4, 256))), np.asarray(random_x(rng, (12, 64)))
    ids = rng.integers(0, 8, 12).astype(np.int32)

    def place(a, *spec):
        """An array that all processes hold, over the devices of all."""
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(a.shape, sharding, lambda index: np.asarray(a)[index])

    def place_weight(qt, *spec):
        shardings = jw.shardings(qt, NamedSharding(mesh, P(*spec)))
        return jax.tree.map(lambda a, s: place(np.asarray(a), *s.spec), qt, shardings)

    def check(f, args, expected):
        replicated = NamedSharding(mesh, P())
        y = jax.jit(f, out_shardings=replicated)(*args)
        np.testing.assert_allclose(y.addressable_data(0), expected, rtol=1e-4, atol=1e-3)

    exact = x.astype(np.float64) @ weight.dense
    by_ids = np.stack([t.astype(np.float64) @ experts.dense[i] for t, i in zip(tokens, ids, strict=True)])
    for spec in (("tp",), (None, "tp")):
        args = (place(x), place_weight(weight.qt, *spec))
        check(jw.matmul, args, exact)
        check(lambda x, qt: jax.grad(lambda x: (jw.matmul(x, qt) ** 2).sum() / 2)(x), args, exact @ weight.dense.T)
    check(jw.gather_matmul, (place(tokens), place_weight(experts.qt, "tp"), place(ids)), by_ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
