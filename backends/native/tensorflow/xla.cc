// The collectives in functions that XLA compiles for the CPU: host functions (custom calls) that return when the
// collective is done.
// XLA's registry of custom calls is not part of a stable interface. So its symbols are looked up and checked when the
// library is loaded. Without them, the rest of the library works as before.
#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../core/engine.h"
#include "../exported.h"
#include "../registry.h"
#include "libstdcxx.h"

namespace hvkeras {
namespace {

// XlaCustomCallStatus_ in TensorFlow 2.16 to 2.21. Its setter is not exported, its getter is.
using XlaStatus = libstdcxx::OptionalString;

// The getter's result: an optional string view, whose pointer and length are in either order.
struct Message {
  uintptr_t words[2];
  bool has_value;
};

// How often this process has entered each plan of collectives; see hvkeras/job/plans.py.
class PlanCounts {
 public:
  void add(const std::string& plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[plan];
  }
  int64_t of(std::string_view plan) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = counts_.find(plan);
    return found == counts_.end() ? 0 : found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t, std::less<>> counts_;
};

PlanCounts& plan_counts() {
  static PlanCounts* const only = new PlanCounts;  // never destroyed: threads may outlive the end of main()
  return *only;
}

// The attributes of a call, written by Python when the graph was made (backends/native/xla.py): lines of "name value".
class Description {
 public:
  Description(const char* text, size_t length) {
    const std::string all(text, length);
    for (size_t start = 0; start < all.size();) {
      const size_t end = std::min(all.find('\n', start), all.size()), space = all.find(' ', start);
      if (space < end) values_[all.substr(start, space - start)] = all.substr(space + 1, end - space - 1);
      start = end + 1;
    }
  }
  const std::string& text(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) throw Failure("a compiled collective lacks the attribute " + name);
    return found->second;
  }
  int64_t number(const std::string& name) const { return std::strtoll(text(name).c_str(), nullptr, 10); }
  size_t size(const std::string& name) const { return static_cast<size_t>(number(name)); }
  std::vector<size_t> sizes(const std::string& name) const {
    std::vector<size_t> found;
    const char* next = text(name).c_str();
    for (char* end = nullptr;; next = end) {
      const size_t one = std::strtoull(next, &end, 10);
      if (end == next) return found;
      found.push_back(one);
    }
  }
  Type type() const { return static_cast<Type>(number("type")); }
  Reduction reduction() const { return static_cast<Reduction>(number("reduction")); }
  ScaleFactors factors() const {
    return {std::strtod(text("before").c_str(), nullptr), std::strtod(text("after").c_str(), nullptr)};
  }

 private:
  std::unordered_map<std::string, std::string> values_;
};

// Submits a request and waits for it. The engine finishes it in any case: done, aborted or shut down.
void run(const Description& description, std::function<void(Channel&)> body,
         std::shared_ptr<const Allreduce> all = {}) {
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    Status status;
  };
  const auto completion = std::make_shared<Completion>();
  auto request = std::make_unique<Request>();
  request->key = key_of(description.text("key"));
  request->details = description.text("details");
  request->run = std::move(body);
  request->allreduce = std::move(all);
  request->done = [completion](const Status& status) {
    const std::lock_guard<std::mutex> lock(completion->mutex);
    completion->status = status;
    completion->done = true;
    completion->changed.notify_one();
  };
  engine_of(description.number("group"))->submit(std::move(request));
  std::unique_lock<std::mutex> lock(completion->mutex);
  completion->changed.wait(lock, [&] { return completion->done; });
  if (!completion->status.ok()) throw Failure(completion->status);
}

const char* in_of(const void** in, size_t index) { return static_cast<const char*>(in[index]); }

void allreduce_call(char** out, const void** in, const Description& description) {
  const std::vector<size_t> counts = description.sizes("counts");
  std::vector<Span> spans;
  for (size_t index = 0; index < counts.size(); ++index) spans.push_back({in_of(in, index), out[index], counts[index]});
  const Type type = description.type();
  const auto all = std::make_shared<const Allreduce>(
      Allreduce{Spans(std::move(spans), size_of(type)), type, description.reduction(), description.factors()});
  const std::shared_ptr<Engine> engine = engine_of(description.number("group"));
  if (description.number("compression") != 0 && engine->spans_hosts()) {
    const std::shared_ptr<ErrorFeedback> feedback = engine->feedback(key_of(description.text("key")));
    return run(description, [&](Channel& channel) {
      between_hosts::compressed_allreduce(channel, all->spans, all->factors, *feedback);
    });
  }
  run(description, [&](Channel& channel) { allreduce(channel, *all); }, all);
}

void broadcast_call(char** out, const void** in, const Description& description) {
  run(description, [&](Channel& channel) {
    broadcast(channel, in_of(in, 0), out[0], description.size("bytes"), static_cast<int>(description.number("root")));
  });
}

// Allocates nothing: compiled code has space for the same number of rows from each rank as this rank has.
Allocate into(char* out, size_t rows) {
  return [out, rows](const std::vector<size_t>& rows_of_rank) {
    for (size_t rank = 0; rank < rows_of_rank.size(); ++rank) {
      if (rows_of_rank[rank] != rows)
        throw Failure("a step that XLA compiles gathers the same number of rows from each rank. Received: " +
                      std::to_string(rows) + " rows here, " + std::to_string(rows_of_rank[rank]) + " from member " +
                      std::to_string(rank) + ". HINT: pass jit_compile=False, or, for sparse gradients, " +
                      "sparse_as_dense=True");
    }
    return out;
  };
}

void allgather_call(char** out, const void** in, const Description& description) {
  const size_t rows = description.size("rows");
  run(description, [&](Channel& channel) {
    allgather(channel, in_of(in, 0), rows, description.size("row_bytes"), into(out[0], rows));
  });
}

void alltoall_call(char** out, const void** in, const Description& description) {
  const size_t rows = description.size("rows");
  const int64_t* const splits = static_cast<const int64_t*>(in[1]);
  const std::vector<size_t> rows_to(description.size("ranks"), rows);
  for (size_t rank = 0; rank < rows_to.size(); ++rank) {
    if (splits[rank] != static_cast<int64_t>(rows))
      throw Failure("a function that XLA compiles sends the same number of rows to each rank. Received: splits[" +
                    std::to_string(rank) + "]=" + std::to_string(splits[rank]) + ", rows of each=" +
                    std::to_string(rows) + ". HINT: pass jit_compile=False to compile() or tf.function()");
  }
  run(description, [&](Channel& channel) {
    alltoall(channel, in_of(in, 0), rows_to, description.size("row_bytes"), into(out[0], rows));
  });
}

void reducescatter_call(char** out, const void** in, const Description& description) {
  run(description, [&](Channel& channel) {
    reducescatter(channel, in_of(in, 0), out[0], description.sizes("starts"), description.type(),
                  description.reduction(), description.factors());
  });
}

// The spans of each rank's parts of the tensors. Elements have `bytes` bytes, and the bounds (see `Bounds` in ops.cc)
// are in elements; the spans are in units of `element_bytes`. `ends_of(tensor, rank, offset)` returns the source and
// the target.
template <typename EndsOf>
std::vector<Spans> parts_of(const Description& description, size_t bytes, size_t element_bytes, EndsOf&& ends_of) {
  const size_t width = description.size("ranks") + 1;
  const std::vector<size_t> bounds = description.sizes("bounds");
  std::vector<std::vector<Span>> spans(width - 1);
  for (size_t tensor = 0; tensor < bounds.size() / width; ++tensor) {
    for (size_t rank = 0; rank + 1 < width; ++rank) {
      const size_t start = bounds[tensor * width + rank], count = bounds[tensor * width + rank + 1] - start;
      if (count == 0) continue;
      const std::pair<const char*, char*> ends = ends_of(tensor, rank, start * bytes);
      spans[rank].push_back({ends.first, ends.second, count * bytes / element_bytes});
    }
  }
  std::vector<Spans> parts;
  for (std::vector<Span>& one : spans) parts.emplace_back(std::move(one), element_bytes);
  return parts;
}

void reduce_parts_call(char** out, const void** in, const Description& description) {
  const Type type = description.type();
  const auto parts = parts_of(description, size_of(type), size_of(type), [&](size_t tensor, size_t, size_t offset) {
    return std::pair<const char*, char*>{in_of(in, tensor) + offset, out[tensor] + offset};
  });
  run(description,
      [&](Channel& channel) { reduce_parts(channel, parts, type, description.reduction(), description.factors()); });
}

// The operands are this rank's parts. There is a result for each tensor, even if this rank has all of it.
void gather_parts_call(char** out, const void** in, const Description& description) {
  const size_t me = description.size("rank");
  size_t own = 0;
  const auto parts =
      parts_of(description, description.size("element"), 1, [&](size_t tensor, size_t rank, size_t offset) {
        return std::pair<const char*, char*>{rank == me ? in_of(in, own++) : nullptr, out[tensor] + offset};
      });
  run(description, [&](Channel& channel) { gather_parts(channel, parts); });
}

void enter_call(char**, const void**, const Description& description) { plan_counts().add(description.text("key")); }

// The function that XLA calls. The last operand and the last result are tokens that only order the calls. A single
// result is passed as a pointer, several as an array of pointers.
template <void (*call)(char**, const void**, const Description&)>
void host_function(void* out, const void** in, const char* text, size_t length, XlaStatus* status) {
  try {
    const Description description(text, length);
    const size_t results = description.size("results");
    char* only[] = {static_cast<char*>(out)};
    char** const outs = results == 1 ? only : static_cast<char**>(out);
    *reinterpret_cast<int32_t*>(outs[results - 1]) = 0;
    call(outs, in, description);
  } catch (const std::exception& error) {
    status->set(status_of(error).text());
  }
}

// XLA's functions in a TensorFlow library that is already loaded.
class Xla {
 public:
  explicit Xla(const char* path) : handle_(dlopen(path, RTLD_LAZY | RTLD_NOLOAD)) {
    if (handle_ == nullptr) throw Failure(std::string(path) + " is not loaded");
  }
  ~Xla() { dlclose(handle_); }
  Xla(const Xla&) = delete;
  Xla& operator=(const Xla&) = delete;

  void check_status_layout() const {
    const auto read =
        function<Message (*)(const XlaStatus*)>("_ZN3xla26CustomCallStatusGetMessageEPK20XlaCustomCallStatus_");
    const XlaStatus success;
    XlaStatus failure;
    failure.set("a failure");
    const Message none = read(&success), text = read(&failure);
    const uintptr_t start = reinterpret_cast<uintptr_t>(failure.value().text), length = failure.value().length;
    failure.reset();
    const bool whole =
        (text.words[0] == start && text.words[1] == length) || (text.words[0] == length && text.words[1] == start);
    if (none.has_value || !text.has_value || !whole)
      throw Failure("this TensorFlow has another layout of XLA's custom call status");
  }
  void add(const char* name, void* host_function) const {
    using libstdcxx::String;
    void* const registry = function<void* (*)()>("_ZN3xla24CustomCallTargetRegistry6GlobalEv")();
    function<void (*)(void*, const String&, void*, const String&)>(
        "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEPvS8_")(
        registry, String(name), host_function, String("Host"));
  }

 private:
  template <typename Function>
  Function function(const char* name) const {
    void* const found = dlsym(handle_, name);
    if (found == nullptr) throw Failure(std::string("this TensorFlow does not export ") + name);
    return reinterpret_cast<Function>(found);
  }

  void* handle_;
};

void register_all(const char* path) {
  const Xla xla(path);
  xla.check_status_layout();
  const std::pair<const char*, void (*)(void*, const void**, const char*, size_t, XlaStatus*)> functions[] = {
      {"hvkeras_enter", host_function<enter_call>},
      {"hvkeras_allreduce", host_function<allreduce_call>},
      {"hvkeras_broadcast", host_function<broadcast_call>},
      {"hvkeras_allgather", host_function<allgather_call>},
      {"hvkeras_alltoall", host_function<alltoall_call>},
      {"hvkeras_reducescatter", host_function<reducescatter_call>},
      {"hvkeras_reduce_parts", host_function<reduce_parts_call>},
      {"hvkeras_gather_parts", host_function<gather_parts_call>},
  };
  for (const auto& [name, function] : functions) xla.add(name, reinterpret_cast<void*>(function));
}

}  // namespace
}  // namespace hvkeras

extern "C" {

// Registers the collectives with the XLA in TensorFlow's library at `path`. Later calls return the result of the first
// one.
EXPORTED ExportedStatus hvkeras_register_xla(const char* path) {
  static const auto* const first = new hvkeras::Status([path]() -> hvkeras::Status {
    try {
      hvkeras::register_all(path);
      return {};
    } catch (const std::exception& error) {
      return hvkeras::status_of(error);
    }
  }());
  return {static_cast<int32_t>(first->code()), first->text()};
}

// How often compiled code of this process has entered a plan.
EXPORTED int64_t hvkeras_entered(const char* plan) { return hvkeras::plan_counts().of(plan); }

}  // extern "C"
