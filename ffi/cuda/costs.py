"""Writes the header that the C++ dispatcher takes its numbers from: python costs.py FOLDER, for FOLDER/cuda/costs.h.

The numbers are those of jax_wonly/costs, one file for each architecture that was measured.
"""

import json
import sys
from pathlib import Path

COSTS = Path(__file__).parent.parent.parent / "jax_wonly" / "costs"


def number(value: float) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(value)


def row(values) -> str:
    return "{" + ", ".join(map(number, values)) + "}"


def constants(prefix: str, values: dict) -> str:
    """Of sizes, ``kPrefixSomeName`` for each ``some_name``."""
    names = {name: "".join(part.capitalize() for part in name.split("_")) for name in values}
    return "".join(f"inline constexpr int64_t {prefix}{names[name]} = {value};\n" for name, value in values.items())


def array(kind: str, name: str, rows: list) -> str:
    return f"inline constexpr {kind} {name}[] = {{{', '.join(map(row, rows))}}};\n"


def of_warpgroups(name: str, costs: dict) -> str:
    lines, fields = "", []
    for key, kind in (("shapes", "Cost"), ("rounded", "Cost"), ("clusters", "ClusterCost")):
        if costs[key]:
            lines += array(f"warpgroup::{kind}", f"{name}{key.capitalize()}", costs[key])
        fields += [f"{name}{key.capitalize()}" if costs[key] else "nullptr", str(len(costs[key]))]
    fields += [number(value) for value in costs.values() if not isinstance(value, list)]
    return lines + f"inline constexpr warpgroup::Costs {name}{{{', '.join(fields)}}};\n"


def resident(name: str, costs: dict) -> str:
    return f"inline constexpr resident::Costs {name}{row(costs['costs'].values())};\n"


def in_tiles(kind: str, name: str, costs: dict) -> str:
    others = ", ".join(number(value) for key, value in costs.items() if key != "stages")
    stages = f"{name}Stages"
    lines = array(f"{kind}s::Stage", stages, costs["stages"])
    return lines + f"inline constexpr {kind}s {name}{{{stages}, {len(costs['stages'])}, {others}}};\n"


def header() -> str:
    newer, older = (json.loads((COSTS / f"sm_{architecture}.json").read_text()) for architecture in (90, 80))
    return "".join(
        [
            "// Made of jax_wonly/costs by ffi/cuda/costs.py.\n#pragma once\n\n",
            '#include "cuda/direct_conv.h"\n',
            *(f'#include "cuda/matmul_{name}.h"\n' for name in ("mma", "resident", "tiled", "warpgroup")),
            "\nnamespace wonly::costs {\n\n",
            f"inline constexpr int kStreamTokens = {newer['stream']['tokens']};\n",
            f"inline constexpr float kStreamStart = {number(newer['stream']['start'])};\n",
            f"inline constexpr float kStreamBytes = {number(newer['stream']['bytes'])};\n",
            f"inline constexpr float kStreamSmallGroupsFloat32 = {number(newer['stream']['small_groups_float32'])};\n",
            "struct StreamRate {\n  int64_t tokens;\n  float start, bytes;\n};\n",
            array("StreamRate", "kStreamFloat32", newer["stream"]["float32"]),
            array("StreamRate", "kStreamShiftedFloat32", newer["stream"]["shifted_float32"]),
            array("StreamRate", "kStreamTable", newer["stream"]["table"]),
            array("StreamRate", "kStreamTableFloat32", newer["stream"]["table_float32"]),
            "inline constexpr float kStreamSmallGroupsShiftedFloat32 = "
            f"{number(newer['stream']['small_groups_shifted_float32'])};\n",
            f"inline constexpr float kStreamWave = {number(newer['stream']['wave'])};\n",
            "// Of scales, zeros and offsets that are copied first.\n"
            f"inline constexpr float kAlignedRowsStart = {number(newer['aligned_rows']['start'])};\n",
            f"inline constexpr float kAlignedRowsBytes = {number(newer['aligned_rows']['bytes'])};\n",
            constants("kDecode", {name: value for name, value in newer["decode"].items() if name != "tokens"}),
            "// From so many tokens on where matmul_warpgroup is there too: four bits and groups of 128 inputs, or\n"
            "// others.\n"
            f"inline constexpr int64_t kTiledTokens = {newer['tiled']['tokens']};\n"
            f"inline constexpr int64_t kTiledTokensOfSmallGroups = {newer['tiled']['tokens_of_small_groups']};\n",
            of_warpgroups("kWarpgroup", newer["warpgroup"]),
            of_warpgroups("kSplitWarpgroup", newer["split_warpgroup"]),
            of_warpgroups("kTableWarpgroup", newer["table_warpgroup"]),
            of_warpgroups("kSplitTable", newer["split_table"]),
            resident("kResident", newer["resident"]),
            resident("kSplitResident", newer["split_resident"]),
            resident("kEightBitResident", newer["eight_bit_resident"]),
            resident("kEightBitSplitResident", newer["eight_bit_split_resident"]),
            "// Of products by two kernels (matmul_parts.h).\n",
            f"inline constexpr float kPartsJoin = {number(newer['parts']['join'])};\n",
            f"inline constexpr float kPartsGain = {number(newer['parts']['gain'])};\n",
            f"inline constexpr int64_t kPartsTokens = {newer['parts']['tokens']};\n",
            array("warpgroup::ClusterCost", "kResidentClusters", newer["resident"]["clusters"]),
            in_tiles("tiled::Cost", "kTiled", newer["tiled"]["costs"]),
            in_tiles("tiled::Cost", "kTable", newer["table"]),
            in_tiles("tiled::Cost", "kConv", newer["conv"]),
            of_warpgroups("kConvWarpgroup", newer["conv_warpgroup"]),
            f"inline constexpr bands::Costs kBandConv{row(newer['band_conv'].values())};\n",
            in_tiles("mma::Cost", "kMma", older["mma"]),
            "// Of products with experts: rows and experts at which kernels take turns.\n",
            constants("kRagged", newer["ragged"]),
            constants("kTransposed", newer["transposed"]),
            "\n}  // namespace wonly::costs\n",
        ]
    )


if __name__ == "__main__":
    to = Path(sys.argv[1]) / "cuda" / "costs.h"
    to.parent.mkdir(parents=True, exist_ok=True)
    if not to.is_file() or to.read_text() != header():  # what includes it need not be compiled again
        to.write_text(header())
