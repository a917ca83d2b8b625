// Data that go from host to host as they are: broadcast, allgather, alltoall and barrier.
#include "hierarchy.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

namespace {

constexpr size_t kOneHop = 16 * 1024;  // bytes up to which a broadcast goes straight to each host

// Before data is put into areas: no rank of this host reads there any more.
void begin(Channel& channel) { channel.exchange(); }

// The end of a round: what the leader started has come, and its host may read it.
void finish(Hosts& hosts) {
  if (hosts.leads()) {
    hosts.await(hosts.started());
    hosts.announce();
  } else {
    hosts.await_announced();
  }
}

size_t length_of(size_t bytes, size_t done, size_t room) { return done < bytes ? std::min(bytes - done, room) : 0; }

// Gives all ranks each rank's bytes, whose number all know; `out[r]` is where those of rank r go.
void gather_bytes(Channel& channel, const char* in, const std::vector<size_t>& bytes, const std::vector<char*>& out) {
  Hosts& hosts = *channel.hosts();
  const Placement& placement = hosts.placement();
  const size_t room = hosts.area_bytes() / bytes.size();
  const size_t most = *std::max_element(bytes.begin(), bytes.end());
  begin(channel);
  std::vector<size_t> places(bytes.size()), blocks(placement.ranks_on.size() + 1);
  for (size_t done = 0, round = 0; done < most; done += room, ++round) {
    char* const area = hosts.area(round % 2);
    size_t place = 0;
    for (size_t host = 0; host < placement.ranks_on.size(); ++host) {
      blocks[host] = place;
      for (const int rank : placement.ranks_on[host]) {
        places[static_cast<size_t>(rank)] = place;
        place += length_of(bytes[static_cast<size_t>(rank)], done, room);
      }
    }
    blocks.back() = place;
    const size_t me = static_cast<size_t>(placement.rank), here = static_cast<size_t>(hosts.host());
    if (const size_t length = length_of(bytes[me], done, room)) copy(area + places[me], in + done, length);
    channel.exchange();
    for (int host = 0; hosts.leads() && host < hosts.hosts(); ++host) {
      const size_t block = static_cast<size_t>(host);
      hosts.receive(host, area + blocks[block], blocks[block + 1] - blocks[block]);
      hosts.send(host, area + blocks[here], blocks[here + 1] - blocks[here]);
    }
    finish(hosts);
    for (size_t rank = 0; rank < bytes.size(); ++rank) {
      if (const size_t length = length_of(bytes[rank], done, room)) copy(out[rank] + done, area + places[rank], length);
    }
  }
}

// Numbers of each rank, equally many: what all must know before the data can go.
std::vector<std::vector<size_t>> gather_sizes(Channel& channel, const std::vector<size_t>& mine) {
  const size_t ranks = static_cast<size_t>(channel.hosts()->placement().ranks());
  std::vector<std::vector<size_t>> all(ranks, std::vector<size_t>(mine.size()));
  std::vector<char*> places;
  for (std::vector<size_t>& one : all) places.push_back(reinterpret_cast<char*>(one.data()));
  gather_bytes(channel, reinterpret_cast<const char*>(mine.data()),
               std::vector<size_t>(ranks, mine.size() * sizeof(size_t)), places);
  return all;
}

// One piece of an alltoall, from one rank to another, and where it lies in an area.
struct Piece {
  size_t from, to, place, bytes;
};

// The pieces of one round that one host has to do with, one other host's after the other.
struct Pieces {
  std::vector<Piece> all;
  std::vector<size_t> starts{0};  // of each host's in the area, and the end

  // All pieces between the ranks of two hosts; the same order on both of them.
  void add(const std::vector<int>& senders, const std::vector<int>& receivers,
           const std::vector<std::vector<size_t>>& bytes, size_t done, size_t room) {
    size_t place = starts.back();
    for (const int sender : senders) {
      for (const int receiver : receivers) {
        const size_t from = static_cast<size_t>(sender), to = static_cast<size_t>(receiver);
        all.push_back({from, to, place, length_of(bytes[from][to], done, room)});
        place += all.back().bytes;
      }
    }
    starts.push_back(place);
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
  begin(channel);
  for (size_t done = 0, round = 0; done < bytes; done += hosts.area_bytes(), ++round) {
    const size_t length = length_of(bytes, done, hosts.area_bytes());
    char* const area = hosts.area(round % 2);
    if (is_root) copy(area, in + done, length);
    channel.exchange();
    // The source gives each host all of it, or a part which that host gives to the others.
    const bool direct = length <= kOneHop;
    const size_t part = direct ? length : rounded_up(divided_up(length, static_cast<size_t>(hosts.hosts())), kAligned);
    const auto start_of = [&](int host) { return direct ? 0 : std::min(static_cast<size_t>(host) * part, length); };
    const auto part_of = [&](int host) { return std::min(part, length - start_of(host)); };
    for (int host = 0; hosts.leads() && host < hosts.hosts(); ++host) {
      if (hosts.host() == source) hosts.send(host, area + start_of(host), part_of(host));
    }
    if (hosts.leads() && hosts.host() != source)
      hosts.receive(source, area + start_of(hosts.host()), part_of(hosts.host()));
    if (hosts.leads() && !direct) {
      hosts.await(hosts.started());
      for (int host = 0; host < hosts.hosts(); ++host) {
        if (hosts.host() != source) hosts.receive(host, area + start_of(host), part_of(host));
        if (host != source) hosts.send(host, area + start_of(hosts.host()), part_of(hosts.host()));
      }
    }
    finish(hosts);
    if (!is_root) copy(out + done, area, length);
  }
  if (is_root && in != out && bytes != 0) copy(out, in, bytes);
}

void allgather(Channel& channel, const char* in, size_t rows, size_t row_bytes, const Allocate& allocate) {
  std::vector<size_t> rows_of_rank, bytes;
  for (const std::vector<size_t>& told : gather_sizes(channel, {rows})) {
    rows_of_rank.push_back(told[0]);
    bytes.push_back(told[0] * row_bytes);
  }
  std::vector<char*> places{allocate(rows_of_rank)};
  for (size_t rank = 0; rank + 1 < bytes.size(); ++rank) places.push_back(places.back() + bytes[rank]);
  gather_bytes(channel, in, bytes, places);
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
    for (size_t& told : bytes[rank]) most = std::max(most, told *= row_bytes);
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    starts_in.push_back(starts_in.back() + bytes[me][rank]);
    starts_out.push_back(starts_out.back() + bytes[rank][me]);
  }
  char* const out = allocate(rows_from);
  const size_t room = hosts.area_bytes() / (ranks * placement.most_on_a_host());
  if (room == 0) throw Failure("there are too many ranks for an alltoall. Received: ranks=" + std::to_string(ranks));
  begin(channel);
  const std::vector<int>& here = placement.ranks_on[static_cast<size_t>(hosts.host())];
  for (size_t done = 0, round = 0; done < most; done += room, ++round) {
    char* const outgoing = hosts.area(2 * (round % 2));
    char* const incoming = hosts.area(2 * (round % 2) + 1);
    Pieces sent, received;
    for (const std::vector<int>& there : placement.ranks_on) {
      sent.add(here, there, bytes, done, room);
      received.add(there, here, bytes, done, room);
    }
    for (const Piece& piece : sent.all) {
      if (piece.from == me && piece.bytes != 0)
        copy(outgoing + piece.place, in + starts_in[piece.to] + done, piece.bytes);
    }
    channel.exchange();
    for (int host = 0; hosts.leads() && host < hosts.hosts(); ++host) {
      hosts.receive(host, incoming + received.start_of(host), received.bytes_of(host));
      hosts.send(host, outgoing + sent.start_of(host), sent.bytes_of(host));
    }
    finish(hosts);
    for (const Piece& piece : received.all) {
      if (piece.to != me || piece.bytes == 0) continue;
      const bool is_local = std::binary_search(here.begin(), here.end(), static_cast<int>(piece.from));
      // What is for this host was not sent: it lies where its sender put it, as far from the start of its block.
      const char* const place =
          is_local ? outgoing + sent.start_of(hosts.host()) + (piece.place - received.start_of(hosts.host()))
                   : incoming + piece.place;
      copy(out + starts_out[piece.from] + done, place, piece.bytes);
    }
  }
}

void barrier(Channel& channel) { gather_sizes(channel, {0}); }

}  // namespace hvkeras::between_hosts
