// Python access to the portable bodies of the conversions, for the tests.
#include "dequant/selftest_cpu.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "dequant/selftest.h"

namespace nb = nanobind;

namespace wonly {
namespace {

nb::list conversions() {
  nb::list entries;
  for (const SelftestEntry& entry : kSelftestTable) entries.append(nb::make_tuple(entry.name, entry.outputs));
  return entries;
}

nb::bytes convert_words(int64_t conversion, const nb::bytes& words) {
  if (conversion < 0 || conversion >= kSelftestConversions) {
    throw nb::value_error(
        ("conversion is " + std::to_string(conversion) + "; accepted: 0 to " + std::to_string(kSelftestConversions - 1))
            .c_str());
  }
  if (words.size() % sizeof(uint32_t) != 0) throw nb::value_error("words must be whole 32-bit words");
  const size_t count = words.size() / sizeof(uint32_t);
  const size_t outputs = static_cast<size_t>(selftest_outputs(static_cast<int>(conversion)));
  std::vector<uint32_t> results(count * outputs);
  for (size_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, static_cast<const char*>(words.data()) + i * sizeof word, sizeof word);
    selftest_convert(static_cast<SelftestConversion>(conversion), word, results.data() + i * outputs);
  }
  return nb::bytes(results.data(), results.size() * sizeof(uint32_t));
}

}  // namespace

void register_conversions(nb::module_& m) {
  m.def("conversions", &conversions,
        "(name, 32-bit results of one word) of each fast conversion, in the order of their numbers.");
  m.def("convert_words", &convert_words, nb::arg("conversion"), nb::arg("words"),
        "Runs the portable body of a conversion on 32-bit words given as bytes; returns its results, word after word.");
}

}  // namespace wonly
