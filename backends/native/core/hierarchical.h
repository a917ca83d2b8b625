// The collectives of groups on several hosts: the ranks of a host combine their data in shared memory, the hosts'
// leaders exchange it, and the ranks read the result. Called by the functions in collectives.h, with the same
// arguments.
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

// Splits the factors of a reduction into those within a host and those across hosts. Sums in half precision are scaled
// before they are rounded, so that an average cannot overflow.
inline std::pair<ScaleFactors, ScaleFactors> split_factors(Type type, Reduction reduction, ScaleFactors factors) {
  const bool early = (type == Type::kFloat16 || type == Type::kBfloat16) && reduction == Reduction::kSum;
  return {{factors.prescale, early ? factors.postscale : 1.0}, {1.0, early ? 1.0 : factors.postscale}};
}
inline std::pair<ScaleFactors, ScaleFactors> split_factors(const Allreduce& all) {
  return split_factors(all.type, all.reduction, all.factors);
}

// Pipelines rounds of three steps: while one round uses this host's memory, others use the network. A round's second
// step runs `exchange_after` rounds after its first, the third `read_after` rounds after it.
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
