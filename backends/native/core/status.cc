#include "status.h"

#include <new>

namespace hvkeras {

const Status& Status::out_of_memory() {
  static const Status* const only = new Status(Code::kFailed, "out of memory");  // never destroyed
  return *only;
}

namespace {

[[maybe_unused]] const bool is_made = (Status::out_of_memory(), true);  // created at load time, while there is memory

}  // namespace

Status status_of(const std::exception& error) {
  if (const auto* const failure = dynamic_cast<const Failure*>(&error)) return failure->status();
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return Status::out_of_memory();
  return Status(Code::kFailed, error.what());
}

}  // namespace hvkeras
