// The collectives of groups on several hosts: the ranks of a host combine their data in shared memory, the hosts'
// leaders exchange it, and the ranks read what came. Called through collectives.h, whose arguments they share.
#pragma once

#include "collectives.h"

namespace hvkeras::between_hosts {

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, Factors factors);
void broadcast(Channel& channel, const char* in, char* out, size_t bytes, int root);
void allgather(Channel& channel, const char* in, size_t rows, size_t row_bytes, const Allocate& allocate);
void alltoall(Channel& channel, const char* in, const std::vector<size_t>& rows_to, size_t row_bytes,
              const Allocate& allocate);
void reducescatter(Channel& channel, const char* in, char* out, const std::vector<size_t>& starts, Type type,
                   Reduction reduction, Factors factors);
void barrier(Channel& channel);

}  // namespace hvkeras::between_hosts
