// The segments of a large reduction between hosts. Each host sends every other host its part of a segment, reduces what
// it receives for its own part, and sends the result to all others: a direct reduce-scatter and allgather. It sends as
// few bytes as a ring, in two hops.
#pragma once

#include <utility>
#include <vector>

#include "hierarchical.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

// A segment's parts are reduced `kExchangeAfter` segments after it was started, and its result is read `kReadAfter`
// segments after that start; the segments between are in flight. One segment later its buffer is free again.
constexpr size_t kExchangeAfter = 3, kReadAfter = 6, kSegmentBuffers = kReadAfter + 1;
static_assert(kSegmentBuffers <= Hosts::kBuffers);
// Receives are posted this many segments ahead, as other hosts may be ahead.
constexpr size_t kPrepostedSegments = 2;

// The partition of a segment's elements [0, count) among the hosts: host h reduces [bounds[h], bounds[h + 1]). With
// only two bounds, every host reduces all elements.
using Bounds = std::vector<size_t>;

// A segment: elements [start, stop) of the tensors.
struct Segment {
  size_t number, start, stop;
  Bounds bounds;
};

using Handles = std::vector<Link::Handle>;

// The steps of each segment: reduction within the host into a staging buffer, exchange with other hosts, reduction
// across hosts.
class Segments {
 public:
  // The use of staging buffers if a host has a single rank and the numbers are contiguous: none (from tensor to
  // tensor), only for results, or for all data, as in all other cases.
  enum class Staging { kNone, kResults, kAll };

  Segments(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors, Staging staging);

  char* buffer(const Segment& segment) const { return hosts_.buffer(segment.number % kSegmentBuffers); }
  ScaleFactors across_hosts() const { return factors_.second; }

  // Reduces the segment over the ranks of this host; the leader waits until all ranks have finished.
  void reduce_in_host(const Segment& segment);
  // Leader only: posts receives of the other hosts' parts of a segment.
  Handles post_receives(const Segment& segment);
  // Leader only: sends each host its part of this host's sum.
  Handles send(const Segment& segment);
  // Leader only: posts receives of the other hosts' results.
  Handles post_result_receives(const Segment& segment);
  // Leader only: reduces this host's part over all hosts, in the order of the hosts.
  void reduce_own_part(const Segment& segment);
  // Leader only: sends this host's part of the result to the other hosts.
  Handles send_results(const Segment& segment);
  // Copies the result to the outputs, once the leader has it.
  void share_result(const Segment& segment);

 private:
  // A host's part of a segment: the address of this host's sum, and that of the result.
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
  const std::pair<ScaleFactors, ScaleFactors> factors_;  // within a host, and across hosts
  const bool stages_results_;
  const bool zero_copy_;  // whether the tensors are sent directly, without a reduction in the host
  std::vector<const void*> sources_;
};

// The transfers in flight of each segment, in a ring buffer.
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
