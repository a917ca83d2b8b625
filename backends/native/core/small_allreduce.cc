#include "small_allreduce.h"

#include <cstring>

#include "hierarchical.h"

namespace hvkeras::between_hosts {

bool is_small_allreduce(const Allreduce& all, const Hosts& hosts) {
  return all.bytes() != 0 && hosts.choose_algorithm(all.bytes(), all.type) == Algorithm::kUnordered &&
         reducer_of(all.type, all.reduction) != nullptr;
}

std::vector<char> reduce_in_host(Channel& channel, const Allreduce& all) {
  const Reducer reduce = reducer_of(all.type, all.reduction);
  const ScaleFactors factors = split_factors(all).first;
  const uint32_t round = channel.round();
  char* const mine = channel.slot(round, channel.rank());
  if (channel.ranks() > 1) {
    all.spans.visit(0, all.spans.count(), [&](const char* in, char*, size_t byte_offset, size_t count) {
      channel.writer().write(mine + byte_offset, in, count * all.spans.element_bytes());
    });
    channel.exchange();
  }
  if (channel.rank() != 0) return {};
  std::vector<char> contribution(all.bytes());
  std::vector<const void*> sources(static_cast<size_t>(channel.ranks()));
  all.spans.visit(0, all.spans.count(), [&](const char* in, char*, size_t byte_offset, size_t count) {
    sources[0] = in;
    for (int rank = 1; rank < channel.ranks(); ++rank)
      sources[static_cast<size_t>(rank)] = channel.slot(round, rank) + byte_offset;
    reduce(contribution.data() + byte_offset, sources.data(), channel.ranks(), count, factors.prescale,
           factors.postscale);
  });
  return contribution;
}

void finish_small_allreduce(Channel& channel, const Allreduce& all, const Contributions& contributions) {
  const ScaleFactors factors = split_factors(all).second;
  const size_t size = all.spans.element_bytes();
  std::vector<char> result;
  const char* from = nullptr;
  if (channel.rank() == 0) {
    std::vector<const void*> sources;
    for (const std::vector<char>& contribution : contributions) {
      if (contribution.size() != all.bytes())
        throw Failure("received a contribution of the wrong size for a small allreduce");
      sources.push_back(contribution.data());
    }
    result.resize(all.bytes());
    reducer_of(all.type, all.reduction)(result.data(), sources.data(), static_cast<int>(contributions.size()),
                                        all.spans.count(), factors.prescale, factors.postscale);
    from = result.data();
  }
  if (channel.ranks() > 1) {
    if (channel.rank() == 0) channel.writer().write(channel.slot(channel.round(), 0), from, result.size());
    const uint32_t round = channel.exchange();
    if (channel.rank() != 0) from = channel.slot(round, 0);
  }
  all.spans.visit(0, all.spans.count(), [&](const char*, char* out, size_t byte_offset, size_t count) {
    copy(out, from + byte_offset, count * size);
  });
}

}  // namespace hvkeras::between_hosts
