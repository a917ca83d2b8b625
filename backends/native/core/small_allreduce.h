// The short way of a small allreduce between hosts: each leader sends what its host has to all others as soon as the
// ranks of its host are there, and adds up what all have sent. It takes one message's way, and no order among hosts.
#pragma once

#include "collectives.h"
#include "hosts.h"
#include "negotiator.h"

namespace hvkeras::between_hosts {

// Whether an allreduce goes this way; the same on all ranks.
bool is_small_allreduce(const Allreduce& all, const Hosts& hosts);

// The first step, of all ranks of a host: their data, combined, for the leader; nothing for the others.
std::vector<char> reduce_in_host(Channel& channel, const Allreduce& all);
// The second step: gives all ranks of a host what the parts of all hosts are together; the leader has them.
void finish_small_allreduce(Channel& channel, const Allreduce& all, const Contributions& contributions);

}  // namespace hvkeras::between_hosts
