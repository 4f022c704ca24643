// Adds the functions that test the conversions to the Python module `_cpu`.
#pragma once

#include <nanobind/nanobind.h>

namespace wonly {

void register_conversions(nanobind::module_& m);

}  // namespace wonly
