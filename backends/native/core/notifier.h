// Wakes the leader of a host that sleeps until there are network events: a named pipe to which the other ranks of the
// host write.
#pragma once

#include <string>

namespace hvkeras {

class Notifier {
 public:
  // Opens the pipe at a path; the leader creates it. Throws Failure.
  Notifier(const std::string& path, bool create);
  ~Notifier();
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

// Wake the sleeper, and consume the notifications. Both take a descriptor, or -1 for none. If the pipe is full, the
// sleeper is woken anyway.
void notify(int notifier);
void mute(int notifier);

}  // namespace hvkeras
