// The collectives of groups on several hosts: the ranks of a host combine their data in shared memory, the hosts'
// leaders exchange it, and the ranks read what came. Called through collectives.h, whose arguments they share.
#pragma once

#include <utility>

#include "collectives.h"

namespace hvkeras::between_hosts {

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors);
void broadcast(Channel& channel, const char* in, char* out, size_t bytes, int root);
void allgather(Channel& channel, const char* in, size_t rows, size_t row_bytes, const Allocate& allocate);
void alltoall(Channel& channel, const char* in, const std::vector<size_t>& rows_to, size_t row_bytes,
              const Allocate& allocate);
void reduce_parts(Channel& channel, const std::vector<Spans>& parts, Type type, Reduction reduction,
                  ScaleFactors factors);
void gather_parts(Channel& channel, const std::vector<Spans>& parts);
void barrier(Channel& channel);

// The factors of a reduction for the ranks of a host, and for what the hosts have. Sums of half precisions are scaled
// before they are rounded: an average must not overflow on its way.
inline std::pair<ScaleFactors, ScaleFactors> split_factors(Type type, Reduction reduction, ScaleFactors factors) {
  const bool early = (type == Type::kFloat16 || type == Type::kBfloat16) && reduction == Reduction::kSum;
  return {{factors.prescale, early ? factors.postscale : 1.0}, {1.0, early ? 1.0 : factors.postscale}};
}
inline std::pair<ScaleFactors, ScaleFactors> split_factors(const Allreduce& all) {
  return split_factors(all.type, all.reduction, all.factors);
}

// Rounds on their way, each in three steps that alternate with those of others: while one passes through this host's
// memory, others pass through the network. A round's second and third step come so many rounds after its first.
template <typename Prepare, typename Exchange, typename Read>
void run_pipelined(size_t rounds, size_t exchange_after, size_t read_after, Prepare&& prepare, Exchange&& exchange,
                   Read&& read) {
  for (size_t step = 0; step < rounds + read_after; ++step) {
    if (step < rounds) prepare(step);
    if (step >= exchange_after && step - exchange_after < rounds) exchange(step - exchange_after);
    if (step >= read_after) read(step - read_after);
  }
}

}  // namespace hvkeras::between_hosts
