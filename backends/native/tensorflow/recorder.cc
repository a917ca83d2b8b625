#include "recorder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "../exported.h"
#include "c_api_helpers.h"

namespace hvkeras {
namespace recorder {
namespace {

// The latest rows of a key; each new row replaces the oldest one.
struct RingBuffer {
  std::vector<double> numbers;
  size_t columns = 0;
  int64_t count = 0;

  int64_t capacity() const { return static_cast<int64_t>(numbers.size() / columns); }
  double* row(int64_t number) { return &numbers[static_cast<size_t>(number % capacity()) * columns]; }
};

struct Recordings {
  std::atomic<bool> is_recording{false};
  std::mutex mutex;  // guards the buffers
  std::map<std::string, RingBuffer, std::less<>> buffers;
};

Recordings& recordings() {
  static Recordings* const only = new Recordings;  // never destroyed: threads may outlive the end of main()
  return *only;
}

// HvkerasRecord: records its numbers as a row, unless `keep` is 0.
void* create(TF_OpKernelConstruction* construction) {
  return create_kernel(construction,
                       [&] { return std::make_unique<std::string>(string_attribute(construction, "key")); });
}

void compute(void* kernel, TF_OpKernelContext* context) {
  try {
    const int columns = TF_NumInputs(context) - 1;
    const Tensor keep = input_of(context, columns);
    if (*static_cast<const int64_t*>(TF_TensorData(keep.get())) == 0) return;
    std::vector<double> row;
    for (int column = 0; column < columns; ++column) {
      const Tensor number = input_of(context, column);
      row.push_back(*static_cast<const double*>(TF_TensorData(number.get())));
    }
    record(*static_cast<std::string*>(kernel), row.data(), row.size());
  } catch (const std::exception& failure) {
    fail(context, status_of(failure));
  }
}

void destroy(void* kernel) { delete static_cast<std::string*>(kernel); }

void register_operation() {
  const char* const name = "HvkerasRecord";
  const TfStatus status = new_status();
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(builder, "N: int >= 1");
  TF_OpDefinitionBuilderAddAttr(builder, "key: string");
  TF_OpDefinitionBuilderAddInput(builder, "numbers: N * float64");
  TF_OpDefinitionBuilderAddInput(builder, "keep: int64");
  TF_OpDefinitionBuilderSetIsStateful(builder, true);  // must not be pruned
  TF_RegisterOpDefinition(builder, status.get());
  if (TF_GetCode(status.get()) == TF_OK)
    TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, "CPU", create, compute, destroy), status.get());
  warn_unless_registered(name, status);
}

[[maybe_unused]] const bool registered = (register_operation(), true);

}  // namespace

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

void record(const std::string& key, const double* row, size_t columns) {
  Recordings& all = recordings();
  if (!all.is_recording.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.buffers.find(key);
  if (found == all.buffers.end() || found->second.columns != columns) return;
  std::copy_n(row, columns, found->second.row(found->second.count++));
}

}  // namespace recorder
}  // namespace hvkeras

extern "C" {

// Starts recording the latest `capacity` rows of a key. Does nothing if the key is recorded already.
EXPORTED ExportedStatus hvkeras_start_recording(const char* key, int64_t columns, int64_t capacity) {
  return hvkeras::guarded([&] {
    auto& all = hvkeras::recorder::recordings();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.buffers.find(std::string_view(key)) == all.buffers.end()) {
      hvkeras::recorder::RingBuffer buffers;
      buffers.columns = static_cast<size_t>(columns);
      buffers.numbers.resize(static_cast<size_t>(columns * capacity));
      all.buffers.emplace(key, std::move(buffers));
    }
    all.is_recording.store(true);
  });
}

// Copies the recorded rows of a key, oldest first; `out` has space for `capacity` rows. Returns how many rows were
// recorded in all, of which the latest are copied; 0 if the key is not recorded.
EXPORTED int64_t hvkeras_read_recording(const char* key, double* out) {
  auto& all = hvkeras::recorder::recordings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.buffers.find(std::string_view(key));
  if (found == all.buffers.end()) return 0;
  hvkeras::recorder::RingBuffer& buffers = found->second;
  for (int64_t number = std::max<int64_t>(0, buffers.count - buffers.capacity()); number < buffers.count; ++number)
    out = std::copy_n(buffers.row(number), buffers.columns, out);
  return buffers.count;
}

}  // extern "C"
