// What the functions share that Python calls through ctypes, which knows nothing of exceptions.
#pragma once

#include <string>

#include "core/waiting.h"

#define EXPORTED __attribute__((visibility("default")))

namespace hvkeras {

// Runs a body. Returns nullptr on success, else a text that lives until the thread's next call.
template <typename Body>
const char* guarded(Body&& body) {
  thread_local std::string last_error;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    last_error = message_of(error);
    return last_error.c_str();
  }
}

}  // namespace hvkeras
