// A network between hosts that are threads of one process: every message waits in a queue until somebody takes it.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "../core/link.h"

namespace hvkeras {

// All that is under way between so many hosts.
class ThreadsNetwork {
 public:
  explicit ThreadsNetwork(int hosts)
      : hosts_(static_cast<size_t>(hosts)), messages_(hosts_ * hosts_), data_(hosts_ * hosts_) {}

 private:
  friend class ThreadsLink;
  struct Wanted {
    char* place;
    size_t bytes;
    bool is_there;
  };
  struct Way {
    std::deque<std::vector<char>> sent;
    std::deque<Wanted*> wanted;
  };
  // From one host to another.
  size_t way(int from, int to) const { return static_cast<size_t>(from) * hosts_ + static_cast<size_t>(to); }

  size_t hosts_;
  std::mutex mutex_;
  std::vector<std::deque<std::vector<char>>> messages_;
  std::vector<Way> data_;
};

class ThreadsLink : public Link {
 public:
  ThreadsLink(ThreadsNetwork& network, int host) : network_(network), host_(host) {}

  void tell(int host, const void* message, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    const char* const start = static_cast<const char*>(message);
    network_.messages_[network_.way(host_, host)].emplace_back(start, start + bytes);
  }
  bool hear(void* message, size_t bytes, int* host) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    for (*host = 0; *host < static_cast<int>(network_.hosts_); ++*host) {
      auto& waiting = network_.messages_[network_.way(*host, host_)];
      if (waiting.empty()) continue;
      std::memcpy(message, waiting.front().data(), bytes);
      waiting.pop_front();
      return true;
    }
    return false;
  }
  Ticket send(int host, const void* data, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    ThreadsNetwork::Way& way = network_.data_[network_.way(host_, host)];
    const char* const start = static_cast<const char*>(data);
    way.sent.emplace_back(start, start + bytes);
    deliver(way);
    return new ThreadsNetwork::Wanted{nullptr, 0, true};
  }
  Ticket receive(int host, void* data, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    ThreadsNetwork::Way& way = network_.data_[network_.way(host, host_)];
    auto* const wanted = new ThreadsNetwork::Wanted{static_cast<char*>(data), bytes, false};
    way.wanted.push_back(wanted);
    deliver(way);
    return wanted;
  }
  bool done(Ticket ticket) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    auto* const wanted = static_cast<ThreadsNetwork::Wanted*>(ticket);
    const bool is_there = wanted->is_there;
    if (is_there) delete wanted;
    return is_there;
  }

 private:
  // What was sent first is for whom asked first; their sizes must be equal, which a network need not notice.
  static void deliver(ThreadsNetwork::Way& way) {
    while (!way.sent.empty() && !way.wanted.empty()) {
      ThreadsNetwork::Wanted& wanted = *way.wanted.front();
      if (wanted.bytes != way.sent.front().size()) std::abort();
      std::memcpy(wanted.place, way.sent.front().data(), wanted.bytes);
      wanted.is_there = true;
      way.sent.pop_front();
      way.wanted.pop_front();
    }
  }

  ThreadsNetwork& network_;
  const int host_;
};

}  // namespace hvkeras
