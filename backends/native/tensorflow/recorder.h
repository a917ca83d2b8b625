// Records the latest rows of numbers of each key that Python has registered: start and end times of collectives, and
// the inputs of the operation HvkerasRecord.
#pragma once

#include <string>

namespace hvkeras::recorder {

// Seconds since the epoch.
double now();
// Records a row, if the key is registered with this number of columns.
void record(const std::string& key, const double* row, size_t columns);

}  // namespace hvkeras::recorder
