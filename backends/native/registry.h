// The engines of this process, by the numbers that Python gives its groups of ranks.
#pragma once

#include <memory>

#include "core/engine.h"

namespace hvkeras {

// Throws Failure where there is none: before init(), or after shutdown().
std::shared_ptr<Engine> engine_of(int64_t group);

}  // namespace hvkeras
