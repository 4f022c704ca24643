// The `_cpu` module: the CPU's custom-call targets and the choice of instruction set.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu/handlers.h"
#include "cpu/isa.h"
#include "dequant/selftest_cpu.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule_of(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

nb::dict registrations() {
  nb::dict targets;
  targets["wonly_matmul_v1"] = capsule_of(wonly::cpu::matmul_handler);
  targets["wonly_ragged_matmul_v1"] = capsule_of(wonly::cpu::ragged_matmul_handler);
  targets["wonly_matmul_transposed_v1"] = capsule_of(wonly::cpu::matmul_transposed_handler);
  targets["wonly_ragged_matmul_transposed_v1"] = capsule_of(wonly::cpu::ragged_matmul_transposed_handler);
  targets["wonly_quantize_v1"] = capsule_of(wonly::cpu::quantize_handler);
  targets["wonly_dequantize_v1"] = capsule_of(wonly::cpu::dequantize_handler);
  return targets;
}

std::string active_isa() {
  std::string error;
  const wonly::cpu::Engine* engine = wonly::cpu::active_engine(error);
  if (engine == nullptr) throw nb::value_error(error.c_str());
  return engine->name;
}

void force_isa(const std::string& name) {
  std::string error;
  if (!wonly::cpu::force_isa(name, error)) throw nb::value_error(error.c_str());
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("registrations", &registrations, "Capsules of the CPU handlers by custom-call target name.");
  m.def(
      "ffi_api_version", [] { return std::make_pair(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers this module was built with.");
  m.def("isas", &wonly::cpu::supported_isas, "Instruction sets this machine can run, best first.");
  m.def("active_isa", &active_isa,
        "The instruction set in use. ValueError if JAX_WONLY_CPU_ISA names one that is unknown or not supported here.");
  m.def("force_isa", &force_isa, nb::arg("name"),
        "Use this instruction set from now on; '' restores the default. For tests.");
  wonly::register_conversions(m);
}
