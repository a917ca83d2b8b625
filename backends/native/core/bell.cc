#include "bell.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "waiting.h"

namespace hvkeras {

// Open for both, it never ends, whoever else has it.
Bell::Bell(const std::string& path, bool create) : descriptor_(-1) {
  if (!create || mkfifo(path.c_str(), 0600) == 0) descriptor_ = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (descriptor_ < 0)
    throw Failure("a named pipe cannot be opened: " + std::string(std::strerror(errno)) + ". Received: path='" + path +
                  "'");
}

Bell::~Bell() { close(descriptor_); }

void ring(int bell) {
  if (bell >= 0 && write(bell, "", 1) < 0) return;
}

void silence(int bell) {
  char rung[256];
  while (bell >= 0 && read(bell, rung, sizeof rung) == static_cast<ssize_t>(sizeof rung)) {
  }
}

}  // namespace hvkeras
