#include "cuda/ragged_transposed_warpgroup.cuh"
#include "cuda/transposed_float32_operands.cuh"

namespace wonly::transposed_warpgroup {

cudaError_t launch_ragged_f32(const MatmulArgs& args, const ragged::Work& work, int multiprocessors,
                              cudaStream_t stream) {
  Params<Spans> params = make_params<Spans>(args);
  const int* const order = work.row_mode == RowMode::kIds ? ragged::planned_order(work) : nullptr;
  const cudaError_t error = launch_prepare(args, parameter_entries(args, work.experts), {work.m, order, work.repeat},
                                           stream, &params.float32);
  if (error != cudaSuccess) return error;
  params.pieces_apart = 1;
  MatmulArgs dy = args;
  dy.x = args.scratch;
  dy.x_dtype = DType::kF16;
  dy.batch = 2;
  dy.x_batch_stride = static_cast<int64_t>(work.m) * args.n;
  return launch_spans(params, dy, work, multiprocessors, stream,
                      [&](auto&& launch) { return with_float32_shape<Spans, true>(args, work.tile_rows, launch); });
}

}  // namespace wonly::transposed_warpgroup
