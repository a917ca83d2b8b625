// Segments of a long reduction between hosts, on their way: each host sends every other one its part of a segment, adds
// up what it gets of its own part, and sends all others the result. That is as few bytes as by a ring, in two hops.
#pragma once

#include <utility>
#include <vector>

#include "hierarchical.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

// So many segments after a segment has begun its way its parts are added up, and its result is read: as many are on the
// wire meanwhile. A segment's place in memory is free for the one after that.
constexpr size_t kExchangeAfter = 3, kReadAfter = 6, kSegmentBuffers = kReadAfter + 1;
static_assert(kSegmentBuffers <= Hosts::kBuffers);
// So many segments before its turn a segment's parts may come, as other hosts may be ahead.
constexpr size_t kPrepostedSegments = 2;

// Elements [0, count) of a segment are divided among the hosts: host h reduces [bounds[h], bounds[h + 1]). Bounds of
// one part mean all for each host.
using Bounds = std::vector<size_t>;

// A segment: elements [start, stop) of the tensors.
struct Segment {
  size_t number, start, stop;
  Bounds bounds;
};

using Handles = std::vector<Link::Handle>;

// The steps of a segment's way: its host's sum in an area, the exchange with other hosts, the sum of the hosts' sums.
class Segments {
 public:
  // Where numbers go that a host's only rank has in one piece: straight from tensor to tensor, from a tensor into an
  // area, or through areas, as all others.
  enum class Staging { kNone, kResults, kAll };

  Segments(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors, Staging staging);

  char* buffer(const Segment& segment) const { return hosts_.buffer(segment.number % kSegmentBuffers); }
  ScaleFactors across_hosts() const { return factors_.second; }

  // Combines what the ranks of this host have of a segment; the leader waits until all have done their part.
  void reduce_in_host(const Segment& segment);
  // The leader's: asks for the other hosts' parts of a segment.
  Handles post_receives(const Segment& segment);
  // The leader's: sends each host its part of this host's sum.
  Handles send(const Segment& segment);
  // The leader's: asks for what the other hosts will have added up.
  Handles post_result_receives(const Segment& segment);
  // The leader's: adds up what came, in the order of the hosts.
  void reduce_own_part(const Segment& segment);
  // The leader's: sends the others what this host has added up.
  Handles send_results(const Segment& segment);
  // Copies the result to where it belongs, once the leader has it.
  void share_result(const Segment& segment);

 private:
  // A host's part of a segment: where this host's sum of it lies, and where the result goes.
  struct Part {
    const char* source;
    char* target;
    size_t bytes;
  };

  Part part_of(const Segment& segment, int host) const;
  bool is_zero_copy(size_t start, size_t stop) const { return zero_copy_ && spans_.within(start, stop).count != 0; }
  void stage_parts(const Segment& segment);
  void copy_out(const Segment& segment, size_t start, size_t stop);
  char* receive_buffer(const Segment& segment, int host) const;

  Channel& channel_;
  Hosts& hosts_;
  const Spans& spans_;
  Reducer reduce_;
  const std::pair<ScaleFactors, ScaleFactors> factors_;  // within the host, and among the hosts
  const bool stages_results_;
  const bool zero_copy_;  // whether numbers are sent without a step in the host before
  std::vector<const void*> sources_;
};

// What is under way of each segment, in a ring of as many as there can be at once.
class InFlight {
 public:
  void add(size_t segment, const Handles& added) {
    handles_of(segment).insert(handles_of(segment).end(), added.begin(), added.end());
  }
  void wait(Hosts& hosts, size_t segment) {
    hosts.wait(handles_of(segment));
    handles_of(segment).clear();
  }

 private:
  static constexpr size_t kMaxInFlight = kReadAfter + 1 + kPrepostedSegments;
  Handles& handles_of(size_t segment) { return handles_[segment % kMaxInFlight]; }

  Handles handles_[kMaxInFlight];
};

}  // namespace hvkeras::between_hosts
