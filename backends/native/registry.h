// The engines of this process, by the group numbers that Python assigns.
#pragma once

#include <memory>

#include "core/engine.h"

namespace hvkeras {

// Throws Failure if there is none: before init(), or after shutdown().
std::shared_ptr<Engine> engine_of(int64_t group);

}  // namespace hvkeras
