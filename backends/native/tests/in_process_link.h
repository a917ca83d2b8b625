// A network between hosts that are threads of one process, with a message queue for each pair.
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

// All messages and data in flight.
class InProcessNetwork {
 public:
  explicit InProcessNetwork(int hosts)
      : hosts_(static_cast<size_t>(hosts)), messages_(hosts_ * hosts_), queues_(kStreams * hosts_ * hosts_) {}

 private:
  friend class InProcessLink;
  static constexpr size_t kStreams = 3;
  struct PendingReceive {
    char* data;
    size_t bytes;
    bool is_complete;
  };
  struct Queue {
    std::deque<std::vector<char>> sent;
    std::deque<PendingReceive*> pending;
  };
  // From one host to another.
  size_t queue_index(int from, int to, int stream = 0) const {
    return (static_cast<size_t>(stream) * hosts_ + static_cast<size_t>(from)) * hosts_ + static_cast<size_t>(to);
  }

  size_t hosts_;
  std::mutex mutex_;
  std::vector<std::deque<std::vector<char>>> messages_;
  std::vector<Queue> queues_;
};

class InProcessLink : public Link {
 public:
  InProcessLink(InProcessNetwork& network, int host) : network_(network), host_(host) {}

  void send_message(int host, std::vector<char> message) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    network_.messages_[network_.queue_index(host_, host)].push_back(std::move(message));
  }
  bool try_receive_message(std::vector<char>* message, int* host) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    for (*host = 0; *host < static_cast<int>(network_.hosts_); ++*host) {
      auto& waiting = network_.messages_[network_.queue_index(*host, host_)];
      if (waiting.empty()) continue;
      *message = std::move(waiting.front());
      waiting.pop_front();
      return true;
    }
    return false;
  }
  Handle send(int host, Stream stream, const void* data, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    InProcessNetwork::Queue& queue = network_.queues_[network_.queue_index(host_, host, stream)];
    const char* const start = static_cast<const char*>(data);
    queue.sent.emplace_back(start, start + bytes);
    deliver(queue);
    return nullptr;
  }
  Handle receive(int host, Stream stream, void* data, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    InProcessNetwork::Queue& queue = network_.queues_[network_.queue_index(host, host_, stream)];
    auto* const pending = new InProcessNetwork::PendingReceive{static_cast<char*>(data), bytes, false};
    queue.pending.push_back(pending);
    deliver(queue);
    return pending;
  }
  bool done(Handle handle) override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    auto* const pending = static_cast<InProcessNetwork::PendingReceive*>(handle);
    if (pending == nullptr) return true;
    const bool is_complete = pending->is_complete;
    if (is_complete) delete pending;
    return is_complete;
  }
  void progress() override {}
  bool all_sent() override { return true; }
  // Only the notifier wakes a sleeper.
  void sleep(int64_t microseconds, int notifier) override {
    const timespec limit{0, static_cast<long>(std::min<int64_t>(microseconds, 200)) * 1'000};
    pollfd notified{notifier, POLLIN, 0};
    if (ppoll(&notified, 1, &limit, nullptr) > 0) mute(notifier);
  }
  void abort() override {
    const std::lock_guard<std::mutex> lock(network_.mutex_);
    for (int from = 0; from < static_cast<int>(network_.hosts_); ++from) {
      for (int stream = 0; stream < static_cast<int>(InProcessNetwork::kStreams); ++stream) {
        auto& pending = network_.queues_[network_.queue_index(from, host_, stream)].pending;
        for (const InProcessNetwork::PendingReceive* const one : pending) delete one;
        pending.clear();
      }
    }
  }

 private:
  // Matches sends and receives in order. Their sizes must be equal, although a real network need not check this.
  static void deliver(InProcessNetwork::Queue& queue) {
    while (!queue.sent.empty() && !queue.pending.empty()) {
      InProcessNetwork::PendingReceive& pending = *queue.pending.front();
      if (pending.bytes != queue.sent.front().size()) std::abort();
      std::memcpy(pending.data, queue.sent.front().data(), pending.bytes);
      pending.is_complete = true;
      queue.sent.pop_front();
      queue.pending.pop_front();
    }
  }

  InProcessNetwork& network_;
  const int host_;
};

}  // namespace hvkeras
