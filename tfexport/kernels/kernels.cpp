// Operators of ONNX Runtime's CPU provider for the functions of the dialect `ort`. The definitions in a graph define the
// result of each function. A session with this library uses the operators instead of the definitions.
//
// All operators are compiled for each target, an instruction set. The best one of the running CPU is chosen when the operators are
// registered, or the one that the environment variable TFEXPORT_ISA names.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

#include "beams.h"
#include "runtime.h"

#define INLINED inline __attribute__((always_inline))

// The targets of this processor, the best first. The compiler may not fuse multiplications and additions by itself: setup.py.
#if defined(__x86_64__)

#define TARGET avx512_vnni
#define TARGET_FLAGS "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
#define TARGET_HAS_PRODUCTS 1
#define TARGET_AVX512
#define TARGET_VNNI
#include "operators.h"
#undef TARGET_VNNI

#define TARGET avx512
#define TARGET_FLAGS "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"
#define TARGET_HAS_PRODUCTS 1
#include "operators.h"
#undef TARGET_AVX512

#define TARGET avx_vnni
#define TARGET_FLAGS "avx2,fma,avxvnni"
#define TARGET_HAS_PRODUCTS 1
#define TARGET_AVX2
#define TARGET_VNNI
#include "operators.h"
#undef TARGET_VNNI

#define TARGET avx2
#define TARGET_FLAGS "avx2,fma"
#define TARGET_HAS_PRODUCTS 1
#include "operators.h"
#undef TARGET_AVX2

#define TARGET sse2
#define TARGET_FLAGS "sse2"
#define TARGET_HAS_PRODUCTS 0
#include "operators.h"

#elif defined(__aarch64__)

#define TARGET_NEON

#define TARGET i8mm
#define TARGET_FLAGS "arch=armv8.2-a+dotprod+i8mm"
#define TARGET_HAS_PRODUCTS 1
#define TARGET_DOTPROD
#define TARGET_I8MM
#include "operators.h"
#undef TARGET_I8MM

#define TARGET dotprod
#define TARGET_FLAGS "arch=armv8.2-a+dotprod"
#define TARGET_HAS_PRODUCTS 1
#include "operators.h"
#undef TARGET_DOTPROD

#define TARGET neon
#define TARGET_FLAGS "arch=armv8-a"
#define TARGET_HAS_PRODUCTS 1
#include "operators.h"

#else
#error "there are kernels for x86-64 and 64-bit ARM alone"
#endif

using namespace tfexport;

namespace {

constexpr int kBundleFormat = 6;  // of the bundles whose functions these are

struct Target {
  const char* name;  // in the environment
  const char* instruction_sets;
  bool has_products;
  bool is_supported;  // by this CPU
  OrtStatus* (*add_operators)(const OrtApi*, OrtCustomOpDomain*);
};

#if defined(__aarch64__)

bool has_feature([[maybe_unused]] unsigned long bit, [[maybe_unused]] bool in_second, [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return getauxval(in_second ? AT_HWCAP2 : AT_HWCAP) & bit;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
#else
  return false;
#endif
}

#endif

const std::vector<Target>& targets() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool has_avx_vnni = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);  // compilers know the name since GCC 13
  }();
  static const std::vector<Target> all = {
      {"avx512_vnni", "AVX-512,AVX-512 VNNI", true, has_avx512 && __builtin_cpu_supports("avx512vnni"),
       avx512_vnni::add_operators},
      // Before AVX-512 without VNNI: its registers are half as wide, but one instruction does the work of three.
      {"avx_vnni", "AVX2,FMA,AVX-VNNI", true, has_avx2 && has_avx_vnni, avx_vnni::add_operators},
      {"avx512", "AVX-512", true, has_avx512, avx512::add_operators},
      {"avx2", "AVX2,FMA", true, has_avx2, avx2::add_operators},
      {"sse2", "SSE2", false, true, sse2::add_operators},
  };
#else
  static const bool has_dotprod = has_feature(1ul << 20, false, "hw.optional.arm.FEAT_DotProd");
  static const bool has_i8mm = has_feature(1ul << 13, true, "hw.optional.arm.FEAT_I8MM");
  static const std::vector<Target> all = {
      {"i8mm", "NEON,dot products,i8mm", true, has_dotprod && has_i8mm, i8mm::add_operators},
      {"dotprod", "NEON,dot products", true, has_dotprod, dotprod::add_operators},
      {"neon", "NEON", true, true, neon::add_operators},
  };
#endif
  return all;
}

// The target that the environment names, or else the best one of this CPU. `kernels/__init__.py` refuses names of others.
const Target& chosen() {
  const char* const name = std::getenv("TFEXPORT_ISA");
  const Target* best = nullptr;
  for (const Target& target : targets()) {
    if (!target.is_supported) continue;
    if (name != nullptr && std::strcmp(name, target.name) == 0) return target;
    if (best == nullptr) best = &target;
  }
  return *best;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int tfexport_bundle_format() { return kBundleFormat; }

EXPORTED int tfexport_has_products() { return chosen().has_products; }

// The instruction sets that the operators use on this CPU, for `tfexport version`.
EXPORTED const char* tfexport_instruction_sets() { return chosen().instruction_sets; }

// The values of TFEXPORT_ISA that this CPU supports, the best first.
EXPORTED const char* tfexport_targets() {
  static const std::string names = [] {
    std::string list;
    for (const Target& target : targets()) {
      if (target.is_supported) list += (list.empty() ? "" : ",") + std::string(target.name);
    }
    return list;
  }();
  return names.c_str();
}

EXPORTED void tfexport_begin_beams(const Beams* beams) { see_next_slots(*beams); }

// Returns whether the caller decides about the next step; -1 if there is not enough memory.
EXPORTED int tfexport_advance_beams(const Beams* beams, int64_t step, int is_last) {
  try {
    return advance(*beams, step, is_last != 0);
  } catch (const std::exception&) {  // no exception may leave a function that C calls
    return -1;
  }
}

EXPORTED OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kVersion);
  if (api == nullptr) return call(base->GetApi(1), kCreateStatus, 1, "ONNX Runtime is older than 1.24");
  const Target& target = chosen();
  // One domain for each target, made once: sessions keep its address.
  static std::vector<OrtCustomOpDomain*> domains(targets().size());
  static std::mutex making;
  const std::lock_guard<std::mutex> lock(making);
  OrtCustomOpDomain*& domain = domains[&target - targets().data()];
  if (domain == nullptr) {
    OrtCustomOpDomain* made = nullptr;
    OrtStatus* failed = call(api, kCreateCustomOpDomain, "tfexport", &made);
    if (!failed) failed = target.add_operators(api, made);
    if (failed) return failed;
    domain = made;
  }
  return call(api, kAddCustomOpDomain, options, domain);
}
