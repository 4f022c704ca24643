"""Writes the files beside it with the formats' own libraries: gguf and mlx.

Run it as ``python write.py``; what is written depends on nothing but the versions of the two.
"""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # what gguf quantizes itself
BLOCKS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}


def main() -> None:
    rng = np.random.default_rng(20261121)
    expected = {}

    writer = gguf.GGUFWriter(HERE / "written.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list(["<s>", "a", "é"])
    for kind in (*QUANTIZED, *BLOCKS):
        of = gguf.GGMLQuantizationType[kind]
        if kind in QUANTIZED:
            blocks = gguf.quants.quantize(rng.normal(0.1, 1, (2, 256)).astype(np.float32), of)
        else:
            size, halves = BLOCKS[kind]
            blocks = rng.integers(0, 256, (2, size), dtype=np.uint8)
            for start in halves:
                blocks[:, start : start + 2] = rng.uniform(-0.1, 0.1, (2, 1)).astype("<f2").view(np.uint8)
        writer.add_tensor(f"{kind}.weight", blocks, raw_dtype=of)
        expected[f"written.gguf:{kind}.weight"] = gguf.quants.dequantize(blocks, of).T
    norm = rng.normal(size=5).astype(np.float32)
    writer.add_tensor("norm.weight", norm)
    expected["written.gguf:norm.weight"] = norm
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    w = mx.array(rng.normal(0.1, 1, (8, 128)).astype(np.float16))
    weight, scales, biases = mx.quantize(w, group_size=64, bits=4)
    arrays = {"up.weight": weight, "up.scales": scales, "up.biases": biases, "norm.weight": scales[0]}
    mx.save_safetensors(str(HERE / "written.safetensors"), arrays)
    # In float32 the product is exact, so that there is one rounding.
    dense = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=64, bits=4)
    expected["written.safetensors:up.weight"] = np.array(dense).T
    expected["written.safetensors:norm.weight"] = np.array(scales[0].astype(mx.float32))
    np.savez_compressed(HERE / "expected.npz", **expected)


if __name__ == "__main__":
    main()
