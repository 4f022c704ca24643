// The Python module `_emulated`: the handlers of `_cuda` for XLA's CPU, where arrays are what kernels read and write.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <xla/ffi/api/ffi.h>

#include <array>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "machine.h"

namespace xla::ffi {

// There is no stream on a CPU, and the runtime here does not look at it.
template <>
struct CtxDecoding<PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  template <typename Context>  // whose name depends on the version
  static std::optional<Type> Decode(const XLA_FFI_Api*, Context*, DiagnosticEngine&) {
    return cudaStream_t{};
  }
};

}  // namespace xla::ffi

#include "bindings_cuda.cc"

namespace emulator {
namespace {

constexpr int kMostHandlers = 32;
std::array<XLA_FFI_Handler*, kMostHandlers> handlers;
std::mutex one_at_a_time;

XLA_FFI_Error* call_on_machine(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return handler(frame);  // a question about the handler
  const std::lock_guard lock(one_at_a_time);
  Machine& machine = Machine::the();
  machine.forbid_all();
  const auto allow = [&](void* buffer, bool result) {
    const auto* const b = static_cast<const XLA_FFI_Buffer*>(buffer);
    int64_t bytes = static_cast<int64_t>(wonly::ffi::ByteWidth(static_cast<wonly::ffi::DataType>(b->dtype)));
    for (int64_t d = 0; d < b->rank; ++d) bytes *= b->dims[d];
    machine.allow(b->data, bytes);
    if (result && bytes > 0) std::memset(b->data, 0xff, static_cast<size_t>(bytes));  // what is not written shows
  };
  for (int64_t i = 0; i < frame->args.size; ++i) allow(frame->args.args[i], false);
  for (int64_t i = 0; i < frame->rets.size; ++i) allow(frame->rets.rets[i], true);
  try {
    if (XLA_FFI_Error* const error = handler(frame); error != nullptr) return error;
    machine.run();
  } catch (const std::exception& error) {
    XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, error.what(),
                                   XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&args);
  }
  return nullptr;
}

template <int kIndex>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
  return call_on_machine(handlers[kIndex], frame);
}
template <int... kIndex>
constexpr std::array<XLA_FFI_Handler*, sizeof...(kIndex)> calls_of(std::integer_sequence<int, kIndex...>) {
  return {&call<kIndex>...};
}

nb::dict registrations() {
  static constexpr auto kCalls = calls_of(std::make_integer_sequence<int, kMostHandlers>());
  nb::dict targets;
  size_t count = 0;
  for (const auto& [name, handler] : wonly::registrations()) {
    if (count == kMostHandlers) throw std::length_error("more handlers than the emulator has calls for");
    handlers[count] = reinterpret_cast<XLA_FFI_Handler*>(nb::cast<nb::capsule>(handler).data());
    targets[name] = wonly::capsule(kCalls[count++]);
  }
  return targets;
}

// One kernel of a PTX module, with numbers as its arguments, of which addresses are those of `arrays` (address, bytes).
void run_ptx(const std::string& ptx, const std::string& name, std::vector<uint32_t> grid, uint32_t threads,
             uint32_t cluster, int64_t shared_bytes, const std::vector<uint64_t>& arguments,
             const std::vector<std::pair<uint64_t, int64_t>>& arrays) {
  const std::lock_guard lock(one_at_a_time);
  Machine& machine = Machine::the();
  machine.forbid_all();
  for (const auto& [address, bytes] : arrays) machine.allow(reinterpret_cast<const void*>(address), bytes);
  grid.resize(3, 1);
  Launch launch(decode(ptx, name, {}), {grid[0], grid[1], grid[2]}, {threads, 1, 1}, {cluster, 1, 1}, shared_bytes);
  for (size_t i = 0; i < launch.program->params.size(); ++i) launch.set_argument(i, &arguments.at(i));
  machine.enqueue(std::move(launch));
  machine.run();
}

}  // namespace
}  // namespace emulator

NB_MODULE(_emulated, m) {
  using emulator::Machine;
  m.doc() = "The CUDA kernels of jax_wonly on a CPU, interpreted, as XLA FFI handlers for the platform cpu.";
  m.def("registrations", &emulator::registrations, "Custom-call targets and their handlers, as capsules.");
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); }, "As of _cuda.");
  m.def("set_gpu", &Machine::set_gpu, nb::arg("multiprocessors") = Machine::gpu.multiprocessors,
        nb::arg("shared_bytes") = Machine::gpu.bytes_of_cta,
        "Multiprocessors, and shared memory that a CTA may have; an H100's unless said otherwise.");
  m.def("set_seed", [](uint64_t seed) { Machine::the().seed = seed; }, "Of the order in which things happen.");
  m.def(
      "watch_races", [](bool watch) { Machine::the().watches_races = watch; },
      "Whether kernels stop at accesses of shared memory that nothing orders.");
  m.def(
      "leave_out", [](std::string name, int number) { Machine::the().fault = {std::move(name), number}; },
      "From now on kernels lack the instruction of this number among those whose name begins so; -1: none.");
  m.def("run_ptx", &emulator::run_ptx, "ptx, name, grid, threads, cluster, shared, arguments, arrays");
  m.def(
      "counts",
      [] { return nb::make_tuple(Machine::the().kernels, Machine::the().instructions, Machine::the().faulty_kernels); },
      "Kernels that have run, instructions of warps, and kernels that were decoded without an instruction.");
}
