// The memory layout of three libstdc++ classes; all Linux builds of TensorFlow use libstdc++.
//
// TensorFlow passes or accepts these classes, but this library may be compiled with another standard library: the
// wheels use libc++. So their layout is declared here. It is part of libstdc++'s ABI, and has not changed since GCC 5.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

namespace hvkeras::libstdcxx {

// A copy of a std::function<void()>.
class Function {
 public:
  explicit Function(const void* original) {
    const Function& other = *static_cast<const Function*>(original);
    if (other.manager_ == nullptr) return;
    other.manager_(data_, other.data_, kCopy);
    manager_ = other.manager_;
    invoker_ = other.invoker_;
  }
  ~Function() {
    if (manager_ != nullptr) manager_(data_, data_, kDestroy);
  }
  Function(const Function&) = delete;
  Function& operator=(const Function&) = delete;
  void operator()() const { invoker_(data_); }

 private:
  struct Data {
    alignas(void*) char bytes[16];
  };
  enum Operation { kCopy = 2, kDestroy = 3 };

  Data data_{};
  bool (*manager_)(Data& out, const Data& in, Operation) = nullptr;
  void (*invoker_)(const Data&) = nullptr;
};
static_assert(sizeof(Function) == 32);

// A std::string. Those created here are read-only views: the text must outlive them.
struct String {
  explicit String(const char* to_read) : text(to_read), length(std::strlen(to_read)), capacity(length) {}

  const char* text;
  size_t length;
  size_t capacity;  // for TensorFlow's strings of up to 15 characters, the text itself starts here
  size_t rest = 0;
};
static_assert(sizeof(String) == 32);

// A std::optional<std::string>.
class OptionalString {
 public:
  // Sets an empty optional to a new string, which TensorFlow deletes. If it is not passed to TensorFlow, call `reset`.
  void set(const char* text) {
    const size_t length = std::strlen(text);
    const size_t capacity = std::max<size_t>(length, 31);  // more than the small-string buffer holds
    char* const copy = static_cast<char*>(::operator new(capacity + 1));
    std::memcpy(copy, text, length + 1);
    string_.text = copy;
    string_.length = length;
    string_.capacity = capacity;
    has_value_ = true;
  }
  void reset() {
    if (has_value_) ::operator delete(const_cast<char*>(string_.text));
    has_value_ = false;
  }
  const String& value() const { return string_; }

 private:
  String string_{""};
  bool has_value_ = false;
};
static_assert(sizeof(OptionalString) == 40);

}  // namespace hvkeras::libstdcxx
