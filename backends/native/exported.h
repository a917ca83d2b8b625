// What the functions share that Python calls through ctypes, which knows nothing of exceptions.
#pragma once

#include "core/status.h"

#define EXPORTED __attribute__((visibility("default")))

// How a function ended: a hvkeras::Code, and a text that lives until the thread's next call.
struct ExportedStatus {
  int32_t code;
  const char* text;
};

namespace hvkeras {

// Runs a body, which may throw.
template <typename Body>
ExportedStatus guarded(Body&& body) {
  thread_local Status last;
  last = Status();
  try {
    body();
  } catch (const std::exception& error) {
    last = status_of(error);
  }
  return {static_cast<int32_t>(last.code()), last.text()};
}

}  // namespace hvkeras
