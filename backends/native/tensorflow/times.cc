#include "times.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace hvkeras::times {

namespace {

// The latest runs of a key, in turn over the rows.
struct Runs {
  std::vector<double> rows;
  int64_t count = 0;
};

struct Kept {
  std::atomic<bool> any{false};
  std::mutex mutex;  // guards the runs
  std::unordered_map<std::string, Runs> runs;
};

Kept& kept() {
  static Kept* const only = new Kept;  // never destroyed: threads may outlive the end of main()
  return *only;
}

}  // namespace

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

void add(const std::string& key, double began, double ended) {
  Kept& all = kept();
  if (!all.any.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.runs.find(key);
  if (found == all.runs.end()) return;
  Runs& runs = found->second;
  double* const row = &runs.rows[static_cast<size_t>(runs.count++) * 2 % runs.rows.size()];
  row[0] = began;
  row[1] = ended;
}

}  // namespace hvkeras::times

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Keeps the latest `capacity` runs of a key from now on; a key that is kept already stays as it is.
EXPORTED void hvkeras_keep_times(const char* key, int64_t capacity) {
  auto& all = hvkeras::times::kept();
  const std::lock_guard<std::mutex> lock(all.mutex);
  hvkeras::times::Runs& runs = all.runs[key];
  if (runs.rows.empty()) runs.rows.resize(static_cast<size_t>(capacity) * 2);
  all.any.store(true);
}

// Copies the runs of a key that is kept, begin and end of each, the oldest one first. Returns how many there were in
// all; of these the last `capacity` are copied.
EXPORTED int64_t hvkeras_times(const char* key, double* rows) {
  auto& all = hvkeras::times::kept();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const hvkeras::times::Runs& runs = all.runs.at(key);
  const int64_t capacity = static_cast<int64_t>(runs.rows.size() / 2);
  for (int64_t run = std::max<int64_t>(0, runs.count - capacity); run < runs.count; ++run) {
    const size_t place = static_cast<size_t>(run % capacity) * 2;
    *rows++ = runs.rows[place];
    *rows++ = runs.rows[place + 1];
  }
  return runs.count;
}

}  // extern "C"
