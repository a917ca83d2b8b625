// Reductions across hosts: allreduce and reduce_parts.
#include "hierarchical.h"
#include "hosts.h"
#include "recursive_doubling.h"
#include "segments.h"

namespace hvkeras::between_hosts {

namespace {

// The segments of reduce_parts: each holds a piece of every rank's part, ordered by host, so that all data for one host
// is contiguous.
struct PartSegments {
  std::vector<Span> pieces;
  std::vector<Segment> segments;
  std::vector<size_t> own_offsets;  // of this rank's piece in each segment

  PartSegments(const Placement& placement, const std::vector<Spans>& parts, size_t capacity) {
    size_t max_count = 0, end = 0;
    for (const Spans& part : parts) max_count = std::max(max_count, part.count());
    for (size_t done = 0; done < max_count; done += capacity) {
      Segment segment{segments.size(), end, end, {0}};
      for (const std::vector<int>& on_host : placement.ranks_on) {
        for (const int rank : on_host) {
          if (rank == placement.rank) own_offsets.push_back(end - segment.start);
          const Spans& part = parts[static_cast<size_t>(rank)];
          part.visit(done, std::min(done + capacity, part.count()), [&](const char* in, char*, size_t, size_t count) {
            pieces.push_back({in, nullptr, count});
            end += count;
          });
        }
        segment.bounds.push_back(end - segment.start);
      }
      segment.stop = end;
      segments.push_back(segment);
    }
  }
};

}  // namespace

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors) {
  Hosts& hosts = *channel.hosts();
  const size_t size = spans.element_bytes(), parts = static_cast<size_t>(hosts.hosts());
  const size_t max_count =
      std::min(channel.slot_bytes(), hosts.buffer_bytes()) / size / kAlignElements * kAlignElements;
  const size_t count = std::min(spans.count(), max_count);  // elements of each segment but the last
  const Algorithm algorithm = hosts.choose_algorithm(spans.count() * size, type);
  const bool is_doubling = algorithm == Algorithm::kRecursiveDoubling, one_hop = algorithm != Algorithm::kReduceScatter;
  using Staging = Segments::Staging;
  Segments segments(channel, spans, type, reduction, factors, is_doubling ? Staging::kAll : Staging::kNone);
  const auto segment_of = [&](size_t number) {
    Segment segment{number, number * count, std::min((number + 1) * count, spans.count()), {}};
    const size_t length = segment.stop - segment.start;
    const size_t part = one_hop ? length : round_up(ceil_div(length, parts), kAlignElements);
    for (size_t index = 0; index <= (one_hop ? 1 : parts); ++index)
      segment.bounds.push_back(std::min(index * part, length));
    return segment;
  };
  if (is_doubling) {
    const Segment segment = segment_of(0);
    segments.reduce_in_host(segment);
    if (hosts.is_leader())
      recursive_doubling_allreduce(hosts, segments.buffer(segment), spans.count(), type, reduction,
                                   segments.across_hosts());
    segments.share_result(segment);
    return;
  }
  const size_t all = ceil_div(spans.count(), count);
  InFlight receives, started;  // receives of the other hosts' parts, and all other transfers
  size_t next = 0;             // the first segment whose receives are not posted yet
  run_pipelined(
      all, kExchangeAfter, kReadAfter,
      [&](size_t number) {
        for (; hosts.is_leader() && next < std::min(all, number + 1 + kPrepostedSegments); ++next)
          receives.add(next, segments.post_receives(segment_of(next)));
        const Segment segment = segment_of(number);
        segments.reduce_in_host(segment);
        if (!hosts.is_leader()) return;
        if (!one_hop) started.add(number, segments.post_result_receives(segment));
        started.add(number, segments.send(segment));
      },
      [&](size_t number) {
        if (!hosts.is_leader()) return;
        receives.wait(hosts, number);
        if (one_hop) started.wait(hosts, number);  // the result overwrites the buffer that was sent
        segments.reduce_own_part(segment_of(number));
        if (!one_hop) started.add(number, segments.send_results(segment_of(number)));
      },
      [&](size_t number) {
        if (hosts.is_leader()) started.wait(hosts, number);
        segments.share_result(segment_of(number));
      });
}

void reduce_parts(Channel& channel, const std::vector<Spans>& parts, Type type, Reduction reduction,
                  ScaleFactors factors) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  const size_t size = size_of(type), ranks = parts.size();
  const size_t capacity =
      std::min(channel.slot_bytes() / ranks,
               hosts.buffer_bytes() / (placement.max_ranks_per_host() * placement.ranks_on.size())) /
      size;
  if (capacity == 0) throw Failure("too many ranks to reduce parts. Received: ranks=" + std::to_string(ranks));
  const PartSegments layout(placement, parts, capacity);
  const Spans spans(layout.pieces, size);
  Segments segments(channel, spans, type, reduction, factors, Segments::Staging::kResults);
  InFlight receives, started;
  size_t next = 0;
  const size_t all = layout.segments.size();
  const Spans& own_offsets = parts[static_cast<size_t>(placement.rank)];
  run_pipelined(
      all, kExchangeAfter, kReadAfter,
      [&](size_t number) {
        for (; hosts.is_leader() && next < std::min(all, number + 1 + kPrepostedSegments); ++next)
          receives.add(next, segments.post_receives(layout.segments[next]));
        segments.reduce_in_host(layout.segments[number]);
        if (hosts.is_leader()) started.add(number, segments.send(layout.segments[number]));
      },
      [&](size_t number) {
        if (!hosts.is_leader()) return;
        receives.wait(hosts, number);
        segments.reduce_own_part(layout.segments[number]);
        started.wait(hosts, number);
        hosts.signal_ready();
      },
      [&](size_t number) {
        if (!hosts.is_leader()) hosts.wait_ready();
        const char* const sums = segments.buffer(layout.segments[number]) + layout.own_offsets[number] * size;
        own_offsets.visit(number * capacity, std::min((number + 1) * capacity, own_offsets.count()),
                          [&](const char*, char* out, size_t byte_offset, size_t count) {
                            copy(out, sums + byte_offset, count * size);
                          });
      });
}

}  // namespace hvkeras::between_hosts
