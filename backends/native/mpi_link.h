// The leaders' way to each other over MPI.
#pragma once

#include <memory>
#include <vector>

#include "core/link.h"
#include "mpi/network.h"

namespace hvkeras {

// The link of one group. `leaders` are the global ranks of all hosts' leaders; `group` is its number, which gives it
// messages of its own. Throws Failure where MPI has no more room for groups.
std::unique_ptr<Link> mpi_link(const HvkerasNetwork& network, int64_t group, const std::vector<int>& leaders);

}  // namespace hvkeras
