#include "hosts.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace hvkeras {

namespace {

constexpr size_t kAlignPadding = 1024;  // for the alignment of each host's part

size_t round_up_to_page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

size_t padded_bytes(int hosts, size_t buffer_bytes) {
  return round_up_to_page(buffer_bytes + static_cast<size_t>(hosts) * kAlignPadding);
}

}  // namespace

int Placement::ranks() const {
  size_t all = 0;
  for (const std::vector<int>& ranks : ranks_on) all += ranks.size();
  return static_cast<int>(all);
}

size_t Placement::max_ranks_per_host() const {
  size_t most = 0;
  for (const std::vector<int>& ranks : ranks_on) most = std::max(most, ranks.size());
  return most;
}

Placement make_placement(int rank, const std::vector<int>& host_of) {
  Placement placement;
  std::vector<int> known_hosts;
  for (size_t member = 0; member < host_of.size(); ++member) {
    const auto found = std::find(known_hosts.begin(), known_hosts.end(), host_of[member]);
    const size_t host = static_cast<size_t>(found - known_hosts.begin());
    if (found == known_hosts.end()) {
      known_hosts.push_back(host_of[member]);
      placement.ranks_on.emplace_back();
    }
    placement.ranks_on[host].push_back(static_cast<int>(member));
    if (static_cast<int>(member) == rank) placement.host = static_cast<int>(host);
  }
  placement.rank = rank;
  return placement;
}

size_t Hosts::bytes(int hosts, size_t buffer_bytes) {
  return round_up_to_page(sizeof(Counter)) + kBuffers * padded_bytes(hosts, buffer_bytes);
}

Hosts::Hosts(void* base, Placement placement, size_t buffer_bytes, const Costs& costs, Link* link, Channel& channel,
             bool oversubscribed)
    : base_(static_cast<char*>(base)),
      placement_(std::move(placement)),
      buffer_bytes_(buffer_bytes),
      costs_(costs),
      link_(link),
      channel_(channel),
      oversubscribed_(oversubscribed) {
  for (int step = 1; step < hosts(); ++step) peers_.push_back((host() + step) % hosts());
}

char* Hosts::buffer(size_t number) const {
  return base_ + round_up_to_page(sizeof(Counter)) + number * padded_bytes(hosts(), buffer_bytes_);
}

void Hosts::FreeDeleter::operator()(char* memory) const { std::free(memory); }

char* Hosts::leader_memory(size_t bytes) {
  if (bytes > leader_memory_bytes_) {
    leader_memory_.reset();
    leader_memory_.reset(static_cast<char*>(std::aligned_alloc(4096, round_up_to_page(bytes))));
    if (!leader_memory_)
      throw Failure("out of memory for the data of other hosts. Received: bytes=" + std::to_string(bytes));
    leader_memory_bytes_ = bytes;
  }
  return leader_memory_.get();
}

void Hosts::send(int host, const void* data, size_t bytes, Link::Stream stream) {
  if (host == placement_.host || bytes == 0) return;
  started_.push_back(link_->send(host, stream, data, bytes));
}

void Hosts::receive(int host, void* data, size_t bytes, Link::Stream stream) {
  if (host == placement_.host || bytes == 0) return;
  started_.push_back(link_->receive(host, stream, data, bytes));
}

std::vector<Link::Handle> Hosts::take_started() { return std::exchange(started_, {}); }

void Hosts::wait(const std::vector<Link::Handle>& handles) {
  Polling polling(oversubscribed_);
  for (const Link::Handle handle : handles) {
    while (!link_->done(handle)) {
      channel_.abort().check();
      if (!polling.keep_polling()) {
        if (poll_while_idle_) poll_while_idle_();
        link_->sleep(Polling::kMaxSleepMicros, -1);
      }
      link_->progress();
    }
  }
}

void Hosts::signal_ready() { ready_counter().advance_to(++ready_signals_); }

void Hosts::wait_ready() { ready_counter().wait(++ready_signals_, channel_.spin_policy(), channel_.abort()); }

}  // namespace hvkeras
