"""``python -m jax_wonly``."""

import sys

from jax_wonly.cli import main

if __name__ == "__main__":
    sys.exit(main())
