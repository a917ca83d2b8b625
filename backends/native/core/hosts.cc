#include "hosts.h"

#include <algorithm>
#include <utility>

namespace hvkeras {

namespace {

constexpr size_t kSlack = 1024;  // for the alignment of a host's part of an area: 64 elements of the largest type

// Looks before a wait for data sleeps. All hosts are there, so it will not be long, and a network moves on with each
// look.
constexpr int kYields = 10'000;

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

Hosts::Hosts(void* base, Placement placement, size_t area_bytes, Link* link, Channel& channel, bool crowded)
    : base_(static_cast<char*>(base)),
      placement_(std::move(placement)),
      area_bytes_(area_bytes),
      link_(link),
      channel_(channel),
      crowded_(crowded) {}

char* Hosts::area(size_t number) const {
  return base_ + paged(sizeof(Counter)) + number * spaced(hosts(), area_bytes_);
}

void Hosts::send(int host, const void* data, size_t bytes) {
  if (host == placement_.host || bytes == 0) return;
  started_.push_back(link_->send(host, data, bytes));
  ++under_way_;
}

void Hosts::receive(int host, void* data, size_t bytes) {
  if (host == placement_.host || bytes == 0) return;
  started_.push_back(link_->receive(host, data, bytes));
  ++under_way_;
}

std::vector<Link::Ticket> Hosts::started() { return std::exchange(started_, {}); }

void Hosts::await(const std::vector<Link::Ticket>& tickets) {
  for (const Link::Ticket ticket : tickets) {
    Pauses pauses(crowded_, kYields);
    while (!link_->done(ticket)) {
      channel_.abort().check();
      if (meanwhile_) meanwhile_();
      pauses.sleep();
    }
    --under_way_;
  }
}

void Hosts::announce() { announced().advance_to(++announcements_); }

void Hosts::await_announced() { announced().await(++announcements_, channel_.patience(), channel_.abort()); }

}  // namespace hvkeras
