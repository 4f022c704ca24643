"""Long checks, each of which writes benchmarks/results/reliability-*.json, from which docs/reliability.md is made.

python tests/reliability fuzz [--examples 200]         random and hostile inputs (a few of each also run as tests)
python tests/reliability stress [--calls 100000]       threads, devices, replays, leaks; on a GPU if there is one
python tests/reliability memory                        a GPU without memory left, while a model is quantized
python tests/reliability sanitize                      the CPU kernels under ASan and UBSan
python tests/reliability sanitize-gpu                  the CUDA kernels under compute-sanitizer
python tests/reliability machine-code                  what ptxas made of the CUDA kernels
python tests/reliability versions VERSION...           this build under several versions of JAX
python tests/reliability installed                     the self-test of what is installed, with no compiler in reach
"""

import importlib
import importlib.util
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PARTS = ("fuzz", "stress", "memory", "sanitize", "sanitize-gpu", "machine-code", "versions", "installed")

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        sys.exit(__doc__)
    sys.path[0] = str(TESTS)
    if importlib.util.find_spec("jax_wonly") is None:  # neither installed nor on PYTHONPATH
        sys.path.append(str(TESTS.parent))
    part = importlib.import_module(f"reliability.{sys.argv[1].replace('-', '_')}")
    sys.exit(part.main(sys.argv[2:]))
