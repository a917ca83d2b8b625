// What wakes the leader of a host that sleeps until something comes from other hosts: a pipe with a name, into which
// the ranks of the host write when they have something for it.
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

// Both take a descriptor, or -1 for none. A full pipe wakes as well as one byte more would.
void notify(int notifier);
void mute(int notifier);

}  // namespace hvkeras
