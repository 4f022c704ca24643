#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>

#if defined(WONLY_CPU_X86)
#include <cpuid.h>
#elif defined(WONLY_CPU_ARM) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace wonly::cpu {
namespace {

struct Candidate {
  const Engine* engine;
  bool supported;
};

#if defined(WONLY_CPU_X86) || defined(WONLY_CPU_ARM)
Engine extended(const char* name, const Engine& engine, const PlanesKernels* planes, const PairsKernels* pairs) {
  Engine all = engine;
  all.name = name;
  all.planes = planes;
  all.pairs = pairs;
  return all;
}
#endif

#if defined(WONLY_CPU_X86)
// Not all compilers have a name for it.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#elif defined(WONLY_CPU_ARM)
bool has_dotprod() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#else
  return true;  // all that Apple made for computers
#endif
}
#endif

std::vector<Candidate> candidates() {
  std::vector<Candidate> all;
#if defined(WONLY_CPU_ARM)
  static const Engine dotprod_engine = extended("neon_dotprod", neon_engine(), &neon_dotprod_planes(), nullptr);
  all.push_back({&dotprod_engine, has_dotprod()});
  all.push_back({&neon_engine(), true});
#endif
#if defined(WONLY_CPU_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  static const Engine vnni_engine = extended("avx512_vnni", avx512_engine(), &avx512_vnni_planes(), nullptr);
  static const Engine bf16_engine =
      extended("avx512_bf16", avx512_engine(), &avx512_vnni_planes(), &avx512_bf16_pairs());
  // vdpbf16ps does twice the work of an FMA on AMD (measured on Zen 5) but half of it on Intel (measured on Sapphire
  // Rapids), where the kernels without it are the better default.
  const Candidate pairs{&bf16_engine, bf16};
  if (__builtin_cpu_is("amd")) all.push_back(pairs);
  all.push_back({&vnni_engine, vnni});
  all.push_back({&avx512_engine(), avx512});
  if (!__builtin_cpu_is("amd")) all.push_back(pairs);
  static const Engine avx2_vnni_engine = extended("avx2_vnni", avx2_engine(), &avx2_vnni_planes(), nullptr);
  all.push_back({&avx2_vnni_engine, avx2 && has_avx_vnni()});
  all.push_back({&avx2_engine(), avx2});
#endif
  all.push_back({&generic_engine(), true});
  return all;
}

const Engine* find(const std::string& name, const std::string& source, std::string& error) {
  bool known = false;
  for (const Candidate& candidate : candidates()) {
    if (name != candidate.engine->name) continue;
    if (candidate.supported) return candidate.engine;
    known = true;
  }
  error = source + " = '" + name + "' is " +
          (known ? "not supported by this CPU" : "not an instruction set of this build") + "; accepted here:";
  for (const std::string& isa : supported_isas()) error += " " + isa;
  return nullptr;
}

std::atomic<const Engine*> forced{nullptr};

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates())
    if (candidate.supported) names.emplace_back(candidate.engine->name);
  return names;
}

const Engine* active_engine(std::string& error) {
  if (const Engine* engine = forced.load(std::memory_order_acquire)) return engine;
  struct Choice {
    const Engine* engine = nullptr;
    std::string error;
    Choice() {
      const char* name = std::getenv("JAX_WONLY_CPU_ISA");
      engine = find(name != nullptr && *name != '\0' ? std::string(name) : supported_isas().front(),
                    "JAX_WONLY_CPU_ISA", error);
    }
  };
  static const Choice choice;  // the environment is read once
  error = choice.error;
  return choice.engine;
}

bool force_isa(const std::string& name, std::string& error) {
  const Engine* engine = name.empty() ? nullptr : find(name, "isa", error);
  if (!name.empty() && engine == nullptr) return false;
  forced.store(engine, std::memory_order_release);
  return true;
}

}  // namespace wonly::cpu
