// Data that go from host to host as they are: broadcast, allgather, alltoall and barrier.
#include "hierarchy.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

namespace {

constexpr size_t kOneHop = 16 * 1024;  // bytes up to which a broadcast goes straight to each host
constexpr size_t kLeast = 512;         // bytes from rank to rank for which each round of an alltoall has room

// Before data is put into areas: no rank of this host reads there any more.
void begin(Channel& channel) { channel.exchange(); }

// So many rounds after it has begun, what other hosts have sent is read. The area of the round before may still be read
// by some rank then, so that a round's area is free for the one after the next.
constexpr size_t kReadAfter = 2, kPlaces = kReadAfter + 2;
constexpr size_t kExchangesReadAfter = 1, kExchangePlaces = kExchangesReadAfter + 2;  // with two areas each
static_assert(kPlaces <= Hosts::kAreas && 2 * kExchangePlaces <= Hosts::kAreas);

using Tickets = std::vector<Link::Ticket>;

// The end of a round: what the leader started has come, and its host may read it.
void finish(Hosts& hosts, Tickets& started) {
  if (hosts.leads()) {
    hosts.await(started);
    hosts.announce();
  } else {
    hosts.await_announced();
  }
}

void nothing(size_t) {}

size_t length_of(size_t bytes, size_t done, size_t room) { return done < bytes ? std::min(bytes - done, room) : 0; }

}  // namespace

void gather_parts(Channel& channel, const std::vector<Spans>& parts) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  std::vector<size_t> bytes;
  for (const Spans& part : parts) bytes.push_back(part.count());
  const size_t room = hosts.area_bytes() / bytes.size();
  if (room == 0)
    throw Failure("there are too many ranks to gather parts. Received: ranks=" + std::to_string(bytes.size()));
  const size_t most = *std::max_element(bytes.begin(), bytes.end());
  const auto rank_offsets = [&](size_t round) {
    std::vector<size_t> offsets(bytes.size() + 1);  // of the ranks' bytes in an area, and the end
    size_t offset = 0;
    for (const std::vector<int>& ranks : placement.ranks_on) {
      for (const int rank : ranks) {
        offsets[static_cast<size_t>(rank)] = offset;
        offset += length_of(bytes[static_cast<size_t>(rank)], round * room, room);
      }
    }
    offsets.back() = offset;
    return offsets;
  };
  const size_t me = static_cast<size_t>(placement.rank);
  Tickets started[kPlaces];
  begin(channel);
  in_flight(
      divided_up(most, room), 0, kReadAfter,
      [&](size_t round) {
        const std::vector<size_t> offsets = rank_offsets(round);
        char* const area = hosts.area(round % kPlaces);
        parts[me].visit(round * room, std::min((round + 1) * room, bytes[me]),
                        [&](const char* in, char*, size_t before, size_t length) {
                          copy(area + offsets[me] + before, in, length);
                        });
        channel.exchange();
        if (!hosts.leads()) return;
        const auto start_of = [&](int host) {
          return host == hosts.hosts() ? offsets.back()
                                       : offsets[static_cast<size_t>(placement.ranks_on[static_cast<size_t>(host)][0])];
        };
        const auto size_of = [&](int host) { return start_of(host + 1) - start_of(host); };
        for (const int host : hosts.others()) hosts.receive(host, area + start_of(host), size_of(host));
        for (const int host : hosts.others()) hosts.send(host, area + start_of(hosts.host()), size_of(hosts.host()));
        started[round % kPlaces] = hosts.started();
      },
      nothing,
      [&](size_t round) {
        const std::vector<size_t> offsets = rank_offsets(round);
        finish(hosts, started[round % kPlaces]);
        for (size_t rank = 0; rank < bytes.size(); ++rank) {
          const char* const theirs = hosts.area(round % kPlaces) + offsets[rank];
          const bool is_mine = rank == me;
          parts[rank].visit(round * room, std::min((round + 1) * room, bytes[rank]),
                            [&](const char* in, char* out, size_t before, size_t length) {
                              if (!is_mine || in != out) copy(out, theirs + before, length);
                            });
        }
      });
}

namespace {

// Numbers of each rank, equally many: what all must know before the data can go.
std::vector<std::vector<size_t>> gather_sizes(Channel& channel, const std::vector<size_t>& mine) {
  const size_t ranks = static_cast<size_t>(channel.hosts()->placement().ranks());
  std::vector<std::vector<size_t>> all(ranks, std::vector<size_t>(mine.size()));
  std::vector<Spans> parts;
  for (std::vector<size_t>& one : all)
    parts.emplace_back(std::vector<Span>{{reinterpret_cast<const char*>(mine.data()),
                                          reinterpret_cast<char*>(one.data()), mine.size() * sizeof(size_t)}},
                       1);
  between_hosts::gather_parts(channel, parts);
  return all;
}

// One piece of an alltoall, from one rank to another, and where it lies in an area.
struct Piece {
  size_t from, to, offset, bytes;
};

// What goes in one round of an alltoall: to so many ranks behind each sender, from the first, so many bytes of each.
struct Part {
  size_t first, width, done, room;
};

// The pieces of one round that one host has to do with, one other host's after the other.
struct Pieces {
  std::vector<Piece> all;
  std::vector<size_t> starts{0};  // of each host's in the area, and the end

  // All pieces between the ranks of two hosts; the same order on both of them.
  void add(const std::vector<int>& senders, const std::vector<int>& receivers,
           const std::vector<std::vector<size_t>>& bytes, const Part& part) {
    size_t offset = starts.back();
    for (const int sender : senders) {
      for (const int receiver : receivers) {
        const size_t from = static_cast<size_t>(sender), to = static_cast<size_t>(receiver);
        if ((to + bytes.size() - from) % bytes.size() - part.first >= part.width) continue;
        const size_t length = length_of(bytes[from][to], part.done, part.room);
        if (length != 0) all.push_back({from, to, offset, length});
        offset += length;
      }
    }
    starts.push_back(offset);
  }
  size_t start_of(int host) const { return starts[static_cast<size_t>(host)]; }
  size_t bytes_of(int host) const { return starts[static_cast<size_t>(host) + 1] - start_of(host); }
};

}  // namespace

void broadcast(Channel& channel, const char* in, char* out, size_t bytes, int root) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  const bool is_root = placement.rank == root;
  int source = 0;
  for (int host = 0; host < hosts.hosts(); ++host) {
    const std::vector<int>& ranks = placement.ranks_on[static_cast<size_t>(host)];
    if (std::find(ranks.begin(), ranks.end(), root) != ranks.end()) source = host;
  }
  // The source gives each host a part, which that gives to the others; or all of it.
  const auto length_at = [&](size_t round) { return length_of(bytes, round * hosts.area_bytes(), hosts.area_bytes()); };
  const auto is_direct = [&](size_t round) { return length_at(round) <= kOneHop; };
  const auto part_of = [&](size_t round, int host) {
    const size_t length = length_at(round);
    if (is_direct(round)) return std::pair<size_t, size_t>{0, length};
    const size_t part = rounded_up(divided_up(length, static_cast<size_t>(hosts.hosts())), kAligned);
    const size_t start = std::min(static_cast<size_t>(host) * part, length);
    return std::pair<size_t, size_t>{start, std::min(part, length - start)};
  };
  const auto send = [&](size_t round, int to, int part, Link::Stream stream) {
    const auto [start, size] = part_of(round, part);
    hosts.send(to, hosts.area(round % kPlaces) + start, size, stream);
  };
  const auto receive = [&](size_t round, int from, int part, Link::Stream stream) {
    const auto [start, size] = part_of(round, part);
    hosts.receive(from, hosts.area(round % kPlaces) + start, size, stream);
  };
  Tickets own[kPlaces], started[kPlaces];
  begin(channel);
  in_flight(
      divided_up(bytes, hosts.area_bytes()), 1, kReadAfter,
      [&](size_t round) {
        if (is_root) copy(hosts.area(round % kPlaces), in + round * hosts.area_bytes(), length_at(round));
        channel.exchange();
        if (!hosts.leads()) return;
        if (hosts.host() == source) {
          for (const int host : hosts.others()) send(round, host, host, Link::kParts);
          for (const int host : hosts.others()) {
            if (!is_direct(round)) send(round, host, source, Link::kResults);
          }
        } else {
          receive(round, source, hosts.host(), Link::kParts);
          own[round % kPlaces] = hosts.started();
          for (const int host : hosts.others()) {
            if (!is_direct(round)) receive(round, host, host, Link::kResults);
          }
        }
        started[round % kPlaces] = hosts.started();
      },
      [&](size_t round) {
        if (!hosts.leads()) return;
        hosts.await(own[round % kPlaces]);
        for (const int host : hosts.others()) {
          if (hosts.host() != source && host != source && !is_direct(round))
            send(round, host, hosts.host(), Link::kResults);
        }
        const Tickets sent = hosts.started();
        started[round % kPlaces].insert(started[round % kPlaces].end(), sent.begin(), sent.end());
      },
      [&](size_t round) {
        finish(hosts, started[round % kPlaces]);
        if (!is_root) copy(out + round * hosts.area_bytes(), hosts.area(round % kPlaces), length_at(round));
      });
  if (is_root && in != out && bytes != 0) copy(out, in, bytes);
}

void allgather(Channel& channel, const char* in, size_t rows, size_t row_bytes, const Allocate& allocate) {
  std::vector<size_t> rows_of_rank;
  for (const std::vector<size_t>& sizes : gather_sizes(channel, {rows})) rows_of_rank.push_back(sizes[0]);
  char* out = allocate(rows_of_rank);
  std::vector<Spans> parts;
  for (const size_t count : rows_of_rank) {
    parts.emplace_back(std::vector<Span>{{in, out, count * row_bytes}}, 1);
    out += count * row_bytes;
  }
  between_hosts::gather_parts(channel, parts);
}

void alltoall(Channel& channel, const char* in, const std::vector<size_t>& rows_to, size_t row_bytes,
              const Allocate& allocate) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  const size_t me = static_cast<size_t>(placement.rank), ranks = rows_to.size();
  std::vector<std::vector<size_t>> bytes = gather_sizes(channel, rows_to);
  std::vector<size_t> rows_from, starts_in{0}, starts_out{0};
  size_t most = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    rows_from.push_back(bytes[rank][me]);
    for (size_t& sent_bytes : bytes[rank]) most = std::max(most, sent_bytes *= row_bytes);
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    starts_in.push_back(starts_in.back() + bytes[me][rank]);
    starts_out.push_back(starts_out.back() + bytes[rank][me]);
  }
  char* const out = allocate(rows_from);
  // A round has room for what each rank sends to so many others, and as much from as many.
  const size_t most_here = placement.most_on_a_host();
  const size_t width = std::clamp(hosts.area_bytes() / (most_here * kLeast), size_t{1}, ranks);
  const size_t room = hosts.area_bytes() / (most_here * width), chunks = divided_up(most, room);
  const auto part_of = [&](size_t round) { return Part{round / chunks * width, width, round % chunks * room, room}; };
  const std::vector<int>& here = placement.ranks_on[static_cast<size_t>(hosts.host())];
  const auto pieces_of = [&](size_t round, bool are_sent) {
    Pieces pieces;
    for (const std::vector<int>& there : placement.ranks_on)
      pieces.add(are_sent ? here : there, are_sent ? there : here, bytes, part_of(round));
    return pieces;
  };
  const auto outgoing = [&](size_t round) { return hosts.area(2 * (round % kExchangePlaces)); };
  const auto incoming = [&](size_t round) { return hosts.area(2 * (round % kExchangePlaces) + 1); };
  Tickets started[kExchangePlaces];
  begin(channel);
  in_flight(
      divided_up(ranks, width) * chunks, 0, kExchangesReadAfter,
      [&](size_t round) {
        const Pieces sent = pieces_of(round, true), received = pieces_of(round, false);
        for (const Piece& piece : sent.all) {
          if (piece.from == me)
            copy(outgoing(round) + piece.offset, in + starts_in[piece.to] + part_of(round).done, piece.bytes);
        }
        channel.exchange();
        if (!hosts.leads()) return;
        for (const int host : hosts.others())
          hosts.receive(host, incoming(round) + received.start_of(host), received.bytes_of(host));
        for (const int host : hosts.others())
          hosts.send(host, outgoing(round) + sent.start_of(host), sent.bytes_of(host));
        started[round % kExchangePlaces] = hosts.started();
      },
      nothing,
      [&](size_t round) {
        const Pieces sent = pieces_of(round, true), received = pieces_of(round, false);
        finish(hosts, started[round % kExchangePlaces]);
        for (const Piece& piece : received.all) {
          if (piece.to != me) continue;
          const bool is_local = std::binary_search(here.begin(), here.end(), static_cast<int>(piece.from));
          // What is for this host was not sent: it lies where its sender put it, as far from the start of its block.
          const char* const source = is_local ? outgoing(round) + sent.start_of(hosts.host()) +
                                                    (piece.offset - received.start_of(hosts.host()))
                                              : incoming(round) + piece.offset;
          copy(out + starts_out[piece.from] + part_of(round).done, source, piece.bytes);
        }
      });
}

void barrier(Channel& channel) { gather_sizes(channel, {0}); }

}  // namespace hvkeras::between_hosts
