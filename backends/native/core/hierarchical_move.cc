// Data movement between hosts, without arithmetic: broadcast, allgather, alltoall and barrier.
#include "hierarchical.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

namespace {

constexpr size_t kDirectBroadcastBytes = 16 * 1024;  // up to which a broadcast goes directly to each host
constexpr size_t kMinBytesPerPair = 512;             // of ranks, in each round of an alltoall

// Before data is written to the staging buffers: waits until no rank of this host reads from them any more.
void wait_for_readers(Channel& channel) { channel.exchange(); }

// Received data is read this many rounds after its round began. At that time some rank may still read the previous
// round's buffer, so a buffer is reused only after one more round.
constexpr size_t kReadAfter = 2, kRoundSlots = kReadAfter + 2;
constexpr size_t kAlltoallReadAfter = 1, kAlltoallSlots = kAlltoallReadAfter + 2;  // two buffers per round
static_assert(kRoundSlots <= Hosts::kBuffers && 2 * kAlltoallSlots <= Hosts::kBuffers);

using Handles = std::vector<Link::Handle>;

// The end of a round: the leader waits for its transfers, the other ranks wait for the leader.
void finish_round(Hosts& hosts, Handles& started) {
  if (hosts.is_leader()) {
    hosts.wait(started);
    hosts.signal_ready();
  } else {
    hosts.wait_ready();
  }
}

void no_exchange(size_t) {}

size_t length_of(size_t bytes, size_t done, size_t capacity) {
  return done < bytes ? std::min(bytes - done, capacity) : 0;
}

}  // namespace

void gather_parts(Channel& channel, const std::vector<Spans>& parts) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  std::vector<size_t> bytes;
  for (const Spans& part : parts) bytes.push_back(part.count());
  const size_t capacity = hosts.buffer_bytes() / bytes.size();
  if (capacity == 0) throw Failure("too many ranks to gather parts. Received: ranks=" + std::to_string(bytes.size()));
  const size_t max_bytes = *std::max_element(bytes.begin(), bytes.end());
  const auto rank_offsets = [&](size_t round) {
    std::vector<size_t> offsets(bytes.size() + 1);  // of each rank's bytes in a buffer, and the end
    size_t offset = 0;
    for (const std::vector<int>& ranks : placement.ranks_on) {
      for (const int rank : ranks) {
        offsets[static_cast<size_t>(rank)] = offset;
        offset += length_of(bytes[static_cast<size_t>(rank)], round * capacity, capacity);
      }
    }
    offsets.back() = offset;
    return offsets;
  };
  const size_t me = static_cast<size_t>(placement.rank);
  Handles started[kRoundSlots];
  wait_for_readers(channel);
  run_pipelined(
      ceil_div(max_bytes, capacity), 0, kReadAfter,
      [&](size_t round) {
        const std::vector<size_t> offsets = rank_offsets(round);
        char* const buffer = hosts.buffer(round % kRoundSlots);
        parts[me].visit(round * capacity, std::min((round + 1) * capacity, bytes[me]),
                        [&](const char* in, char*, size_t byte_offset, size_t length) {
                          copy(buffer + offsets[me] + byte_offset, in, length);
                        });
        channel.exchange();
        if (!hosts.is_leader()) return;
        const auto start_of = [&](int host) {
          return host == hosts.hosts() ? offsets.back()
                                       : offsets[static_cast<size_t>(placement.ranks_on[static_cast<size_t>(host)][0])];
        };
        const auto bytes_of = [&](int host) { return start_of(host + 1) - start_of(host); };
        for (const int host : hosts.peers()) hosts.receive(host, buffer + start_of(host), bytes_of(host));
        for (const int host : hosts.peers()) hosts.send(host, buffer + start_of(hosts.host()), bytes_of(hosts.host()));
        started[round % kRoundSlots] = hosts.take_started();
      },
      no_exchange,
      [&](size_t round) {
        const std::vector<size_t> offsets = rank_offsets(round);
        finish_round(hosts, started[round % kRoundSlots]);
        for (size_t rank = 0; rank < bytes.size(); ++rank) {
          const char* const theirs = hosts.buffer(round % kRoundSlots) + offsets[rank];
          const bool is_mine = rank == me;
          parts[rank].visit(round * capacity, std::min((round + 1) * capacity, bytes[rank]),
                            [&](const char* in, char* out, size_t byte_offset, size_t length) {
                              if (!is_mine || in != out) copy(out, theirs + byte_offset, length);
                            });
        }
      });
}

namespace {

// Allgathers a few sizes per rank (equally many), which all ranks must know before the data is exchanged.
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

// One block of an alltoall, from one rank to another, and its offset in a staging buffer.
struct Block {
  size_t from, to, offset, bytes;
};

// One round of an alltoall: from each sender to the `width` ranks from distance `first` on, the bytes [done,
// done + capacity) of each block.
struct ExchangeRound {
  size_t first, width, done, capacity;
};

// The blocks of one round that this host sends or receives, grouped by the other host.
struct Blocks {
  std::vector<Block> all;
  std::vector<size_t> starts{0};  // of each host's blocks in the buffer, and the end

  // Adds all blocks between the ranks of two hosts, in the same order on both.
  void add(const std::vector<int>& senders, const std::vector<int>& receivers,
           const std::vector<std::vector<size_t>>& bytes, const ExchangeRound& round) {
    size_t offset = starts.back();
    for (const int sender : senders) {
      for (const int receiver : receivers) {
        const size_t from = static_cast<size_t>(sender), to = static_cast<size_t>(receiver);
        if ((to + bytes.size() - from) % bytes.size() - round.first >= round.width) continue;
        const size_t length = length_of(bytes[from][to], round.done, round.capacity);
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
  // The source sends each host one part, which that host forwards to the others; or all data directly to each host.
  const auto length_at = [&](size_t round) {
    return length_of(bytes, round * hosts.buffer_bytes(), hosts.buffer_bytes());
  };
  const auto is_direct = [&](size_t round) { return length_at(round) <= kDirectBroadcastBytes; };
  const auto part_of = [&](size_t round, int host) {
    const size_t length = length_at(round);
    if (is_direct(round)) return std::pair<size_t, size_t>{0, length};
    const size_t part = round_up(ceil_div(length, static_cast<size_t>(hosts.hosts())), kAlignElements);
    const size_t start = std::min(static_cast<size_t>(host) * part, length);
    return std::pair<size_t, size_t>{start, std::min(part, length - start)};
  };
  const auto send = [&](size_t round, int to, int part, Link::Stream stream) {
    const auto [start, size] = part_of(round, part);
    hosts.send(to, hosts.buffer(round % kRoundSlots) + start, size, stream);
  };
  const auto receive = [&](size_t round, int from, int part, Link::Stream stream) {
    const auto [start, size] = part_of(round, part);
    hosts.receive(from, hosts.buffer(round % kRoundSlots) + start, size, stream);
  };
  Handles own[kRoundSlots], started[kRoundSlots];
  wait_for_readers(channel);
  run_pipelined(
      ceil_div(bytes, hosts.buffer_bytes()), 1, kReadAfter,
      [&](size_t round) {
        if (is_root) copy(hosts.buffer(round % kRoundSlots), in + round * hosts.buffer_bytes(), length_at(round));
        channel.exchange();
        if (!hosts.is_leader()) return;
        if (hosts.host() == source) {
          for (const int host : hosts.peers()) send(round, host, host, Link::kParts);
          for (const int host : hosts.peers()) {
            if (!is_direct(round)) send(round, host, source, Link::kResults);
          }
        } else {
          receive(round, source, hosts.host(), Link::kParts);
          own[round % kRoundSlots] = hosts.take_started();
          for (const int host : hosts.peers()) {
            if (!is_direct(round)) receive(round, host, host, Link::kResults);
          }
        }
        started[round % kRoundSlots] = hosts.take_started();
      },
      [&](size_t round) {
        if (!hosts.is_leader()) return;
        hosts.wait(own[round % kRoundSlots]);
        for (const int host : hosts.peers()) {
          if (hosts.host() != source && host != source && !is_direct(round))
            send(round, host, hosts.host(), Link::kResults);
        }
        const Handles sent = hosts.take_started();
        started[round % kRoundSlots].insert(started[round % kRoundSlots].end(), sent.begin(), sent.end());
      },
      [&](size_t round) {
        finish_round(hosts, started[round % kRoundSlots]);
        if (!is_root) copy(out + round * hosts.buffer_bytes(), hosts.buffer(round % kRoundSlots), length_at(round));
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
  size_t max_bytes = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    rows_from.push_back(bytes[rank][me]);
    for (size_t& sent_bytes : bytes[rank]) max_bytes = std::max(max_bytes, sent_bytes *= row_bytes);
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    starts_in.push_back(starts_in.back() + bytes[me][rank]);
    starts_out.push_back(starts_out.back() + bytes[rank][me]);
  }
  char* const out = allocate(rows_from);
  // Each buffer holds one round's blocks of all ranks of a host: from each rank, to `width` others.
  const size_t max_here = placement.max_ranks_per_host();
  const size_t width = std::clamp(hosts.buffer_bytes() / (max_here * kMinBytesPerPair), size_t{1}, ranks);
  const size_t capacity = hosts.buffer_bytes() / (max_here * width), chunks = ceil_div(max_bytes, capacity);
  const auto exchange_of = [&](size_t round) {
    return ExchangeRound{round / chunks * width, width, round % chunks * capacity, capacity};
  };
  const std::vector<int>& here = placement.ranks_on[static_cast<size_t>(hosts.host())];
  const auto blocks_of = [&](size_t round, bool are_sent) {
    Blocks blocks;
    for (const std::vector<int>& there : placement.ranks_on)
      blocks.add(are_sent ? here : there, are_sent ? there : here, bytes, exchange_of(round));
    return blocks;
  };
  const auto outgoing = [&](size_t round) { return hosts.buffer(2 * (round % kAlltoallSlots)); };
  const auto incoming = [&](size_t round) { return hosts.buffer(2 * (round % kAlltoallSlots) + 1); };
  Handles started[kAlltoallSlots];
  wait_for_readers(channel);
  run_pipelined(
      ceil_div(ranks, width) * chunks, 0, kAlltoallReadAfter,
      [&](size_t round) {
        const Blocks sent = blocks_of(round, true), received = blocks_of(round, false);
        for (const Block& block : sent.all) {
          if (block.from == me)
            copy(outgoing(round) + block.offset, in + starts_in[block.to] + exchange_of(round).done, block.bytes);
        }
        channel.exchange();
        if (!hosts.is_leader()) return;
        for (const int host : hosts.peers())
          hosts.receive(host, incoming(round) + received.start_of(host), received.bytes_of(host));
        for (const int host : hosts.peers())
          hosts.send(host, outgoing(round) + sent.start_of(host), sent.bytes_of(host));
        started[round % kAlltoallSlots] = hosts.take_started();
      },
      no_exchange,
      [&](size_t round) {
        const Blocks sent = blocks_of(round, true), received = blocks_of(round, false);
        finish_round(hosts, started[round % kAlltoallSlots]);
        for (const Block& block : received.all) {
          if (block.to != me) continue;
          const bool is_local = std::binary_search(here.begin(), here.end(), static_cast<int>(block.from));
          // A block for a rank of this host is not sent. It is in the outgoing buffer, at the same offset from the
          // start of this host's blocks.
          const char* const source = is_local ? outgoing(round) + sent.start_of(hosts.host()) +
                                                    (block.offset - received.start_of(hosts.host()))
                                              : incoming(round) + block.offset;
          copy(out + starts_out[block.from] + exchange_of(round).done, source, block.bytes);
        }
      });
}

void barrier(Channel& channel) { gather_sizes(channel, {0}); }

}  // namespace hvkeras::between_hosts
