// A kernel in PTX, decoded into instructions that a warp executes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

constexpr int kLanes = 32;
using Mask = uint32_t;  // of lanes
constexpr Mask kAllLanes = ~Mask{0};

struct Warp;

// A register is a row of a number for each lane: of 64 bits, or of 32, which hold 16 too. A predicate is a mask.
struct Operand {
  enum Kind : uint8_t { kNothing, kRow32, kRow64, kPredicate };
  Kind kind = kNothing;
  bool constant = false;  // a row of the program, not of the warp
  bool negated = false;   // of predicates
  int32_t at = 0;         // bytes from the first row, or the predicate's number
};

enum class Kind : uint8_t {
  kPlain,     // of the lanes that come to it
  kTogether,  // of all lanes that live, at once: *.sync.aligned
  kMembers,   // of the lanes in the last operand, at once
  kBranch,
  kExit,
};

struct Instruction {
  void (*run)(Warp&, const Instruction&, Mask) = nullptr;
  Kind kind = Kind::kPlain;
  Operand guard;
  std::vector<Operand> operands;  // results first; those in braces and brackets one by one
  int64_t offset = 0;             // from the address
  int64_t number = 0;             // find_opcode's
  int target = 0;                 // of a branch
  std::string text;
};

// Rows that a warp begins with.
struct Special {
  enum Kind { kThread, kThreads, kCta, kCtas, kCluster, kRank, kLane, kParams, kLocal } kind;
  int axis = 0;
  int64_t offset = 0;  // of kParams
  Operand row;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<uint8_t> constants;  // rows
  std::vector<Special> specials;
  std::vector<std::pair<int64_t, int64_t>> params;  // offset and size of each
  int64_t param_bytes = 0;
  int64_t register_bytes = 0;  // of a warp
  int64_t local_bytes = 0;     // of a lane
  int64_t static_shared = 0;   // bytes, before the dynamic shared memory
  int predicates = 0;
  int registers = 0;       // of a thread as a GPU launches it, where warpgroups move them; 0: the text does not say
  bool lacks_one = false;  // an instruction: Fault
};

// An instruction that is not there: the one of this number among those whose name begins so, in every kernel. A
// try_wait succeeds at once.
struct Fault {
  std::string name;
  int number = -1;
};

// Decodes the kernel `name` of a PTX module. Throws std::runtime_error where the text has what is not known.
std::shared_ptr<const Program> decode(const std::string& ptx, const std::string& name, const Fault& fault);

// What an operation does (instructions.cc). A letter for each operand: w and d are rows of 32 and 64 bits, p is a
// predicate, a an address of either size, x anything. Results that are read too are in capitals.
struct Opcode {
  void (*run)(Warp&, const Instruction&, Mask) = nullptr;
  Kind kind = Kind::kPlain;
  std::string results, sources;
  int64_t number = 0;
};

// Of "add.s32" with the numbers of operands in each of its arguments, {1, 1, 1}. Throws where it is not known.
Opcode find_opcode(const std::string& name, const std::vector<int>& arguments);

}  // namespace emulator
