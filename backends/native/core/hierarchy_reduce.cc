// Reductions over several hosts: allreduce, and that of parts.
#include "doubling.h"
#include "hierarchy.h"
#include "hosts.h"
#include "segments.h"

namespace hvkeras::between_hosts {

namespace {

// The segments of a reduction of parts: of each rank's part a piece at a time, one host's ranks after the other, so
// that what a host needs is in one place.
struct PartSegments {
  std::vector<Span> pieces;
  std::vector<Segment> segments;
  std::vector<size_t> own;  // where in each segment this rank's piece begins

  PartSegments(const Placement& placement, const std::vector<Spans>& parts, size_t room) {
    size_t most = 0, end = 0;
    for (const Spans& part : parts) most = std::max(most, part.count());
    for (size_t done = 0; done < most; done += room) {
      Segment segment{segments.size(), end, end, {0}};
      for (const std::vector<int>& on_host : placement.ranks_on) {
        for (const int rank : on_host) {
          if (rank == placement.rank) own.push_back(end - segment.start);
          const Spans& part = parts[static_cast<size_t>(rank)];
          part.visit(done, std::min(done + room, part.count()), [&](const char* in, char*, size_t, size_t count) {
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

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, Factors factors) {
  Hosts& hosts = *channel.hosts();
  const size_t size = spans.element_bytes(), parts = static_cast<size_t>(hosts.hosts());
  const size_t most = std::min(channel.slot_bytes(), hosts.area_bytes()) / size / kAligned * kAligned;
  const size_t count = std::min(spans.count(), most);  // of a segment, but for the last
  const Path path = hosts.path_of(spans.count() * size, type);
  const bool doubled = path == Path::kDoubled, one_hop = path != Path::kInParts;
  using Way = Segments::Way;
  Segments segments(channel, spans, type, reduction, factors, doubled ? Way::kThroughAreas : Way::kStraight);
  const auto segment_of = [&](size_t number) {
    Segment segment{number, number * count, std::min((number + 1) * count, spans.count()), {}};
    const size_t length = segment.stop - segment.start;
    const size_t part = one_hop ? length : rounded_up(divided_up(length, parts), kAligned);
    for (size_t index = 0; index <= (one_hop ? 1 : parts); ++index)
      segment.bounds.push_back(std::min(index * part, length));
    return segment;
  };
  if (doubled) {
    const Segment segment = segment_of(0);
    segments.sum_in_host(segment);
    if (hosts.leads()) double_up(hosts, segments.wire(segment), spans.count(), type, reduction, segments.among_hosts());
    segments.share(segment);
    return;
  }
  const size_t all = divided_up(spans.count(), count);
  UnderWay expected, started;  // the other hosts' parts; and all else
  size_t next = 0;             // the first segment that is not expected yet
  in_flight(
      all, kExchangeAfter, kReadAfter,
      [&](size_t number) {
        for (; hosts.leads() && next < std::min(all, number + 1 + kAhead); ++next)
          expected.add(next, segments.expect(segment_of(next)));
        const Segment segment = segment_of(number);
        segments.sum_in_host(segment);
        if (!hosts.leads()) return;
        if (!one_hop) started.add(number, segments.expect_results(segment));
        started.add(number, segments.send(segment));
      },
      [&](size_t number) {
        if (!hosts.leads()) return;
        expected.await(hosts, number);
        if (one_hop) started.await(hosts, number);  // the sum takes the place of what was sent
        segments.combine(segment_of(number));
        if (!one_hop) started.add(number, segments.send_results(segment_of(number)));
      },
      [&](size_t number) {
        if (hosts.leads()) started.await(hosts, number);
        segments.share(segment_of(number));
      });
}

void reduce_parts(Channel& channel, const std::vector<Spans>& parts, Type type, Reduction reduction, Factors factors) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  const size_t size = size_of(type), ranks = parts.size();
  const size_t room = std::min(channel.slot_bytes() / ranks,
                               hosts.area_bytes() / (placement.most_on_a_host() * placement.ranks_on.size())) /
                      size;
  if (room == 0)
    throw Failure("there are too many ranks for a reduction of parts. Received: ranks=" + std::to_string(ranks));
  const PartSegments divided(placement, parts, room);
  const Spans spans(divided.pieces, size);
  Segments segments(channel, spans, type, reduction, factors, Segments::Way::kIntoAreas);
  UnderWay expected, started;
  size_t next = 0;
  const size_t all = divided.segments.size();
  const Spans& own = parts[static_cast<size_t>(placement.rank)];
  in_flight(
      all, kExchangeAfter, kReadAfter,
      [&](size_t number) {
        for (; hosts.leads() && next < std::min(all, number + 1 + kAhead); ++next)
          expected.add(next, segments.expect(divided.segments[next]));
        segments.sum_in_host(divided.segments[number]);
        if (hosts.leads()) started.add(number, segments.send(divided.segments[number]));
      },
      [&](size_t number) {
        if (!hosts.leads()) return;
        expected.await(hosts, number);
        segments.combine(divided.segments[number]);
        started.await(hosts, number);
        hosts.announce();
      },
      [&](size_t number) {
        if (!hosts.leads()) hosts.await_announced();
        const char* const sums = segments.wire(divided.segments[number]) + divided.own[number] * size;
        own.visit(number * room, std::min((number + 1) * room, own.count()),
                  [&](const char*, char* out, size_t before, size_t count) { copy(out, sums + before, count * size); });
      });
}

}  // namespace hvkeras::between_hosts
