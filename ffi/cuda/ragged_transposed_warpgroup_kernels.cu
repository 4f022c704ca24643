#include "cuda/ragged_transposed_warpgroup.cuh"

namespace wonly::transposed_warpgroup {

cudaError_t launch_ragged(const MatmulArgs& args, const ragged::Work& work, int multiprocessors, cudaStream_t stream) {
  return launch_spans(make_params<Spans>(args), args, work, multiprocessors, stream, [&](auto&& launch) {
    if (!experts_in_registers(args)) return with_shape<Spans>(args, work.tile_rows, launch);
    return with_block(work.tile_rows,
                      [&](auto rows) { return with_register_codes<Spans, 4, rows.value>(args, launch); });
  });
}

}  // namespace wonly::transposed_warpgroup
