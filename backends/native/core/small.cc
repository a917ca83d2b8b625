#include "small.h"

#include <cstring>

#include "hierarchy.h"

namespace hvkeras::between_hosts {

bool is_small(const Allreduce& all, const Hosts& hosts) {
  return all.bytes() != 0 && hosts.path_of(all.bytes(), all.type) == Path::kUnordered &&
         reducer_of(all.type, all.reduction) != nullptr;
}

std::vector<char> part_of_host(Channel& channel, const Allreduce& all) {
  const Reducer reduce = reducer_of(all.type, all.reduction);
  const Factors factors = split(all).first;
  const uint32_t round = channel.round();
  char* const mine = channel.slot(round, channel.rank());
  if (channel.ranks() > 1) {
    all.spans.visit(0, all.spans.count(), [&](const char* in, char*, size_t before, size_t count) {
      channel.writer().write(mine + before, in, count * all.spans.element_bytes());
    });
    channel.exchange();
  }
  if (channel.rank() != 0) return {};
  std::vector<char> part(all.bytes());
  std::vector<const void*> sources(static_cast<size_t>(channel.ranks()));
  all.spans.visit(0, all.spans.count(), [&](const char* in, char*, size_t before, size_t count) {
    sources[0] = in;
    for (int rank = 1; rank < channel.ranks(); ++rank)
      sources[static_cast<size_t>(rank)] = channel.slot(round, rank) + before;
    reduce(part.data() + before, sources.data(), channel.ranks(), count, factors.before, factors.after);
  });
  return part;
}

void finish(Channel& channel, const Allreduce& all, const Parts& parts) {
  const Factors factors = split(all).second;
  const size_t size = all.spans.element_bytes();
  std::vector<char> result;
  const char* from = nullptr;
  if (channel.rank() == 0) {
    std::vector<const void*> sources;
    for (const std::vector<char>& part : parts) {
      if (part.size() != all.bytes()) throw Failure("a part of an allreduce has another size than its tensors");
      sources.push_back(part.data());
    }
    result.resize(all.bytes());
    reducer_of(all.type, all.reduction)(result.data(), sources.data(), static_cast<int>(parts.size()),
                                        all.spans.count(), factors.before, factors.after);
    from = result.data();
  }
  if (channel.ranks() > 1) {
    if (channel.rank() == 0) channel.writer().write(channel.slot(channel.round(), 0), from, result.size());
    const uint32_t round = channel.exchange();
    if (channel.rank() != 0) from = channel.slot(round, 0);
  }
  all.spans.visit(0, all.spans.count(),
                  [&](const char*, char* out, size_t before, size_t count) { copy(out, from + before, count * size); });
}

}  // namespace hvkeras::between_hosts
