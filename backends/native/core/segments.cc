#include "segments.h"

namespace hvkeras::between_hosts {

Segments::Segments(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors,
                   Staging staging)
    : channel_(channel),
      hosts_(*channel.hosts()),
      spans_(spans),
      reduce_(reducer_of(type, reduction)),
      factors_(split_factors(type, reduction, factors)),
      stages_results_(staging == Staging::kResults),
      zero_copy_(staging != Staging::kAll && channel.ranks() == 1 && factors_.first.prescale == 1.0 &&
                 factors_.first.postscale == 1.0),
      sources_(static_cast<size_t>(std::max(channel.ranks(), hosts_.hosts()))) {}

void Segments::reduce_in_host(const Segment& segment) {
  if (channel_.ranks() == 1) return stage_parts(segment);
  const size_t ranks = static_cast<size_t>(channel_.ranks()), size = spans_.element_bytes();
  const size_t part = round_up(ceil_div(segment.stop - segment.start, ranks), kAlignElements);
  const auto first_of = [&](int rank) {
    return std::min(segment.start + static_cast<size_t>(rank) * part, segment.stop);
  };
  const uint32_t round = channel_.round(), result = channel_.result_round();
  char* const mine = channel_.slot(round, channel_.rank());
  for (int step = 1; step < channel_.ranks(); ++step) {
    const int rank = (channel_.rank() + step) % channel_.ranks();
    spans_.visit(first_of(rank), first_of(rank + 1), [&](const char* in, char*, size_t byte_offset, size_t count) {
      channel_.writer().write(mine + (first_of(rank) - segment.start) * size + byte_offset, in, count * size);
    });
  }
  channel_.exchange();
  const size_t offset = (first_of(channel_.rank()) - segment.start) * size;
  spans_.visit(first_of(channel_.rank()), first_of(channel_.rank() + 1),
               [&](const char* in, char*, size_t byte_offset, size_t count) {
                 for (int rank = 0; rank < channel_.ranks(); ++rank) {
                   sources_[static_cast<size_t>(rank)] =
                       rank == channel_.rank() ? in : channel_.slot(round, rank) + offset + byte_offset;
                 }
                 reduce_(buffer(segment) + offset + byte_offset, sources_.data(), channel_.ranks(), count,
                         factors_.first.prescale, factors_.first.postscale);
               });
  channel_.publish_result();
  if (!hosts_.is_leader()) return;
  for (int rank = 0; rank < channel_.ranks(); ++rank) channel_.wait_result(result, rank);
}

Handles Segments::post_receives(const Segment& segment) {
  const size_t mine = part_of(segment, hosts_.host()).bytes;
  for (const int host : hosts_.peers()) hosts_.receive(host, receive_buffer(segment, host), mine, Link::kParts);
  return hosts_.take_started();
}

Handles Segments::send(const Segment& segment) {
  for (const int host : hosts_.peers()) {
    const Part part = part_of(segment, host);
    hosts_.send(host, part.source, part.bytes, Link::kParts);
  }
  return hosts_.take_started();
}

Handles Segments::post_result_receives(const Segment& segment) {
  for (const int host : hosts_.peers()) {
    const Part part = part_of(segment, host);
    hosts_.receive(host, part.target, part.bytes, Link::kResults);
  }
  return hosts_.take_started();
}

void Segments::reduce_own_part(const Segment& segment) {
  const Part own = part_of(segment, hosts_.host());
  if (own.bytes == 0) return;
  for (int host = 0; host < hosts_.hosts(); ++host)
    sources_[static_cast<size_t>(host)] = host == hosts_.host() ? own.source : receive_buffer(segment, host);
  reduce_(own.target, sources_.data(), hosts_.hosts(), own.bytes / spans_.element_bytes(), factors_.second.prescale,
          factors_.second.postscale);
}

Handles Segments::send_results(const Segment& segment) {
  const Part own = part_of(segment, hosts_.host());
  for (const int host : hosts_.peers()) hosts_.send(host, own.target, own.bytes, Link::kResults);
  return hosts_.take_started();
}

void Segments::share_result(const Segment& segment) {
  if (hosts_.is_leader()) {
    hosts_.signal_ready();
  } else {
    hosts_.wait_ready();
  }
  if (channel_.ranks() > 1) return copy_out(segment, segment.start, segment.stop);
  for (size_t part = 0; part + 1 < segment.bounds.size(); ++part) {
    const size_t start = segment.start + segment.bounds[part], stop = segment.start + segment.bounds[part + 1];
    if (!is_zero_copy(start, stop)) copy_out(segment, start, stop);
  }
}

Segments::Part Segments::part_of(const Segment& segment, int host) const {
  const size_t index = segment.bounds.size() == 2 ? 0 : static_cast<size_t>(host);
  const size_t first = segment.bounds[index], last = segment.bounds[index + 1], size = spans_.element_bytes();
  const Span span = spans_.within(segment.start + first, segment.start + last);
  char* const in_buffer = buffer(segment) + first * size;
  const bool is_zero_copy = zero_copy_ && span.count != 0;
  return {is_zero_copy ? span.in : in_buffer, is_zero_copy && !stages_results_ ? span.out : in_buffer,
          (last - first) * size};
}

// For the only rank of a host: copies the parts that cannot be sent without a copy into the staging buffer.
void Segments::stage_parts(const Segment& segment) {
  for (size_t part = 0; part + 1 < segment.bounds.size(); ++part) {
    const size_t start = segment.start + segment.bounds[part], stop = segment.start + segment.bounds[part + 1];
    if (is_zero_copy(start, stop)) continue;
    char* const target = buffer(segment) + segment.bounds[part] * spans_.element_bytes();
    spans_.visit(start, stop, [&](const char* in, char*, size_t byte_offset, size_t count) {
      sources_[0] = in;
      reduce_(target + byte_offset, sources_.data(), 1, count, factors_.first.prescale, factors_.first.postscale);
    });
  }
}

void Segments::copy_out(const Segment& segment, size_t start, size_t stop) {
  const char* const from = buffer(segment) + (start - segment.start) * spans_.element_bytes();
  spans_.visit(start, stop, [&](const char*, char* out, size_t byte_offset, size_t count) {
    copy(out, from + byte_offset, count * spans_.element_bytes());
  });
}

// Where another host's data for this host's part is received.
char* Segments::receive_buffer(const Segment& segment, int host) const {
  constexpr size_t kReceiveSlots = kExchangeAfter + 1 + kPrepostedSegments;
  const size_t mine = round_up(part_of(segment, hosts_.host()).bytes, kAlignElements);
  const size_t each = round_up(hosts_.buffer_bytes(), kAlignElements) + static_cast<size_t>(hosts_.hosts()) * 1024;
  return hosts_.leader_memory(kReceiveSlots * each) + segment.number % kReceiveSlots * each +
         static_cast<size_t>(host) * mine;
}

}  // namespace hvkeras::between_hosts
