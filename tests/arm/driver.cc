// Calls of one engine's kernels for a CPU of another architecture, laid out by test_arm.py: what ffi/cpu/handlers.cc
// does with the operands of a custom call, in one thread and in memory of the caller's.
#include <algorithm>
#include <cstdint>

#include "cpu/engine.h"

namespace {

using namespace wonly;
using namespace wonly::cpu;

struct Call {
  int64_t engine;  // 0: generic, 1: NEON, 2: NEON with products of bytes
  int64_t op;      // 0: product, 1: with transposed weights, 2: quantize, 3: dequantize
  int64_t bits, shift_mode, k, n, groups, rows, activation, quantize_mode;
  int64_t x_type, scale_type, shift_type, y_type;
  uint64_t x, qw, scales, shift, bias, y, memory;  // addresses; memory: zeros
  int64_t planes;                                  // written: rows that ran in fixed point
};

template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

struct Arena {
  uint64_t next;
  template <class T>
  T* take(int64_t count) {
    T* const place = at<T>(next);
    next = (next + static_cast<uint64_t>(count) * sizeof(T) + 63) / 64 * 64;
    return place;
  }
};

void product(Call& call, const Engine& engine, const Weights& weights) {
  const bool transposed = call.op == 1;
  Arena arena{call.memory};
  const Rows x{at<void>(call.x), static_cast<DType>(call.x_type)};
  Weights packing = weights;
  packing.k = transposed ? weights.n : weights.k;
  int64_t runs = 0;
  for (int64_t k = 0; k < packing.tiles_k() * tile_k(packing.bits); k = run_end(packing, k)) ++runs;
  const bool long_runs =
      weights.groups == 1 || (weights.group_size() % tile_k(weights.bits) == 0 && weights.group_size() >= 64);
  const bool fixed = !transposed && engine.planes != nullptr && weights.shift_mode != ShiftMode::kTable && long_runs;
  auto* exponents = arena.take<int16_t>(call.rows * runs);
  auto* lists = arena.take<int32_t>(2 * call.rows);
  int64_t counts[2] = {};  // of rows as float32 and in fixed point
  for (int64_t row = 0; row < call.rows; ++row) {
    const bool as_planes = fixed && engine.planes->exponents(packing, x, row, exponents + row * runs);
    lists[as_planes * call.rows + counts[as_planes]++] = static_cast<int32_t>(row);
  }
  call.planes = counts[1];
  for (int form = 0; form < 2; ++form) {
    if (counts[form] == 0) continue;
    PackedX packed{};
    packed.form = form == 1 ? Form::kPlanes : Form::kF32;
    packed.row_index = lists + form * call.rows;
    packed.repeat = 1;
    packed.exponents = exponents;
    packed.runs = form == 1 ? runs : 0;
    packed.rows = packed.rows_padded = counts[form];
    packed.k_padded = ceil_div(packing.k, 64) * 64;
    const bool direct = !transposed && form == 0 && packed.rows <= engine.direct_rows && weights.whole_groups();
    if (direct) packed.rows_padded = engine.direct_width(packed.rows);
    packed.blocks = direct ? 1 : ceil_div(packed.rows, form == 1 ? engine.planes->rows : engine.panel_rows);
    packed.data = arena.take<float>(packed.rows_padded * packed.row_elements());
    packed.plane_runs = arena.take<PlaneRun>(packed.rows * packed.runs);
    for (int64_t block = 0; block < packed.blocks; ++block)
      (form == 1 ? engine.planes->pack_block : engine.pack_block)(packed, packing, x, block);
    MatmulTask task{};
    task.weights = weights;
    task.x = packed;
    task.block_end = packed.blocks;
    task.bias = {at<void>(call.bias), DType::kF32};
    task.activation = static_cast<Activation>(call.activation);
    task.y = at<void>(call.y);
    task.y_type = static_cast<DType>(call.y_type);
    const auto floats = transposed ? engine.transposed_floats : engine.scratch_floats;
    task.scratch = arena.take<float>(floats(weights, packed.rows));
    const auto kernel = transposed  ? engine.matmul_transposed
                        : form == 1 ? engine.planes->matmul
                        : direct    ? engine.matmul_direct
                                    : engine.matmul_panel;
    const int64_t tiles = transposed ? ceil_div(weights.k, kRunInputs) : weights.tiles_n();
    for (task.tile = 0; task.tile < tiles; ++task.tile) kernel(task);
  }
}

}  // namespace

extern "C" void run(Call* call) {
  Engine engine = call->engine == 0 ? generic_engine() : neon_engine();
  if (call->engine == 2) engine.planes = &neon_dotprod_planes();
  const Weights weights{at<uint32_t>(call->qw),
                        {at<void>(call->scales), static_cast<DType>(call->scale_type)},
                        {at<void>(call->shift), static_cast<DType>(call->shift_type)},
                        static_cast<ShiftMode>(call->shift_mode),
                        static_cast<int>(call->bits),
                        call->k,
                        call->n,
                        call->groups};
  if (call->op < 2) return product(*call, engine, weights);
  Arena arena{call->memory};
  for (int64_t tile = 0; tile < weights.tiles_n(); ++tile) {
    if (call->op == 2) {
      QuantizeTask task{};
      task.w = {at<void>(call->x), static_cast<DType>(call->x_type)};
      task.k = call->k;
      task.n = call->n;
      task.groups = call->groups;
      task.bits = static_cast<int>(call->bits);
      task.mode = static_cast<QuantizeMode>(call->quantize_mode);
      task.tile = tile;
      task.qw = at<uint32_t>(call->qw);
      task.scales = at<void>(call->scales);
      task.scale_type = static_cast<DType>(call->scale_type);
      task.shift = at<void>(call->shift);
      task.shift_type = static_cast<DType>(call->shift_type);
      engine.quantize(task);
    } else {
      DequantizeTask task{};
      task.weights = weights;
      task.tile = tile;
      task.k_end = call->k;
      task.w = at<void>(call->y);
      task.w_type = static_cast<DType>(call->y_type);
      task.scratch = at<float>(arena.next);
      engine.dequantize(task);
    }
  }
}

int main() { return 0; }  // what C libraries start; run() is what is called
