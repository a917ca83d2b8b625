// When the runs of a collective began and ended on this rank: noted by the operations themselves, for those keys that
// Python asks for, so that nothing is added to any graph.
#pragma once

#include <string>

namespace hvkeras::times {

// Seconds since the epoch.
double now();
// Keeps a run, if its key is kept.
void add(const std::string& key, double began, double ended);

}  // namespace hvkeras::times
