#include "program.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace emulator {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("emulator: " + what); }

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\n");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

// At commas that stand in no brackets.
std::vector<std::string> split(const std::string& text, char at = ',') {
  std::vector<std::string> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == at && depth == 0)) {
      if (std::string part = trimmed(text.substr(begin, i - begin)); !part.empty()) parts.push_back(part);
      begin = i + 1;
    } else if (std::strchr("([{", text[i])) {
      ++depth;
    } else if (std::strchr(")]}", text[i])) {
      --depth;
    }
  }
  return parts;
}

// Where the bracket at `open` closes.
size_t closing(const std::string& text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (std::strchr("({", text[i])) ++depth;
    if (std::strchr(")}", text[i]) && --depth == 0) return i;
  }
  fail("a bracket is open");
}

std::string without_comments(const std::string& ptx) {
  std::string text;
  text.reserve(ptx.size());
  for (size_t i = 0; i < ptx.size(); ++i) {
    if (ptx.compare(i, 2, "//") == 0) i = std::min(ptx.find('\n', i), ptx.size() - 1);
    text += ptx[i];
  }
  return text;
}

struct Scope {
  int parent = -1;
  std::map<std::string, int> registers;       // declared name -> variable
  std::map<std::string, int> labels;          // -> instruction
  std::map<std::string, std::string> params;  // of a function's -> the caller's
};

class Decoder {
 public:
  Decoder(const std::string& ptx, const std::string& name, const Fault& fault)
      : text_(without_comments(ptx)), fault_(fault) {
    program_.name = name;
  }

  Program run() {
    scopes_.emplace_back();
    declare_shared(module_declarations());
    const auto [head, bounds, body] = definition(program_.name);
    program_.registers = launched_registers(bounds);
    for (const std::string& param : parameters(head)) declare_param(param);
    block(body, 0, -1);
    emit_exit();
    for (const auto& [at, scope, label] : jumps_) program_.code[at].target = find_label(scope, label);
    allocate();
    return std::move(program_);
  }

 private:
  struct Note {
    int results = 0;
    bool read_too = false;  // results are what they were and more
  };
  struct Jump {
    size_t at;
    int scope;
    std::string label;
  };

  // --- Text

  // Everything outside of functions.
  std::string module_declarations() const {
    std::string outside;
    int depth = 0;
    for (const char c : text_) {
      if (c == '{') ++depth;
      if (depth == 0) outside += c;
      if (c == '}') --depth;
    }
    return outside;
  }

  // The head, which ends with the list of parameters, what stands between it and the body, and the body of a function.
  struct Definition {
    std::string head, bounds, body;
  };
  Definition definition(const std::string& name) const {
    for (size_t at = text_.find(name); at != std::string::npos; at = text_.find(name, at + 1)) {
      const size_t end = at + name.size();
      if (is_name(text_[at - 1]) || is_name(text_[end])) continue;
      const size_t line = text_.rfind('\n', at) + 1;
      const std::string_view before(text_.data() + line, at - line);
      if (before.find(".entry") == before.npos && before.find(".func") == before.npos) continue;
      const size_t open = text_.find_first_of("({;", end);
      if (open == std::string::npos || text_[open] != '(') continue;
      const size_t close = closing(text_, open), next = text_.find_first_of("{;", close);
      if (next == std::string::npos || text_[next] == ';') continue;
      return {text_.substr(line, close + 1 - line), text_.substr(close + 1, next - close - 1),
              text_.substr(next + 1, closing(text_, next) - next - 1)};
    }
    fail("no function " + name);
  }

  // The registers of a thread that a kernel is launched with which asks for others: as many as its bounds allow, whole
  // eights. 0 where there are none.
  static int launched_registers(const std::string& bounds) {
    constexpr int kOfMultiprocessor = 64 << 10;
    const auto bound = [&](const std::string& name) {
      const size_t at = bounds.find(name);
      return at == std::string::npos ? 0 : std::stoi(bounds.substr(at + name.size()));
    };
    const int threads = bound(".maxntid"), ctas = std::max(bound(".minnctapersm"), 1);
    return threads == 0 ? 0 : kOfMultiprocessor / (threads * ctas) / 8 * 8;
  }

  // What is in the last round brackets of a head.
  static std::vector<std::string> parameters(const std::string& head) {
    const size_t open = head.rfind('(');
    return split(head.substr(open + 1, head.size() - open - 2));
  }

  static std::vector<std::string> words(const std::string& text) {
    std::istringstream stream(text);
    return {std::istream_iterator<std::string>(stream), {}};
  }

  static int64_t size_of(const std::string& type) {  // ".b32"
    return std::stoll(type.substr(type.find_first_of("0123456789"))) / 8;
  }

  // "name[bytes]" with its type and alignment: .shared .align 4 .b8 name[8]
  struct Array {
    std::string name;
    int64_t bytes = 0, align = 1;
  };
  static Array array_of(const std::string& text) {
    Array array;
    int64_t element = 1;
    const std::vector<std::string> all = words(text);
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i] == ".align") {
        array.align = std::stoll(all[++i]);
      } else if (all[i][0] != '.') {
        const size_t open = all[i].find('[');
        array.name = all[i].substr(0, open);
        const std::string count = open == std::string::npos ? "1" : all[i].substr(open + 1);
        array.bytes = element * (count[0] == ']' ? 0 : std::stoll(count));
      } else if (std::isdigit(static_cast<unsigned char>(all[i].back()))) {
        element = size_of(all[i]);
        array.align = std::max(array.align, element);
      }
    }
    return array;
  }

  // --- Declarations

  void declare_shared(const std::string& declarations) {
    for (const std::string& statement : split(declarations, ';')) {
      const std::vector<std::string> all = words(statement);
      const auto shared = std::find(all.begin(), all.end(), ".shared");
      if (shared == all.end()) continue;
      const Array array = array_of(statement);
      if (std::find(all.begin(), all.end(), ".extern") != all.end()) {
        dynamic_shared_.insert(array.name);
        dynamic_align_ = std::max(dynamic_align_, array.align);
      } else {
        place_shared(array);
      }
    }
  }

  void place_shared(const Array& array) {
    program_.static_shared = (program_.static_shared + array.align - 1) / array.align * array.align;
    shared_[array.name] = program_.static_shared;
    program_.static_shared += array.bytes;
  }

  void place_local(const Array& array, const std::string& name) {
    locals_[name] = program_.local_bytes;
    program_.local_bytes += (array.bytes + 15) / 16 * 16;
  }

  void declare_param(const std::string& text) {
    const Array array = array_of(text);
    const int64_t at = (program_.param_bytes + array.align - 1) / array.align * array.align;
    params_[array.name] = at;
    program_.params.push_back({at, array.bytes});
    program_.param_bytes = at + array.bytes;
  }

  void declare_registers(const std::string& statement, int scope) {  // .reg .b32 %r<5>   .reg .pred p, q
    const size_t type_end = statement.find_first_of(" \t", statement.find('.', 1));
    const std::string type = trimmed(statement.substr(4, type_end - 4));
    const Operand::Kind kind = type == ".pred"      ? Operand::kPredicate
                               : size_of(type) == 8 ? Operand::kRow64
                                                    : Operand::kRow32;
    for (const std::string& name : split(statement.substr(type_end))) {
      const size_t count = name.find('<');
      if (count == std::string::npos) {
        scopes_[scope].registers[name] = new_variable(kind);
        continue;
      }
      for (int i = 0; i < std::stoi(name.substr(count + 1)); ++i) {
        scopes_[scope].registers[name.substr(0, count) + std::to_string(i)] = new_variable(kind);
      }
    }
  }

  int new_variable(Operand::Kind kind) {
    variables_.push_back(kind);
    return static_cast<int>(variables_.size()) - 1;
  }

  // --- Statements

  // `end_label` is where `ret` goes to, or -1 in the kernel itself.
  void block(const std::string& text, int scope, int end_label) {
    for (size_t i = 0; i < text.size();) {
      if (std::isspace(static_cast<unsigned char>(text[i])) || text[i] == ';') {
        ++i;
      } else if (text[i] == '{') {
        const size_t end = closing(text, i);
        block(text.substr(i + 1, end - i - 1), new_scope(scope), end_label);
        i = end + 1;
      } else {
        size_t end = i;
        while (end < text.size() && is_name(text[end])) ++end;
        if (end < text.size() && text[end] == ':' && text[end + 1] != ':') {
          scopes_[scope].labels[text.substr(i, end - i)] = static_cast<int>(program_.code.size());
          i = end + 1;
          continue;
        }
        end = std::min(text.find(';', i), text.size());
        statement(trimmed(text.substr(i, end - i)), scope, end_label);
        i = end + 1;
      }
    }
  }

  int new_scope(int parent) {
    scopes_.emplace_back();
    scopes_.back().parent = parent;
    return static_cast<int>(scopes_.size()) - 1;
  }

  void statement(const std::string& text, int scope, int end_label) {
    try {
      read_statement(text, scope, end_label);
    } catch (const std::exception& error) {
      fail(std::string(error.what()) + "\n  in " + text.substr(0, 200));
    }
  }

  void read_statement(std::string text, int scope, int end_label) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    std::replace(text.begin(), text.end(), '\t', ' ');
    if (text.starts_with(".reg")) return declare_registers(text, scope);
    if (text.starts_with(".shared")) return place_shared(array_of(text));
    if (text.starts_with(".local") || text.starts_with(".param")) {
      const Array array = array_of(text);
      return place_local(array, text[1] == 'l' ? array.name : passed_name(array.name, scope));
    }
    if (text[0] == '.') return;  // .pragma, .loc
    Instruction instruction;
    instruction.text = text;
    if (text[0] == '@') {
      const size_t end = text.find(' ');
      instruction.guard = source(text.substr(1, end - 1), 'p', scope);
      text = trimmed(text.substr(end));
    }
    const size_t name_end = std::min(text.find(' '), text.size());
    const std::string name = text.substr(0, name_end), rest = trimmed(text.substr(name_end));
    if (fault_.number >= 0 && name.starts_with(fault_.name) && left_out_++ == fault_.number) {
      program_.lacks_one = true;
      if (name.find("try_wait") != name.npos) statement("mov.pred " + split(rest)[0] + ", 1", scope, end_label);
      return;
    }
    if (name == "call.uni" || name == "call") return call(rest, scope);
    if (name == "bra" || name == "bra.uni") {
      instruction.kind = Kind::kBranch;
      jumps_.push_back({program_.code.size(), scope, rest});
    } else if (name == "ret" && end_label >= 0) {
      instruction.kind = Kind::kBranch;
      jumps_.push_back({program_.code.size(), end_label, "end"});
    } else if (name == "ret" || name == "exit") {
      instruction.kind = Kind::kExit;
    } else if (name.starts_with("ld.param") || name.starts_with("st.param")) {
      if (!pass(name, rest, scope, instruction)) operation(name, rest, scope, instruction);
    } else {
      operation(name, rest, scope, instruction);
    }
    const Operand guard = instruction.guard;
    program_.code.push_back(std::move(instruction));
    if (const std::string widened = std::move(widened_); !widened.empty()) {
      widened_.clear();
      Instruction widen;
      widen.guard = guard;
      widen.text = "the rest of " + text;
      const bool is_signed = name.rfind(".s") == name.rfind('.');
      operation(is_signed ? "cvt.s64.s32" : "cvt.u64.u32", widened, scope, widen);
      program_.code.push_back(std::move(widen));
    }
  }

  void emit_exit() {
    Instruction exit;
    exit.kind = Kind::kExit;
    exit.text = "the end";
    program_.code.push_back(std::move(exit));
  }

  // (results), name, (arguments): the function's body, in its place.
  void call(const std::string& rest, int scope) {
    const std::vector<std::string> parts = split(rest);
    const auto list = [](const std::string& text) { return split(text.substr(1, text.size() - 2)); };
    std::vector<std::string> results, arguments;
    size_t at = 0;
    if (parts[at][0] == '(') results = list(parts[at++]);
    const std::string name = parts[at++];
    if (at < parts.size()) arguments = list(parts[at]);
    const auto [head, bounds, body] = definition(name);
    const int inner = new_scope(-1);
    std::vector<std::string> formal = parameters(head);
    if (!results.empty()) {  // named in the brackets before the function's name
      const size_t open = head.find('(');
      for (const std::string& result : split(head.substr(open + 1, closing(head, open) - open - 1))) {
        formal.push_back(result);
      }
      arguments.insert(arguments.end(), results.begin(), results.end());
    }
    if (formal.size() != arguments.size()) fail("arguments of " + name);
    for (size_t i = 0; i < formal.size(); ++i) {
      scopes_[inner].params[array_of(formal[i]).name] = passed_name(arguments[i], scope);
    }
    block(body, inner, inner);
    scopes_[inner].labels["end"] = static_cast<int>(program_.code.size());
  }

  // Of a `.param` that is declared around a call: of the scope, for names repeat.
  std::string passed_name(const std::string& name, int scope) const {
    for (int s = scope; s >= 0; s = scopes_[s].parent) {
      if (const auto found = scopes_[s].params.find(name); found != scopes_[s].params.end()) return found->second;
    }
    return name + "@" + std::to_string(scope);
  }

  // Arguments and results of functions are in local memory. False where the parameter is the kernel's.
  bool pass(const std::string& name, const std::string& rest, int scope, Instruction& instruction) {
    const size_t open = rest.find('['), close = rest.find_first_of("+]", open);
    const std::string passed = passed_name(rest.substr(open + 1, close - open - 1), scope);
    if (locals_.count(passed) == 0) return false;
    operation(name.substr(0, 2) + ".local" + name.substr(8), rest.substr(0, open + 1) + passed + rest.substr(close),
              scope, instruction);
    return true;
  }

  static int64_t offset_of(const std::string& inside) {
    const size_t plus = inside.find('+');
    return plus == std::string::npos ? 0 : std::stoll(inside.substr(plus + 1));
  }

  void operation(const std::string& name, const std::string& rest, int scope, Instruction& instruction) {
    std::vector<int> counts;
    std::vector<std::string> flat;
    for (const std::string& argument : split(rest)) {
      const size_t before = flat.size();
      flatten(argument, flat, instruction);
      counts.push_back(static_cast<int>(flat.size() - before));
    }
    const Opcode opcode = find_opcode(name, counts);
    const std::string letters = opcode.results + opcode.sources;
    if (letters.size() != flat.size()) fail("operands of " + instruction.text);
    instruction.run = opcode.run;
    instruction.kind = opcode.kind;
    instruction.number = opcode.number;
    if (name.starts_with("cvt.") || name.starts_with("st.")) {  // of a wider register the low bits are meant
      for (size_t i = opcode.results.size(); i < flat.size(); ++i) {
        if (letters[i] == 'w' && is_wide(flat[i], scope)) flat[i] = low_half(flat[i], scope);
      }
    }
    if (name.starts_with("ld.") && opcode.results == "w" && is_wide(flat[0], scope)) {  // the number is extended to it
      const std::string low = low_name(flat[0], scope);
      widened_ = flat[0] + ", " + low;
      flat[0] = low;
    }
    bool read_too = false;
    for (size_t i = 0; i < flat.size(); ++i) {
      const bool capital = std::isupper(static_cast<unsigned char>(letters[i]));
      read_too |= capital;
      instruction.operands.push_back(source(flat[i], static_cast<char>(std::tolower(letters[i])), scope));
    }
    notes_.resize(program_.code.size() + 1);
    notes_.back() = {static_cast<int>(opcode.results.size()), read_too};
  }

  std::string low_name(const std::string& name, int scope) {
    const std::string low = name + "'s low half";
    if (find_register(low, scope) < 0) scopes_[scope].registers[low] = new_variable(Operand::kRow32);
    return low;
  }

  std::string low_half(const std::string& name, int scope) {
    const std::string low = low_name(name, scope);
    Instruction instruction;
    instruction.text = "cvt.u32.u64 of " + name;
    operation("cvt.u32.u64", low + ", " + name, scope, instruction);
    program_.code.push_back(std::move(instruction));
    return low;
  }

  void flatten(const std::string& argument, std::vector<std::string>& flat, Instruction& instruction) {
    if (argument[0] == '{' || argument[0] == '[') {
      for (const std::string& part : split(argument.substr(1, argument.size() - 2))) {
        if (argument[0] == '[' && part[0] != '{') {
          if (const int64_t offset = offset_of(part); offset != 0) instruction.offset = offset;
          flat.push_back(trimmed(part.substr(0, part.find('+'))));
        } else {
          flatten(part, flat, instruction);
        }
      }
    } else if (argument.find('|') != std::string::npos) {
      for (const std::string& part : split(argument, '|')) flat.push_back(part);
    } else {
      flat.push_back(argument);
    }
  }

  // --- Operands

  int find_register(const std::string& name, int scope) const {
    for (int s = scope; s >= 0; s = scopes_[s].parent) {
      if (const auto found = scopes_[s].registers.find(name); found != scopes_[s].registers.end()) return found->second;
    }
    return -1;
  }
  bool is_wide(const std::string& name, int scope) const {
    const int variable = find_register(name, scope);
    return variable >= 0 && variables_[variable] == Operand::kRow64;
  }
  int find_label(int scope, const std::string& name) const {
    for (int s = scope; s >= 0; s = scopes_[s].parent) {
      if (const auto found = scopes_[s].labels.find(name); found != scopes_[s].labels.end()) return found->second;
    }
    fail("no label " + name);
  }

  Operand source(std::string text, char letter, int scope) {
    Operand operand;
    if (text[0] == '!') {
      operand.negated = true;
      text = text.substr(1);
    }
    if (text == "_") return operand;
    if (const int variable = find_register(text, scope); variable >= 0) {
      operand.kind = variables_[variable];
      operand.at = variable;
      const char is = operand.kind == Operand::kPredicate ? 'p' : operand.kind == Operand::kRow64 ? 'd' : 'w';
      if (letter != 'x' && letter != is && !(letter == 'a' && is != 'p')) fail("the size of " + text);
      return operand;
    }
    if (text[0] == '%') return special(text);
    if (const auto param = params_.find(text); param != params_.end()) {
      return special_row({Special::kParams, 0, param->second, {}}, Operand::kRow64);
    }
    if (const auto local = locals_.find(text); local != locals_.end()) {
      return special_row({Special::kLocal, 0, local->second, {}}, Operand::kRow64);
    }
    if (letter == 'p') return constant(text == "0" ? 0 : kAllLanes, false);
    const bool wide = letter == 'd';
    if (const auto shared = shared_.find(text); shared != shared_.end()) return constant(shared->second, wide);
    if (dynamic_shared_.count(text) > 0) {
      Operand row = constant(0, wide, true);
      dynamic_rows_.push_back(row);
      return row;
    }
    if (text.starts_with("0f")) return constant(std::stoull(text.substr(2), nullptr, 16), false);
    if (!std::isdigit(static_cast<unsigned char>(text[0])) && text[0] != '-') fail("not known: " + text);
    const uint64_t number =
        text[0] == '-' ? static_cast<uint64_t>(std::stoll(text, nullptr, 0)) : std::stoull(text, nullptr, 0);
    return constant(number, wide);
  }

  Operand constant(uint64_t value, bool wide, bool own = false) {
    Operand operand;
    operand.kind = wide ? Operand::kRow64 : Operand::kRow32;
    operand.constant = true;
    const auto key = std::make_pair(wide, wide ? value : static_cast<uint32_t>(value));
    if (!own) {
      if (const auto found = constants_.find(key); found != constants_.end()) {
        operand.at = found->second;
        return operand;
      }
    }
    operand.at = static_cast<int32_t>(program_.constants.size());
    program_.constants.resize(program_.constants.size() + kLanes * (wide ? 8 : 4));
    fill(operand, value);
    if (!own) constants_[key] = operand.at;
    return operand;
  }

  void fill(const Operand& operand, uint64_t value) {
    const int size = operand.kind == Operand::kRow64 ? 8 : 4;
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(&program_.constants[static_cast<size_t>(operand.at + lane * size)], &value,
                  static_cast<size_t>(size));
    }
  }

  Operand special(const std::string& text) {
    static const std::map<std::string, Special::Kind> kinds = {
        {"%tid", Special::kThread},  {"%ntid", Special::kThreads},      {"%ctaid", Special::kCta},
        {"%nctaid", Special::kCtas}, {"%clusterid", Special::kCluster}, {"%cluster_ctarank", Special::kRank},
        {"%laneid", Special::kLane},
    };
    const size_t dot = text.find('.');
    const auto kind = kinds.find(text.substr(0, dot));
    if (kind == kinds.end()) fail("not known: " + text);
    return special_row({kind->second, dot == std::string::npos ? 0 : text[dot + 1] - 'x', 0, {}}, Operand::kRow32);
  }

  Operand special_row(Special wanted, Operand::Kind kind) {
    for (const Special& known : program_.specials) {
      if (known.kind == wanted.kind && known.axis == wanted.axis && known.offset == wanted.offset) return known.row;
    }
    wanted.row.kind = kind;
    wanted.row.at = new_variable(kind);
    program_.specials.push_back(wanted);
    return wanted.row;
  }

  // --- Rows for registers

  // Registers that never live at once share a row: a kernel names thousands. A register lives from its first to its
  // last place in the text, and through all of the loops that it is alive around.
  void allocate() {
    std::vector<Instruction>& code = program_.code;
    notes_.resize(code.size());
    const int count = static_cast<int>(variables_.size()), length = static_cast<int>(code.size());
    const size_t words = (static_cast<size_t>(count) + 63) / 64;
    const auto is_variable = [](const Operand& o) { return o.kind != Operand::kNothing && !o.constant; };

    std::vector<char> leads(static_cast<size_t>(length) + 1, 0);
    leads[0] = leads[static_cast<size_t>(length)] = 1;
    for (int i = 0; i < length; ++i) {
      if (code[i].kind == Kind::kBranch) leads[code[i].target] = leads[i + 1] = 1;
      if (code[i].kind == Kind::kExit) leads[i + 1] = 1;
    }
    std::vector<int> begins, block_of(static_cast<size_t>(length) + 1);
    for (int i = 0; i <= length; ++i) {
      if (leads[i]) begins.push_back(i);
      block_of[i] = static_cast<int>(begins.size()) - 1;
    }
    const int blocks = static_cast<int>(begins.size()) - 1;
    using Set = std::vector<uint64_t>;
    std::vector<Set> in(static_cast<size_t>(blocks), Set(words)), defined = in, used = in;
    const auto has = [](const Set& set, int v) { return (set[static_cast<size_t>(v) / 64] >> (v % 64)) & 1; };
    const auto add = [](Set& set, int v) { set[static_cast<size_t>(v) / 64] |= uint64_t{1} << (v % 64); };
    for (int b = 0; b < blocks; ++b) {
      for (int i = begins[b]; i < begins[b + 1]; ++i) {
        each_use(code[i], notes_[i], [&](int v) {
          if (!has(defined[b], v)) add(used[b], v);
        });
        for (int r = 0; r < notes_[i].results; ++r) {
          if (is_variable(code[i].operands[r])) add(defined[b], code[i].operands[r].at);
        }
      }
    }
    const auto successors = [&](int b) {
      std::vector<int> next;
      const Instruction& last = code[begins[b + 1] - 1];
      const bool always = last.guard.kind == Operand::kNothing;
      if (last.kind == Kind::kBranch) next.push_back(block_of[last.target]);
      if (!((last.kind == Kind::kBranch || last.kind == Kind::kExit) && always) && b + 1 < blocks)
        next.push_back(b + 1);
      return next;
    };
    std::vector<Set> out(static_cast<size_t>(blocks), Set(words));
    for (bool changed = true; changed;) {
      changed = false;
      for (int b = blocks - 1; b >= 0; --b) {
        for (const int s : successors(b)) {
          for (size_t w = 0; w < words; ++w) out[b][w] |= in[s][w];
        }
        for (size_t w = 0; w < words; ++w) {
          const uint64_t now = used[b][w] | (out[b][w] & ~defined[b][w]);
          changed |= now != in[b][w];
          in[b][w] = now;
        }
      }
    }
    std::vector<std::pair<int, int>> lives(static_cast<size_t>(count), {length, -1});
    const auto at = [&](int v, int i) { lives[v] = {std::min(lives[v].first, i), std::max(lives[v].second, i)}; };
    for (int b = 0; b < blocks; ++b) {
      for (size_t w = 0; w < words; ++w) {
        for (uint64_t bits = in[b][w]; bits != 0; bits &= bits - 1) {
          at(static_cast<int>(w) * 64 + std::countr_zero(bits), begins[b]);
        }
        for (uint64_t bits = out[b][w]; bits != 0; bits &= bits - 1) {
          at(static_cast<int>(w) * 64 + std::countr_zero(bits), begins[b + 1]);
        }
      }
    }
    // What a wgmma writes, it may write until it is waited for.
    std::vector<int> open;
    for (int i = 0; i < length; ++i) {
      for (const Operand& o : code[i].operands) {
        if (is_variable(o)) at(o.at, i);
      }
      if (is_variable(code[i].guard)) at(code[i].guard.at, i);
      if (code[i].text.find("wgmma.mma_async") != std::string::npos) {
        for (int r = 0; r < notes_[i].results; ++r) open.push_back(code[i].operands[r].at);
      } else if (code[i].text.find("wgmma.wait_group") != std::string::npos) {
        for (const int v : open) at(v, i);
        open.clear();
      }
    }
    for (const Special& special : program_.specials) at(special.row.at, 0);

    std::vector<int> order;
    for (int v = 0; v < count; ++v) {
      if (lives[v].second >= 0) order.push_back(v);
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) { return lives[a].first < lives[b].first; });
    std::vector<int> row(static_cast<size_t>(count));
    std::vector<int> free[4];
    std::multimap<int, int> ends;  // of those alive
    for (const int v : order) {
      while (!ends.empty() && ends.begin()->first < lives[v].first) {
        const int dead = ends.begin()->second;
        free[variables_[dead]].push_back(row[dead]);
        ends.erase(ends.begin());
      }
      const Operand::Kind kind = variables_[v];
      if (!free[kind].empty()) {
        row[v] = free[kind].back();
        free[kind].pop_back();
      } else if (kind == Operand::kPredicate) {
        row[v] = program_.predicates++;
      } else {
        row[v] = static_cast<int>(program_.register_bytes);
        program_.register_bytes += kLanes * (kind == Operand::kRow64 ? 8 : 4);
      }
      ends.emplace(lives[v].second, v);
    }
    for (Instruction& instruction : code) {
      for (Operand& o : instruction.operands) {
        if (is_variable(o)) o.at = row[o.at];
      }
      if (is_variable(instruction.guard)) instruction.guard.at = row[instruction.guard.at];
    }
    for (Special& special : program_.specials) special.row.at = row[special.row.at];
    // Dynamic shared memory begins behind what is static.
    if (!dynamic_rows_.empty()) {
      program_.static_shared = (program_.static_shared + dynamic_align_ - 1) / dynamic_align_ * dynamic_align_;
    }
    for (const Operand& operand : dynamic_rows_) fill(operand, static_cast<uint64_t>(program_.static_shared));
  }

  template <typename F>
  static void each_use(const Instruction& instruction, const Note& note, F f) {
    const auto is_variable = [](const Operand& o) { return o.kind != Operand::kNothing && !o.constant; };
    const bool guarded = is_variable(instruction.guard);
    if (guarded) f(instruction.guard.at);
    for (size_t i = 0; i < instruction.operands.size(); ++i) {
      const bool result = static_cast<int>(i) < note.results;
      // A result that is not always written, or added to, lives before.
      if (is_variable(instruction.operands[i]) && (!result || guarded || note.read_too)) f(instruction.operands[i].at);
    }
  }

  const std::string text_;
  const Fault fault_;
  int left_out_ = 0;
  Program program_;
  std::vector<Scope> scopes_;
  std::vector<Operand::Kind> variables_;  // registers: what Operand::at is until rows are shared out
  std::vector<Jump> jumps_;
  std::vector<Note> notes_;  // of instructions
  std::map<std::string, int64_t> params_, shared_, locals_;
  std::set<std::string> dynamic_shared_;
  int64_t dynamic_align_ = 1;
  std::vector<Operand> dynamic_rows_;
  std::string widened_;  // operands of the conversion that the instruction is to be followed by
  std::map<std::pair<bool, uint64_t>, int32_t> constants_;
};

}  // namespace

std::shared_ptr<const Program> decode(const std::string& ptx, const std::string& name, const Fault& fault) {
  return std::make_shared<const Program>(Decoder(ptx, name, fault).run());
}

}  // namespace emulator
