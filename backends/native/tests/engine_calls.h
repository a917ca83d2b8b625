// Shared by the tests and the timing of the core: memory for ranks, and calls of an engine.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "../core/engine.h"

namespace hvkeras {

inline void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::abort();
}

inline void require_ok(const Status& status, const std::string& what) {
  require(status.ok(), what + ": " + status.text());
}

// Requires a failure with this code, whose message contains all `parts`.
inline void require_failure(const Status& status, Code code, const std::vector<std::string>& parts,
                            const std::string& what) {
  const std::string text = status.text();
  require(status.code() == code, what + ": " + text);
  for (const std::string& part : parts) require(text.find(part) != std::string::npos, what + ": " + text);
}

inline void* shared_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "mmap");
  return memory;
}

inline std::vector<int> numbered(int ranks) {
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  return all;
}

// Submits a request and waits for it.
inline Status call(Engine& engine, const std::string& name, const std::string& details,
                   std::function<void(Channel&)> run, std::shared_ptr<const Allreduce> all = {}, size_t bytes = 0) {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  Status result;
  auto request = std::make_unique<Request>();
  request->key = key_of(name);
  request->details = details;
  request->run = std::move(run);
  request->allreduce = std::move(all);
  request->bytes = bytes;
  request->done = [&](const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex);
    result = status;
    is_done = true;
    changed.notify_one();
  };
  engine.submit(std::move(request));
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return is_done; });
  return result;
}

// The same for an allreduce, submitted as TensorFlow's operations do.
inline Status call(Engine& engine, const std::string& name, const std::string& details, Allreduce all) {
  const auto shared = std::make_shared<const Allreduce>(std::move(all));
  return call(
      engine, name, details, [shared](Channel& channel) { allreduce(channel, *shared); }, shared, shared->bytes());
}

// Times allreduces of several sizes with ranks as processes, and prints a line for each.
void time_all(int ranks);

}  // namespace hvkeras
