#include "notifier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "synchronization.h"

namespace hvkeras {

// Opened for reading and writing, so that it never reports end-of-file, whoever else closes it.
Notifier::Notifier(const std::string& path, bool create) : descriptor_(-1) {
  if (!create || mkfifo(path.c_str(), 0600) == 0) descriptor_ = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (descriptor_ < 0)
    throw Failure("failed to open a named pipe: " + std::string(std::strerror(errno)) + ". Received: path='" + path +
                  "'");
}

Notifier::~Notifier() { close(descriptor_); }

void notify(int notifier) {
  if (notifier >= 0 && write(notifier, "", 1) < 0) return;
}

void mute(int notifier) {
  char bytes[256];
  while (notifier >= 0 && read(notifier, bytes, sizeof bytes) == static_cast<ssize_t>(sizeof bytes)) {
  }
}

}  // namespace hvkeras
