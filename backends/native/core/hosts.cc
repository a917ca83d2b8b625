#include "hosts.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace hvkeras {

namespace {

constexpr size_t kSlack = 1024;  // for the alignment of a host's part of an area: 64 elements of the largest type

size_t paged(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

size_t spaced(int hosts, size_t area_bytes) { return paged(area_bytes + static_cast<size_t>(hosts) * kSlack); }

}  // namespace

int Placement::ranks() const {
  size_t all = 0;
  for (const std::vector<int>& ranks : ranks_on) all += ranks.size();
  return static_cast<int>(all);
}

size_t Placement::most_on_a_host() const {
  size_t most = 0;
  for (const std::vector<int>& ranks : ranks_on) most = std::max(most, ranks.size());
  return most;
}

Placement placement_of(int rank, const std::vector<int>& host_of) {
  Placement placement;
  std::vector<int> seen;
  for (size_t member = 0; member < host_of.size(); ++member) {
    const auto found = std::find(seen.begin(), seen.end(), host_of[member]);
    const size_t host = static_cast<size_t>(found - seen.begin());
    if (found == seen.end()) {
      seen.push_back(host_of[member]);
      placement.ranks_on.emplace_back();
    }
    placement.ranks_on[host].push_back(static_cast<int>(member));
    if (static_cast<int>(member) == rank) placement.host = static_cast<int>(host);
  }
  placement.rank = rank;
  return placement;
}

size_t Hosts::bytes(int hosts, size_t area_bytes) {
  return paged(sizeof(Counter)) + kAreas * spaced(hosts, area_bytes);
}

Hosts::Hosts(void* base, Placement placement, size_t area_bytes, const Costs& costs, Link* link, Channel& channel,
             bool oversubscribed)
    : base_(static_cast<char*>(base)),
      placement_(std::move(placement)),
      area_bytes_(area_bytes),
      costs_(costs),
      link_(link),
      channel_(channel),
      oversubscribed_(oversubscribed) {
  for (int step = 1; step < hosts(); ++step) others_.push_back((host() + step) % hosts());
}

char* Hosts::area(size_t number) const {
  return base_ + paged(sizeof(Counter)) + number * spaced(hosts(), area_bytes_);
}

void Hosts::Freed::operator()(char* memory) const { std::free(memory); }

char* Hosts::own_memory(size_t bytes) {
  if (bytes > own_bytes_) {
    own_memory_.reset();
    own_memory_.reset(static_cast<char*>(std::aligned_alloc(4096, paged(bytes))));
    if (!own_memory_) throw Failure("there is no memory for " + std::to_string(bytes) + " bytes of other hosts");
    own_bytes_ = bytes;
  }
  return own_memory_.get();
}

void Hosts::send(int host, const void* data, size_t bytes, Link::Stream stream) {
  if (host == placement_.host || bytes == 0) return;
  started_.push_back(link_->send(host, stream, data, bytes));
}

void Hosts::receive(int host, void* data, size_t bytes, Link::Stream stream) {
  if (host == placement_.host || bytes == 0) return;
  started_.push_back(link_->receive(host, stream, data, bytes));
}

std::vector<Link::Ticket> Hosts::started() { return std::exchange(started_, {}); }

void Hosts::await(const std::vector<Link::Ticket>& tickets) {
  Polling polling(oversubscribed_);
  for (const Link::Ticket ticket : tickets) {
    while (!link_->done(ticket)) {
      channel_.abort().check();
      if (!polling.goes_on()) {
        if (poll_while_idle_) poll_while_idle_();
        link_->sleep(Polling::kLongestSleep, -1);
      }
      link_->progress();
    }
  }
}

void Hosts::announce() { announced().advance_to(++announcements_); }

void Hosts::await_announced() { announced().await(++announcements_, channel_.patience(), channel_.abort()); }

}  // namespace hvkeras
