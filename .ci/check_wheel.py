"""Fails unless a wheel holds what it should and nothing else: check_wheel.py WHEEL CUDA, with ON or OFF for CUDA."""

import pathlib
import re
import sys
import zipfile

names = [name for name in zipfile.ZipFile(sys.argv[1]).namelist() if ".dist-info/" not in name]
modules = {pathlib.Path(name).name.split(".")[0] for name in names if name.endswith(".so")}
wanted = {"_cpu", "_cuda"} if sys.argv[2] == "ON" else {"_cpu"}
if modules != wanted:
    sys.exit(f"the wheel holds {sorted(modules)}; expected: {sorted(wanted)}")
others = [name for name in names if not re.fullmatch(r"jax_wonly/(.*\.(py|so)|py\.typed|costs/\w+\.json)", name)]
if others:
    sys.exit(f"the wheel holds {others}")
