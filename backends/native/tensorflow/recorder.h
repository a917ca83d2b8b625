// Rows of numbers that operations note, the latest ones of each key, for those keys that Python asks for: when the runs
// of a collective began and ended, and what the operation HvkerasRecord is given.
#pragma once

#include <string>

namespace hvkeras::recorder {

// Seconds since the epoch.
double now();
// Keeps a row, if its key is kept with so many columns.
void record(const std::string& key, const double* row, size_t columns);

}  // namespace hvkeras::recorder
