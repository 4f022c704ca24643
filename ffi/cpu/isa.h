// Which instruction set the kernels use: the best one of the machine, or the one that JAX_WONLY_CPU_ISA or force_isa()
// names.
#pragma once

#include <string>
#include <vector>

#include "cpu/engine.h"

namespace wonly::cpu {

// Names of the instruction sets that this machine can run, best first.
std::vector<std::string> supported_isas();

// The engine in use. Null, with a message in `error`, when the environment names one that is unknown or not supported
// here.
const Engine* active_engine(std::string& error);

// Uses `name` from now on, or the default again for an empty name. False, with a message in `error`, if that cannot be.
bool force_isa(const std::string& name, std::string& error);

}  // namespace wonly::cpu
