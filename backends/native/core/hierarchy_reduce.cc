// Reductions over several hosts: allreduce and reducescatter.
#include "hierarchy.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

namespace {

// Bytes up to which each host sends all to all, which takes one hop instead of two.
constexpr size_t kOneHop = 64 * 1024;
constexpr size_t kWires = 3;  // areas with segments: one is prepared, one is under way, one is read

bool is_half(Type type) { return type == Type::kFloat16 || type == Type::kBfloat16; }

// Elements [0, count) of a segment are divided among the hosts: host h reduces [bounds[h], bounds[h + 1]).
using Bounds = std::vector<size_t>;

// The steps of a segment's way: its host's sum in an area, the exchange with other hosts, the sum of the hosts' sums.
class Segments {
 public:
  Segments(Channel& channel, const Spans& spans, Type type, Reduction reduction, Factors factors)
      : channel_(channel),
        hosts_(*channel.hosts()),
        spans_(spans),
        reduce_(reducer_of(type, reduction)),
        sources_(static_cast<size_t>(std::max(channel.ranks(), hosts_.hosts()))) {
    // Sums of half precisions are scaled before they are rounded: an average must not overflow on its way.
    const bool early = is_half(type) && reduction == Reduction::kSum;
    in_host_ = {factors.before, early ? factors.after : 1.0};
    among_hosts_ = {1.0, early ? 1.0 : factors.after};
  }

  char* wire(size_t segment) const { return hosts_.area(segment % kWires); }

  // Reduces elements [start, stop) over the ranks of this host; the leader waits until all have done their part.
  void sum_in_host(size_t segment, size_t start, size_t stop) {
    const size_t ranks = static_cast<size_t>(channel_.ranks()), size = spans_.element_bytes();
    const size_t part = rounded_up(divided_up(stop - start, ranks), kAligned);
    const auto first_of = [&](int rank) { return std::min(start + static_cast<size_t>(rank) * part, stop); };
    const uint32_t round = channel_.round(), result = channel_.result_round();
    char* const mine = channel_.slot(round, channel_.rank());
    for (int step = 1; step < channel_.ranks(); ++step) {
      const int rank = (channel_.rank() + step) % channel_.ranks();
      spans_.visit(first_of(rank), first_of(rank + 1), [&](const char* in, char*, size_t before, size_t count) {
        channel_.writer().write(mine + (first_of(rank) - start) * size + before, in, count * size);
      });
    }
    channel_.exchange();
    const size_t offset = (first_of(channel_.rank()) - start) * size;
    spans_.visit(first_of(channel_.rank()), first_of(channel_.rank() + 1),
                 [&](const char* in, char*, size_t before, size_t count) {
                   for (int rank = 0; rank < channel_.ranks(); ++rank) {
                     sources_[static_cast<size_t>(rank)] =
                         rank == channel_.rank() ? in : channel_.slot(round, rank) + offset + before;
                   }
                   reduce_(wire(segment) + offset + before, sources_.data(), channel_.ranks(), count, in_host_.before,
                           in_host_.after);
                 });
    channel_.result_written();
    if (!hosts_.leads()) return;
    for (int rank = 0; rank < channel_.ranks(); ++rank) channel_.await_result(result, rank);
  }

  // The leader's: sends each host its part, or all of it, and asks for theirs of this host's.
  std::vector<Link::Ticket> start(size_t segment, const Bounds& bounds) {
    const size_t mine = part_of(bounds, hosts_.host()).second;
    for (int host = 0; host < hosts_.hosts(); ++host)
      hosts_.receive(host, incoming(segment) + static_cast<size_t>(host) * mine, mine);
    for (int host = 0; host < hosts_.hosts(); ++host) {
      const auto [offset, bytes] = part_of(bounds, host);
      hosts_.send(host, wire(segment) + offset, bytes);
    }
    return hosts_.started();
  }

  // The leader's: adds up what came, in the order of the hosts.
  void combine(size_t segment, const Bounds& bounds) {
    const auto [offset, bytes] = part_of(bounds, hosts_.host());
    if (bytes == 0) return;
    for (int host = 0; host < hosts_.hosts(); ++host) {
      sources_[static_cast<size_t>(host)] =
          host == hosts_.host() ? wire(segment) + offset : incoming(segment) + static_cast<size_t>(host) * bytes;
    }
    reduce_(wire(segment) + offset, sources_.data(), hosts_.hosts(), bytes / spans_.element_bytes(),
            among_hosts_.before, among_hosts_.after);
  }

  // The leader's: sends the others what this host has reduced, and asks for what they have.
  std::vector<Link::Ticket> share(size_t segment, const Bounds& bounds) {
    const auto [mine, size] = part_of(bounds, hosts_.host());
    for (int host = 0; host < hosts_.hosts(); ++host) {
      const auto [offset, bytes] = part_of(bounds, host);
      hosts_.receive(host, wire(segment) + offset, bytes);
      hosts_.send(host, wire(segment) + mine, size);
    }
    return hosts_.started();
  }

 private:
  // Where a host's part of a segment lies: its offset and its size in bytes. Bounds of one part mean all for each host.
  std::pair<size_t, size_t> part_of(const Bounds& bounds, int host) const {
    const size_t place = bounds.size() == 2 ? 0 : static_cast<size_t>(host);
    return {bounds[place] * spans_.element_bytes(), (bounds[place + 1] - bounds[place]) * spans_.element_bytes()};
  }
  char* incoming(size_t segment) const { return hosts_.area(kWires + segment % 2); }

  Channel& channel_;
  Hosts& hosts_;
  const Spans& spans_;
  Reducer reduce_;
  Factors in_host_, among_hosts_;
  std::vector<const void*> sources_;
};

// Segments on their way, each in three steps that alternate with those of others: while one passes through this host's
// memory, others pass through the network.
template <typename Prepare, typename Exchange, typename Read>
void in_flight(size_t segments, Prepare&& prepare, Exchange&& exchange, Read&& read) {
  for (size_t step = 0; step < segments + 2; ++step) {
    if (step < segments) prepare(step);
    if (step >= 1 && step - 1 < segments) exchange(step - 1);
    if (step >= 2) read(step - 2);
  }
}

// The segments of a reducescatter: of each rank's part a piece at a time, one host's ranks after the other, so that
// what a host needs is in one place.
struct Deal {
  std::vector<Span> pieces;
  std::vector<size_t> starts{0};  // of the segments, among all pieces
  std::vector<size_t> own;        // where in each segment this rank's piece begins
  std::vector<Bounds> bounds;     // of the hosts in each segment

  Deal(const Placement& placement, const char* in, const std::vector<size_t>& starts_of_ranks, size_t size,
       size_t room) {
    size_t most = 0;
    for (size_t rank = 0; rank + 1 < starts_of_ranks.size(); ++rank)
      most = std::max(most, starts_of_ranks[rank + 1] - starts_of_ranks[rank]);
    for (size_t done = 0; done < most; done += room) {
      size_t length = 0;
      bounds.push_back({0});
      for (const std::vector<int>& on_host : placement.ranks_on) {
        for (const int rank : on_host) {
          const size_t first = starts_of_ranks[static_cast<size_t>(rank)];
          const size_t all = starts_of_ranks[static_cast<size_t>(rank) + 1] - first;
          const size_t count = done < all ? std::min(all - done, room) : 0;
          if (rank == placement.rank) own.push_back(length);
          pieces.push_back({in + (first + done) * size, nullptr, count});
          length += count;
        }
        bounds.back().push_back(length);
      }
      starts.push_back(starts.back() + length);
    }
  }
};

}  // namespace

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, Factors factors) {
  Hosts& hosts = *channel.hosts();
  Segments segments(channel, spans, type, reduction, factors);
  const size_t size = spans.element_bytes(), parts = static_cast<size_t>(hosts.hosts());
  const size_t most = std::min(channel.slot_bytes(), hosts.area_bytes()) / size / kAligned * kAligned;
  const size_t count = std::min(spans.count(), most);  // of a segment, but for the last
  const bool one_hop = spans.count() * size * parts <= std::min(kOneHop, hosts.area_bytes());
  const auto end_of = [&](size_t segment) { return std::min((segment + 1) * count, spans.count()); };
  const auto bounds_of = [&](size_t segment) {
    const size_t length = end_of(segment) - segment * count;
    if (one_hop) return Bounds{0, length};
    Bounds bounds;
    const size_t part = rounded_up(divided_up(length, parts), kAligned);
    for (size_t host = 0; host <= parts; ++host) bounds.push_back(std::min(host * part, length));
    return bounds;
  };
  std::vector<Link::Ticket> halves[2], results[2];  // under way, of even and of odd segments
  in_flight(
      divided_up(spans.count(), count),
      [&](size_t segment) {
        segments.sum_in_host(segment, segment * count, end_of(segment));
        if (hosts.leads()) halves[segment % 2] = segments.start(segment, bounds_of(segment));
      },
      [&](size_t segment) {
        if (!hosts.leads()) return;
        hosts.await(halves[segment % 2]);
        segments.combine(segment, bounds_of(segment));
        if (!one_hop) results[segment % 2] = segments.share(segment, bounds_of(segment));
      },
      [&](size_t segment) {
        if (hosts.leads()) {
          hosts.await(results[segment % 2]);
          hosts.announce();
        } else {
          hosts.await_announced();
        }
        spans.visit(segment * count, end_of(segment), [&](const char*, char* out, size_t before, size_t length) {
          copy(out, segments.wire(segment) + before, length * size);
        });
      });
}

void reducescatter(Channel& channel, const char* in, char* out, const std::vector<size_t>& starts, Type type,
                   Reduction reduction, Factors factors) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  const size_t size = size_of(type), ranks = starts.size() - 1;
  const size_t room = std::min(channel.slot_bytes() / ranks,
                               hosts.area_bytes() / (placement.most_on_a_host() * placement.ranks_on.size())) /
                      size;
  if (room == 0)
    throw Failure("there are too many ranks for a reducescatter. Received: ranks=" + std::to_string(ranks));
  const Deal deal(placement, in, starts, size, room);
  const Spans spans(deal.pieces, size);
  Segments segments(channel, spans, type, reduction, factors);
  std::vector<Link::Ticket> halves[2];
  const size_t own = starts[static_cast<size_t>(placement.rank) + 1] - starts[static_cast<size_t>(placement.rank)];
  in_flight(
      deal.bounds.size(),
      [&](size_t segment) {
        segments.sum_in_host(segment, deal.starts[segment], deal.starts[segment + 1]);
        if (hosts.leads()) halves[segment % 2] = segments.start(segment, deal.bounds[segment]);
      },
      [&](size_t segment) {
        if (!hosts.leads()) return;
        hosts.await(halves[segment % 2]);
        segments.combine(segment, deal.bounds[segment]);
        hosts.announce();
      },
      [&](size_t segment) {
        if (!hosts.leads()) hosts.await_announced();
        const size_t done = segment * room;
        if (done < own)
          copy(out + done * size, segments.wire(segment) + deal.own[segment] * size, std::min(own - done, room) * size);
      });
}

}  // namespace hvkeras::between_hosts
