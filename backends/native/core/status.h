// The result of an operation: a code for programs, and a message for people, which no program parses.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace hvkeras {

// The same numbers as in backends/cpp_library.py.
enum class Code : int32_t {
  kOk,
  kFailed,      // invalid arguments, or a missing resource
  kMismatch,    // ranks communicate different things
  kAborted,     // another rank has failed, so this rank's collectives were aborted
  kPeerFailed,  // the connection to another host failed
};

// Success is a null pointer. Copies of a failure share its message.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // A failure; its message is never empty.
  Status(Code code, std::string text)
      : failure_(std::make_shared<const Details>(Details{code, text.empty() ? "unknown cause" : std::move(text)})) {}

  bool ok() const { return failure_ == nullptr; }
  Code code() const { return ok() ? Code::kOk : failure_->code; }
  // "" on success.
  const char* text() const { return ok() ? "" : failure_->text.c_str(); }

  // Created at startup, as there may be no memory to create it later.
  static const Status& out_of_memory();

 private:
  struct Details {
    Code code;
    std::string text;
  };
  std::shared_ptr<const Details> failure_;
};

// A failure as an exception.
class Failure : public std::exception {
 public:
  explicit Failure(Status status) : status_(std::move(status)) {}
  explicit Failure(std::string text, Code code = Code::kFailed) : Failure(Status(code, std::move(text))) {}
  const Status& status() const { return status_; }
  const char* what() const noexcept override { return status_.text(); }

 private:
  Status status_;
};

// The status of any exception.
Status status_of(const std::exception& error);

}  // namespace hvkeras
