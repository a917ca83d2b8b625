// How something ended: a code for programs, and beside it a text for people, which no program reads.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace hvkeras {

// Python has the same numbers: backends/cpp_library.py.
enum class Code : int32_t {
  kOk,
  kFailed,      // wrong arguments, or this machine cannot do it
  kMismatch,    // ranks communicate different things
  kAborted,     // another rank has failed, and so this one's collectives were stopped
  kPeerFailed,  // the connection to another host failed
};

// Success is a null pointer; copies of a failure share its text.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // A failure, whose text is never empty.
  Status(Code code, std::string text)
      : failure_(
            std::make_shared<const Details>(Details{code, text.empty() ? "the cause is unknown" : std::move(text)})) {}

  bool ok() const { return failure_ == nullptr; }
  Code code() const { return ok() ? Code::kOk : failure_->code; }
  // "" on success.
  const char* text() const { return ok() ? "" : failure_->text.c_str(); }

  // Made in advance, for where there is no memory to make another one.
  static const Status& out_of_memory();

 private:
  struct Details {
    Code code;
    std::string text;
  };
  std::shared_ptr<const Details> failure_;
};

// A failure on its way up to whoever hands out its status.
class Failure : public std::exception {
 public:
  explicit Failure(Status status) : status_(std::move(status)) {}
  explicit Failure(std::string text, Code code = Code::kFailed) : Failure(Status(code, std::move(text))) {}
  const Status& status() const { return status_; }
  const char* what() const noexcept override { return status_.text(); }

 private:
  Status status_;
};

// What an exception says, whichever it is.
Status status_of(const std::exception& error);

}  // namespace hvkeras
