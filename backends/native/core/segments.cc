#include "segments.h"

namespace hvkeras::between_hosts {

Segments::Segments(Channel& channel, const Spans& spans, Type type, Reduction reduction, Factors factors, Way way)
    : channel_(channel),
      hosts_(*channel.hosts()),
      spans_(spans),
      reduce_(reducer_of(type, reduction)),
      factors_(split(type, reduction, factors)),
      in_areas_(way == Way::kIntoAreas),
      as_they_are_(way != Way::kThroughAreas && channel.ranks() == 1 && factors_.first.before == 1.0 &&
                   factors_.first.after == 1.0),
      sources_(static_cast<size_t>(std::max(channel.ranks(), hosts_.hosts()))) {}

void Segments::sum_in_host(const Segment& segment) {
  if (channel_.ranks() == 1) return gather(segment);
  const size_t ranks = static_cast<size_t>(channel_.ranks()), size = spans_.element_bytes();
  const size_t part = rounded_up(divided_up(segment.stop - segment.start, ranks), kAligned);
  const auto first_of = [&](int rank) {
    return std::min(segment.start + static_cast<size_t>(rank) * part, segment.stop);
  };
  const uint32_t round = channel_.round(), result = channel_.result_round();
  char* const mine = channel_.slot(round, channel_.rank());
  for (int step = 1; step < channel_.ranks(); ++step) {
    const int rank = (channel_.rank() + step) % channel_.ranks();
    spans_.visit(first_of(rank), first_of(rank + 1), [&](const char* in, char*, size_t before, size_t count) {
      channel_.writer().write(mine + (first_of(rank) - segment.start) * size + before, in, count * size);
    });
  }
  channel_.exchange();
  const size_t offset = (first_of(channel_.rank()) - segment.start) * size;
  spans_.visit(first_of(channel_.rank()), first_of(channel_.rank() + 1),
               [&](const char* in, char*, size_t before, size_t count) {
                 for (int rank = 0; rank < channel_.ranks(); ++rank) {
                   sources_[static_cast<size_t>(rank)] =
                       rank == channel_.rank() ? in : channel_.slot(round, rank) + offset + before;
                 }
                 reduce_(wire(segment) + offset + before, sources_.data(), channel_.ranks(), count,
                         factors_.first.before, factors_.first.after);
               });
  channel_.result_written();
  if (!hosts_.leads()) return;
  for (int rank = 0; rank < channel_.ranks(); ++rank) channel_.await_result(result, rank);
}

Tickets Segments::expect(const Segment& segment) {
  const size_t mine = part_of(segment, hosts_.host()).bytes;
  for (const int host : hosts_.others()) hosts_.receive(host, incoming(segment, host), mine, Link::kParts);
  return hosts_.started();
}

Tickets Segments::send(const Segment& segment) {
  for (const int host : hosts_.others()) {
    const Part part = part_of(segment, host);
    hosts_.send(host, part.source, part.bytes, Link::kParts);
  }
  return hosts_.started();
}

Tickets Segments::expect_results(const Segment& segment) {
  for (const int host : hosts_.others()) {
    const Part part = part_of(segment, host);
    hosts_.receive(host, part.target, part.bytes, Link::kResults);
  }
  return hosts_.started();
}

void Segments::combine(const Segment& segment) {
  const Part own = part_of(segment, hosts_.host());
  if (own.bytes == 0) return;
  for (int host = 0; host < hosts_.hosts(); ++host)
    sources_[static_cast<size_t>(host)] = host == hosts_.host() ? own.source : incoming(segment, host);
  reduce_(own.target, sources_.data(), hosts_.hosts(), own.bytes / spans_.element_bytes(), factors_.second.before,
          factors_.second.after);
}

Tickets Segments::send_results(const Segment& segment) {
  const Part own = part_of(segment, hosts_.host());
  for (const int host : hosts_.others()) hosts_.send(host, own.target, own.bytes, Link::kResults);
  return hosts_.started();
}

void Segments::share(const Segment& segment) {
  if (hosts_.leads()) {
    hosts_.announce();
  } else {
    hosts_.await_announced();
  }
  if (channel_.ranks() > 1) return read(segment, segment.start, segment.stop);
  for (size_t part = 0; part + 1 < segment.bounds.size(); ++part) {
    const size_t start = segment.start + segment.bounds[part], stop = segment.start + segment.bounds[part + 1];
    if (!as_it_is(start, stop)) read(segment, start, stop);
  }
}

Segments::Part Segments::part_of(const Segment& segment, int host) const {
  const size_t index = segment.bounds.size() == 2 ? 0 : static_cast<size_t>(host);
  const size_t first = segment.bounds[index], last = segment.bounds[index + 1], size = spans_.element_bytes();
  const Span there = spans_.within(segment.start + first, segment.start + last);
  char* const in_area = wire(segment) + first * size;
  const bool as_it_is = as_they_are_ && there.count != 0;
  return {as_it_is ? there.in : in_area, as_it_is && !in_areas_ ? there.out : in_area, (last - first) * size};
}

// For the only rank of a host: brings the parts that are not sent as they are into the area.
void Segments::gather(const Segment& segment) {
  for (size_t part = 0; part + 1 < segment.bounds.size(); ++part) {
    const size_t start = segment.start + segment.bounds[part], stop = segment.start + segment.bounds[part + 1];
    if (as_it_is(start, stop)) continue;
    char* const target = wire(segment) + segment.bounds[part] * spans_.element_bytes();
    spans_.visit(start, stop, [&](const char* in, char*, size_t before, size_t count) {
      sources_[0] = in;
      reduce_(target + before, sources_.data(), 1, count, factors_.first.before, factors_.first.after);
    });
  }
}

void Segments::read(const Segment& segment, size_t start, size_t stop) {
  const char* const from = wire(segment) + (start - segment.start) * spans_.element_bytes();
  spans_.visit(start, stop, [&](const char*, char* out, size_t before, size_t count) {
    copy(out, from + before, count * spans_.element_bytes());
  });
}

// Where a host's numbers for this host's part come to.
char* Segments::incoming(const Segment& segment, int host) const {
  constexpr size_t kPlaces = kExchangeAfter + 1 + kAhead;
  const size_t mine = rounded_up(part_of(segment, hosts_.host()).bytes, kAligned);
  const size_t each = rounded_up(hosts_.area_bytes(), kAligned) + static_cast<size_t>(hosts_.hosts()) * 1024;
  return hosts_.own_memory(kPlaces * each) + segment.number % kPlaces * each + static_cast<size_t>(host) * mine;
}

}  // namespace hvkeras::between_hosts
