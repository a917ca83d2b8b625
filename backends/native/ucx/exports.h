// The links that Python opens and connects, until their groups take them.
#pragma once

#include <cstdint>
#include <memory>

#include "../core/link.h"

namespace hvkeras::ucx {

// The connected link of a group. Throws Failure where there is none.
std::unique_ptr<Link> take_link(int64_t group);

}  // namespace hvkeras::ucx
