// A small allreduce between hosts: each leader sends its host's data to all others as soon as the ranks of its host are
// ready, and reduces the data of all hosts. It takes the latency of one message, and no common order of the hosts.
#pragma once

#include "collectives.h"
#include "hosts.h"
#include "negotiator.h"

namespace hvkeras::between_hosts {

// Whether an allreduce uses this algorithm; the same on all ranks.
bool is_small_allreduce(const Allreduce& all, const Hosts& hosts);

// First step, on all ranks of a host: reduces their data, and returns the sum on the leader; other ranks get nothing.
std::vector<char> reduce_in_host(Channel& channel, const Allreduce& all);
// Second step, on all ranks of a host: reduces the contributions of all hosts, which only the leader has, and copies
// the result.
void finish_small_allreduce(Channel& channel, const Allreduce& all, const Contributions& contributions);

}  // namespace hvkeras::between_hosts
