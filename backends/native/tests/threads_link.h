// A network between hosts that are threads of one process: every message waits in a queue until somebody takes it.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "../core/link.h"
#include "../core/notifier.h"

namespace hvkeras {

// All that is under way between so many hosts.
class ThreadsNetwork {
 public:
  explicit ThreadsNetwork(int hosts)
      : hosts_(static_cast<size_t>(hosts)), messages_(hosts_ * hosts_), data_(kStreams * hosts_ * hosts_) {}

 private:
  friend class ThreadsLink;
  static constexpr size_t kStreams = 3;
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
  size_t way(int from, int to, int stream = 0) const {
    return (static_cast<size_t>(stream) * hosts_ + static_cast<size_t>(from)) * hosts_ + static_cast<size_t>(to);
  }

  size_t hosts_;
  std::mutex mutex_;
  std::vector<std::deque<std::vector<char>>> messages_;
  std::vector<Way> data_;
};

class ThreadsLink : public Link {
 public:
  ThreadsLink(ThreadsNetwork& network, int host) : network_(network), host_(host) {}

  void send_message(int host, std::vector<char> message) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    network_.messages_[network_.way(host_, host)].push_back(std::move(message));
  }
  bool take_message(std::vector<char>* message, int* host) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    for (*host = 0; *host < static_cast<int>(network_.hosts_); ++*host) {
      auto& waiting = network_.messages_[network_.way(*host, host_)];
      if (waiting.empty()) continue;
      *message = std::move(waiting.front());
      waiting.pop_front();
      return true;
    }
    return false;
  }
  Ticket send(int host, Stream stream, const void* data, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    ThreadsNetwork::Way& way = network_.data_[network_.way(host_, host, stream)];
    const char* const start = static_cast<const char*>(data);
    way.sent.emplace_back(start, start + bytes);
    deliver(way);
    return nullptr;
  }
  Ticket receive(int host, Stream stream, void* data, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    ThreadsNetwork::Way& way = network_.data_[network_.way(host, host_, stream)];
    auto* const wanted = new ThreadsNetwork::Wanted{static_cast<char*>(data), bytes, false};
    way.wanted.push_back(wanted);
    deliver(way);
    return wanted;
  }
  bool done(Ticket ticket) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    auto* const wanted = static_cast<ThreadsNetwork::Wanted*>(ticket);
    if (wanted == nullptr) return true;
    const bool is_there = wanted->is_there;
    if (is_there) delete wanted;
    return is_there;
  }
  void progress() override {}
  bool all_sent() override { return true; }
  // Nothing here wakes a sleeper but the notifier.
  void sleep(int64_t microseconds, int notifier) override {
    const timespec limit{0, static_cast<long>(std::min<int64_t>(microseconds, 200)) * 1'000};
    pollfd notified{notifier, POLLIN, 0};
    if (ppoll(&notified, 1, &limit, nullptr) > 0) mute(notifier);
  }
  void give_up() override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    for (int from = 0; from < static_cast<int>(network_.hosts_); ++from) {
      for (int stream = 0; stream < static_cast<int>(ThreadsNetwork::kStreams); ++stream) {
        auto& wanted = network_.data_[network_.way(from, host_, stream)].wanted;
        for (const ThreadsNetwork::Wanted* const one : wanted) delete one;
        wanted.clear();
      }
    }
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
