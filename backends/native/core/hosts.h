// The other hosts of a group, as a rank sees them: who is where, and memory in which the ranks of its host prepare what
// the host's leader exchanges with the other leaders.
#pragma once

#include <functional>
#include <vector>

#include "channel.h"
#include "link.h"

namespace hvkeras {

// Which ranks of a group, numbered within it, are on which host; hosts in the order of their first ranks.
struct Placement {
  int rank = 0;                            // this rank
  int host = 0;                            // its host
  std::vector<std::vector<int>> ranks_on;  // for each host, ascending

  int ranks() const;
  int hosts() const { return static_cast<int>(ranks_on.size()); }
  size_t most_on_a_host() const;
};
// `host_of` has a number for each rank of the group that tells its host from others.
Placement placement_of(int rank, const std::vector<int>& host_of);

class Hosts {
 public:
  static constexpr int kAreas = 5;

  static size_t bytes(int hosts, size_t area_bytes);
  // `base` is zeroed memory of `bytes()`, aligned to a page, the same for all ranks of the host, of which the first has
  // the link. All hosts have areas of the same size.
  Hosts(void* base, Placement placement, size_t area_bytes, Link* link, Channel& channel, bool crowded);

  const Placement& placement() const { return placement_; }
  int host() const { return placement_.host; }
  int hosts() const { return placement_.hosts(); }
  bool leads() const { return link_ != nullptr; }
  size_t area_bytes() const { return area_bytes_; }
  // Memory that the ranks of this host share, for as much as `area_bytes` and some alignment of each host's part.
  char* area(size_t number) const;

  // The leader's steps: start to send and receive (nothing, if it is no bytes or this host), and wait for all of it.
  void send(int host, const void* data, size_t bytes);
  void receive(int host, void* data, size_t bytes);
  // All that was started since the last time this was asked for.
  std::vector<Link::Ticket> started();
  void await(const std::vector<Link::Ticket>& tickets);
  // Whether something is still under way, as an abort leaves it: then the memory must stay.
  bool busy() const { return under_way_ != 0; }
  // What the leader does while it waits.
  void meanwhile(std::function<void()> step) { meanwhile_ = std::move(step); }

  // A word of the leader's to the ranks of its host, one after the other: the areas are ready to be read.
  void announce();
  void await_announced();

 private:
  Counter& announced() const { return *reinterpret_cast<Counter*>(base_); }

  char* base_;
  Placement placement_;
  size_t area_bytes_;
  Link* link_;
  Channel& channel_;
  bool crowded_;
  std::vector<Link::Ticket> started_;
  size_t under_way_ = 0;
  std::function<void()> meanwhile_;
  uint32_t announcements_ = 0;
};

}  // namespace hvkeras
