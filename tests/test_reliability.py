"""A few examples of every property that ``python tests/reliability fuzz`` checks with many."""

import os

import hypothesis
import pytest

pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

from reliability import fuzz, machine_code  # noqa: E402

FACTOR = float(os.environ.get("JAX_WONLY_FUZZ_FACTOR", "1"))


def check_property(name, factor):
    _, check, strategies = fuzz.PROPERTIES[name]
    examples = max(1, round(factor * (20 if name in fuzz.QUICK else 2)))
    hypothesis.settings(max_examples=examples)(hypothesis.given(**strategies)(check))()


@pytest.mark.parametrize("name", list(fuzz.PROPERTIES))
def test_property(name):
    check_property(name, FACTOR)


_BRANCH = """
        Function : kernel
        /*0000*/              @P0 BRA 0x40 ;  /* 0x0000000c00e80947 */
                                              /* 0x000fea0003800000 */
        /*0010*/                   LDS.128 R32, [R35+0x1800] ;
        /*0020*/                   STG.E.128 desc[UR34][R2.64], R32 ;
        /*0030*/                   BRA 0x40 ;
        /*0040*/                   {meeting} ;
        /*0050*/                   EXIT ;
"""


@pytest.mark.parametrize("meeting", ["LDC.64 R10, c[0x0][0x2d0]", "BSYNC B0", "WARPSYNC 0xffffffff"])
def test_lanes_that_do_not_meet_are_found(meeting):
    other = _BRANCH.replace("kernel", "harmless").replace("STG.E.128 desc[UR34][R2.64], R32", "MOV R2, R3")
    text = (_BRANCH + other).format(meeting=meeting).splitlines()
    found = {name: machine_code.partings(code) for name, code in machine_code.kernels(text)}
    assert found == {"kernel": [0] if meeting.startswith("LDC") else [], "harmless": []}
